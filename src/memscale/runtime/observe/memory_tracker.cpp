#include "memscale/runtime/observe/memory_tracker.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "memscale/hostmem/host_allocator.h"

namespace memscale {

std::mutex MemoryTracker::mutex_;
std::vector<MemoryTracker*> MemoryTracker::running_;

MemoryTracker::MemoryTracker(c10::Device device, bool resets)
    : device_(device), resets_(resets || device.is_cpu()) {
  TORCH_CHECK_VALUE(device.is_cpu() || dynamic_cast<c10::DeviceAllocator*>(
                                           c10::GetAllocator(device.type())),
                    "memory of device '", device,
                    "' cannot be tracked: its allocator keeps "
                    "no statistics");
  if (device.is_cpu()) {
    device_ = c10::Device(c10::DeviceType::CPU);  // "cpu:0" is "cpu"
  } else if (!device.has_index()) {
    device_ = c10::impl::getDeviceGuardImpl(device.type())->getDevice();
  }
}

MemoryTracker::~MemoryTracker() {
  const std::lock_guard lock(mutex_);
  std::erase(running_, this);
}

MemoryTracker::Usage MemoryTracker::read() const {
  if (device_.is_cpu()) {
    const hostmem::Counters counters = hostmem::counters();
    return {counters.current, counters.peak};
  }
  c10::DeviceAllocator* allocator = c10::getDeviceAllocator(device_.type());
  if (!allocator->initialized()) return {};
  const auto stats = allocator->getDeviceStats(device_.index());
  const auto& bytes = stats.allocated_bytes[static_cast<size_t>(
      c10::CachingAllocator::StatType::AGGREGATE)];
  return {bytes.current, bytes.peak};
}

int64_t MemoryTracker::peak_in(const Usage& usage) const {
  // One that is lower than at start was reset since, by somebody else.
  return usage.peak == peak_at_start_ ? usage.current : usage.peak;
}

// Note [One peak, many trackers]
// A device keeps one peak, and starting a tracker resets it. So before each
// reset the peak so far is banked in every running tracker of that device;
// a tracker's peak is the larger of what it banked and what the device shows.
void MemoryTracker::start() {
  const std::lock_guard lock(mutex_);
  TORCH_CHECK(!is_running_, "this memory tracker is already running");
  for (MemoryTracker* other : running_) {
    if (other->device_ != device_) continue;
    other->banked_peak_ = std::max(other->banked_peak_, other->peak_in(read()));
    if (resets_) other->peak_at_start_ = 0;
  }
  peak_at_start_ = resets_ ? 0 : read().peak;
  if (!resets_) {
    // Whoever reads the device's statistics may go on.
  } else if (device_.is_cpu()) {
    hostmem::reset_peak();
  } else if (auto* allocator = c10::getDeviceAllocator(device_.type());
             allocator->initialized()) {
    allocator->resetPeakStats(device_.index());
  }
  before_ = read().current;
  banked_peak_ = before_;
  is_running_ = was_started_ = true;
  running_.push_back(this);
}

void MemoryTracker::stop() {
  const std::lock_guard lock(mutex_);
  if (!is_running_) return;
  last_ = read();
  banked_peak_ = std::max(banked_peak_, peak_in(last_));
  is_running_ = false;
  std::erase(running_, this);
}

void MemoryTracker::check_started() const {
  TORCH_CHECK(was_started_, "this memory tracker was never started");
}

int64_t MemoryTracker::current() const {
  const std::lock_guard lock(mutex_);
  check_started();
  return is_running_ ? read().current : last_.current;
}

int64_t MemoryTracker::peak() const {
  const std::lock_guard lock(mutex_);
  check_started();
  return is_running_ ? std::max(banked_peak_, peak_in(read())) : banked_peak_;
}

int64_t MemoryTracker::before() const {
  const std::lock_guard lock(mutex_);
  check_started();
  return before_;
}

}  // namespace memscale
