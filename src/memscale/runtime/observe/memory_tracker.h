#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace memscale {

// Bytes allocated on one device, now and at the most, between start() and
// stop(). On the CPU: tensors made since memscale was loaded (hostmem). On an
// accelerator: its allocator's own statistics, whose peak is reset at start,
// because they keep only one. Unless `resets` is false: then the statistics
// stay as they are, for whoever reads them, and a peak below the one that they
// had before is not seen; peak() is then what was allocated at the ends.
//
// Trackers of one device may overlap in any way: see Note [One peak, many
// trackers]. Thread-safe. Not copyable.
class MemoryTracker final {
 public:
  explicit MemoryTracker(c10::Device device, bool resets = true);
  ~MemoryTracker();
  MemoryTracker(const MemoryTracker&) = delete;
  MemoryTracker& operator=(const MemoryTracker&) = delete;

  void start();
  void stop();

  c10::Device device() const { return device_; }
  int64_t current() const;  // now; at stop() once stopped
  int64_t peak() const;     // since start()
  int64_t before() const;   // at start()

 private:
  struct Usage {
    int64_t current = 0;
    int64_t peak = 0;
  };
  Usage read() const;
  // The most that is known to have been allocated since start().
  int64_t peak_in(const Usage& usage) const;
  void check_started() const;

  static std::mutex mutex_;
  static std::vector<MemoryTracker*> running_;

  c10::Device device_;
  bool resets_;
  int64_t peak_at_start_ = 0;  // of the device; 0 once it was reset
  bool is_running_ = false;
  bool was_started_ = false;
  int64_t before_ = 0;
  int64_t banked_peak_ = 0;
  Usage last_;
};

}  // namespace memscale
