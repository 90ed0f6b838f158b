#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

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

// Keys of what stands between a call and its kernel: dispatch modes and vmap.
inline constexpr c10::DispatchKeySet kModes =
    c10::python_ks |
    c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                         c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                         c10::DispatchKey::FuncTorchVmapMode,
                         c10::DispatchKey::VmapMode});

// Holds the tape's mutex; ops called meanwhile are our own, and no mode that is
// on, in backward say, sees or changes them. Releases that came
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
  const c10::impl::ExcludeDispatchKeyGuard without_modes_{kModes};
};

}  // namespace memscale
