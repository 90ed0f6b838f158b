#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>

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
  // In which ops were called again, as the calling thread sees it: on devices
  // that compute on their own, only the launching.
  std::atomic<std::size_t> nanoseconds_replayed{0};

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
  }

  std::mutex mutex;
  std::map<std::string, std::size_t> reasons;  // why saves could not be dropped
};

}  // namespace memscale
