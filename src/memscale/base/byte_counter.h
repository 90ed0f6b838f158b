#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace memscale {

// Bytes in use now and the most ever in use since the last reset.
// Thread-safe and lock-free; not copyable. A reader may see `current` and
// `peak` of two neighbouring instants, never a peak that was not reached.
class ByteCounter final {
 public:
  void add(int64_t bytes) noexcept {
    raise_peak(current_.fetch_add(bytes) + bytes);
  }

  // Adds unless the sum would exceed `limit`; returns whether it did.
  bool try_add(int64_t bytes, int64_t limit) noexcept {
    int64_t seen = current_.load();
    do {
      if (bytes > limit - seen) return false;
    } while (!current_.compare_exchange_weak(seen, seen + bytes));
    raise_peak(seen + bytes);
    return true;
  }

  void subtract(int64_t bytes) noexcept { current_.fetch_sub(bytes); }
  void reset_peak() noexcept { peak_.store(current_.load()); }

  int64_t current() const noexcept { return current_.load(); }
  // Not below current(), also while reset_peak() races with add().
  int64_t peak() const noexcept { return std::max(peak_.load(), current()); }

 private:
  void raise_peak(int64_t now) noexcept {
    int64_t seen = peak_.load();
    while (seen < now && !peak_.compare_exchange_weak(seen, now)) {
    }
  }

  std::atomic<int64_t> current_{0};
  std::atomic<int64_t> peak_{0};
};

}  // namespace memscale
