#include "memscale/runtime/tape_lock.h"

#include <atomic>

namespace memscale {
namespace {

std::atomic<WaitFor> wait_function = nullptr;

}  // namespace

void set_wait_for_tape(WaitFor wait) { wait_function = wait; }

void wait_for(std::mutex& mutex) {
  const WaitFor wait = wait_function;
  if (wait == nullptr) return mutex.lock();
  wait(mutex);
}

}  // namespace memscale
