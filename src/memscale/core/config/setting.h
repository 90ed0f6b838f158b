#pragma once

#include <memory>
#include <utility>

namespace memscale {

// A field of a config: a value that remembers whether it was assigned, because
// what the user says overrides what the mode would choose.
//   config.warmup_steps = 3;            // assigned: is_set() from now on
//   int64_t steps = config.warmup_steps;  // reads like the plain value
template <typename T>
class Setting final {
 public:
  Setting() = default;
  // The default, not yet set by anyone.
  explicit Setting(T value) : value_(std::move(value)) {}

  Setting& operator=(T value) {
    value_ = std::move(value);
    is_set_ = true;
    return *this;
  }

  operator const T&() const { return value_; }  // NOLINT(*-explicit-*)
  const T& get() const { return value_; }
  const T& operator*() const { return value_; }
  bool is_set() const { return is_set_; }

 private:
  T value_{};
  bool is_set_ = false;
};

// An optional record with the copies of a value and the lifetime of a handle:
// copying the box copies the record, but a binding can hand the record itself
// to Python (share()), so that `config.async_config.debug = True` writes into
// the config instead of into a copy that nobody reads. That is why it is a
// shared_ptr inside.
template <typename T>
class Box final {
 public:
  Box() = default;
  Box(T value)  // NOLINT(*-explicit-*)
      : held_(std::make_shared<T>(std::move(value))) {}
  Box(const Box& other)
      : held_(other ? std::make_shared<T>(*other) : nullptr) {}
  Box(Box&&) noexcept = default;
  Box& operator=(Box other) noexcept {
    held_ = std::move(other.held_);
    return *this;
  }
  ~Box() = default;

  explicit operator bool() const { return held_ != nullptr; }
  const T& operator*() const { return *held_; }
  const T* operator->() const { return held_.get(); }
  T& operator*() { return *held_; }
  T* operator->() { return held_.get(); }
  const std::shared_ptr<T>& share() const { return held_; }

 private:
  std::shared_ptr<T> held_;
};

}  // namespace memscale
