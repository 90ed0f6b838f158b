#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "memscale/runtime/replay/op_timer.h"

namespace memscale {

// Counts since the start or the last reset. Thread-safe.
struct ReplayStats {
  std::atomic<std::size_t> saves_kept{0};
  std::atomic<std::size_t> saves_dropped{0};
  std::atomic<std::size_t> bytes_kept{0};  // each state once
  std::atomic<std::size_t> bytes_dropped{0};
  std::atomic<std::size_t> ops_recorded{0};
  std::atomic<std::size_t> ops_replayed{0};
  std::atomic<std::size_t> bytes_copied{0};  // before a write in place
  std::atomic<std::size_t> calls_unlike_keep_set{0};
  // In which ops were called again; of devices that compute on their own only
  // while times_devices, and only what was settled. See Note [Times of
  // devices].
  std::atomic<std::size_t> nanoseconds_replayed{0};
  std::atomic<bool> times_devices{false};

  void add_time(const Moment& start, const Moment& end) {
    nanoseconds_replayed += static_cast<std::size_t>(end.since(start).count());
  }

  // Waits for devices that are being timed.
  void settle() {
    std::vector<std::pair<Moment, Moment>> done;
    {
      const std::lock_guard lock(mutex);
      done.swap(spans);
    }
    for (const auto& [start, end] : done) add_time(start, end);
  }

  void count_reason(const std::string& reason) {
    const std::lock_guard lock(mutex);
    ++reasons[reason];
  }

  void reset() {
    for (auto* count :
         {&saves_kept, &saves_dropped, &bytes_kept, &bytes_dropped,
          &ops_recorded, &ops_replayed, &bytes_copied, &calls_unlike_keep_set,
          &nanoseconds_replayed}) {
      *count = 0;
    }
    const std::lock_guard lock(mutex);
    reasons.clear();
    spans.clear();
  }

  std::mutex mutex;
  std::map<std::string, std::size_t> reasons;  // why saves could not be dropped
  std::vector<std::pair<Moment, Moment>> spans;  // not settled yet
};

}  // namespace memscale
