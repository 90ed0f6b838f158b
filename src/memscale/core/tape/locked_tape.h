#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "memscale/core/tape/tape.h"

namespace memscale {

// Note [Waiting for a tape]
// Who replays may need Python's lock (kernels written in Python), so nobody may
// wait for a tape while holding that. What waits is a function that the
// bindings set: it lets go of Python's lock meanwhile. A program without Python
// needs none.
using WaitFor = void (*)(std::mutex&);
void set_wait_for_tape(WaitFor wait);

// A tape, recorded by one thread and then asked by any.
class LockedTape final {
 public:
  LockedTape(TapeRules rules, TapeBytes& bytes)
      : tape_(std::move(rules), bytes), bytes_(bytes) {}
  LockedTape(const LockedTape&) = delete;
  LockedTape& operator=(const LockedTape&) = delete;

  // Has the tape for itself while it lives. Releases that come meanwhile are
  // done at its end, and what was let go is freed there: bytes that are not
  // ours may belong to numpy, whose deleter wants Python's lock.
  class Access final {
   public:
    explicit Access(LockedTape& of);
    // Does not wait: false if another thread has it.
    Access(LockedTape& of, std::try_to_lock_t /*unused*/);
    ~Access();
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;

    explicit operator bool() const { return is_locked_; }
    Tape* operator->() const { return &of_.tape_; }

   private:
    LockedTape& of_;
    const bool is_locked_;
  };

  // Note [Releasing never waits]
  // A save ends wherever its last owner does: in any thread, with or without
  // Python's lock, even inside a replay of this very tape (a kernel in Python
  // lets the garbage collector run). So releases are queued; whoever can lock
  // the tape does them, and whoever has it locked does them afterwards.
  void release(StateId state) noexcept;

 private:
  void drain() noexcept;
  // Of mutex_: false also if this thread has it.
  bool try_lock_for_release() noexcept;
  void release_and_unlock(std::span<const StateId> states) noexcept;
  void set_owner(std::thread::id owner) {
    owner_.store(owner, std::memory_order_relaxed);
  }

  std::mutex mutex_;
  // Of mutex_. A thread only compares it with itself, so no order is needed.
  std::atomic<std::thread::id> owner_;
  Tape tape_;
  TapeBytes& bytes_;
  std::mutex queue_mutex_;
  std::vector<StateId> queue_;  // to be released
  std::atomic<std::size_t> num_queued_{0};
};

}  // namespace memscale
