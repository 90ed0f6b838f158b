#pragma once

#include "memscale/runtime/tape.h"
#include "memscale/runtime/unobserved.h"

namespace memscale {

// Holds the tape's mutex; ops called meanwhile are our own. Releases that came meanwhile are done at its end; see
// Tape::release.
class Tape::Locked final {
 public:
  explicit Locked(Tape& tape) : tape_(tape) {
    tape_.mutex_.lock();
    tape_.owner_ = std::this_thread::get_id();
  }
  ~Locked() {
    tape_.owner_ = std::thread::id();
    tape_.mutex_.unlock();
    tape_.drain();
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  Tape& tape_;
  const Unobserved unobserved_;
};

}  // namespace memscale
