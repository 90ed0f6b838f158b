#include "memscale/core/tape/locked_tape.h"

#include <memory>

namespace memscale {
namespace {

std::atomic<WaitFor> wait_function = nullptr;

void lock(std::mutex& mutex) {
  if (mutex.try_lock()) return;
  const WaitFor wait = wait_function;
  if (wait == nullptr) return mutex.lock();
  wait(mutex);
}

}  // namespace

void set_wait_for_tape(WaitFor wait) { wait_function = wait; }

LockedTape::Access::Access(LockedTape& of) : of_(of), is_locked_(true) {
  lock(of_.mutex_);
  of_.set_owner(std::this_thread::get_id());
}

LockedTape::Access::Access(LockedTape& of, std::try_to_lock_t /*unused*/)
    : of_(of), is_locked_(of.mutex_.try_lock()) {
  if (is_locked_) of_.set_owner(std::this_thread::get_id());
}

LockedTape::Access::~Access() {
  if (!is_locked_) return;
  const std::shared_ptr<void> dead = of_.bytes_.take_dead();
  of_.set_owner({});
  of_.mutex_.unlock();
  of_.drain();
}

bool LockedTape::try_lock_for_release() noexcept {
  return owner_.load(std::memory_order_relaxed) != std::this_thread::get_id() &&
         mutex_.try_lock();
}

void LockedTape::release_and_unlock(std::span<const StateId> states) noexcept {
  set_owner(std::this_thread::get_id());
  tape_.release(states);
  const std::shared_ptr<void> dead = bytes_.take_dead();
  set_owner({});
  mutex_.unlock();
}

void LockedTape::release(StateId state) noexcept {
  // Mostly nobody else is there, and no queue is needed.
  if (num_queued_ == 0 && try_lock_for_release()) {
    release_and_unlock({&state, 1});
    return drain();
  }
  {
    const std::lock_guard guard(queue_mutex_);
    queue_.push_back(state);
    ++num_queued_;
  }
  drain();
}

void LockedTape::drain() noexcept {
  while (num_queued_ > 0 && try_lock_for_release()) {
    std::vector<StateId> released;
    {
      const std::lock_guard guard(queue_mutex_);
      released.swap(queue_);
      num_queued_ -= released.size();
    }
    release_and_unlock(released);
  }
}

}  // namespace memscale
