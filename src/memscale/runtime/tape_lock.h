#pragma once

#include <mutex>
#include <utility>

#include "memscale/runtime/tape.h"
#include "memscale/runtime/unobserved.h"

namespace memscale {

// Note [Waiting for a tape]
// Who replays may need the GIL (kernels written in Python), so nobody may wait
// for a tape while holding it. What waits is a function that the bindings set:
// it lets go of the GIL meanwhile. A program without Python needs none.
using WaitFor = void (*)(std::mutex&);
void set_wait_for_tape(WaitFor wait);
void wait_for(std::mutex& mutex);

// Holds the tape's mutex; ops called meanwhile are our own. Releases that came
// meanwhile are done at its end; see Tape::release.
class Tape::Locked final {
 public:
  explicit Locked(Tape& tape) : tape_(tape) {
    if (!tape_.mutex_.try_lock()) wait_for(tape_.mutex_);
    tape_.owner_ = std::this_thread::get_id();
  }
  Locked(Tape& tape, std::try_to_lock_t /*unused*/)
      : tape_(tape), is_locked_(tape.mutex_.try_lock()) {
    if (is_locked_) tape_.owner_ = std::this_thread::get_id();
  }
  ~Locked() {
    if (!is_locked_) return;
    const auto buried = std::exchange(tape_.buried_, {});
    tape_.owner_ = std::thread::id();
    tape_.mutex_.unlock();
    tape_.drain();
  }
  explicit operator bool() const { return is_locked_; }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  Tape& tape_;
  const bool is_locked_ = true;
  const Unobserved unobserved_;
};

}  // namespace memscale
