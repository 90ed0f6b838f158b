#pragma once

namespace memscale {

// While one lives, ops of this thread are our own: no tape records them.
class Unobserved final {
 public:
  Unobserved() { ++depth_; }
  ~Unobserved() { --depth_; }
  Unobserved(const Unobserved&) = delete;
  Unobserved& operator=(const Unobserved&) = delete;

  static bool is_on() { return depth_ > 0; }

 private:
  inline static thread_local int depth_ = 0;
};

}  // namespace memscale
