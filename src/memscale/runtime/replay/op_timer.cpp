#include "memscale/runtime/replay/op_timer.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>

#include "memscale/runtime/observe/op_info.h"
#include "memscale/runtime/replay/replay_stats.h"

namespace memscale {
namespace {

c10::Event event_now(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(guard.getStream(device));
  return event;
}

bool has_timing_events(c10::Device device) {
  if (!c10::impl::hasDeviceGuardImpl(device.type())) return false;
  try {
    const c10::Event start = event_now(device);
    const c10::Event end = event_now(device);
    end.synchronize();
    return start.elapsedTime(end) >= 0;
  } catch (const std::exception&) {  // it has no events, or they have no time
    return false;
  }
}

}  // namespace

bool can_time(c10::Device device) {
  enum class Known : std::uint8_t { NotYet, Yes, No };
  static std::array<std::atomic<Known>, c10::COMPILE_TIME_MAX_DEVICE_TYPES>
      timed{};
  if (device.is_cpu()) return true;
  auto& known = timed.at(static_cast<std::size_t>(device.type()));
  if (known == Known::NotYet) {
    known = has_timing_events(device) ? Known::Yes : Known::No;
  }
  return known == Known::Yes;
}

Moment Moment::now(c10::Device device) {
  Moment moment;
  if (device.is_cpu()) {
    moment.time_ = Clock::now();
  } else {
    moment.event_.emplace(event_now(device));
  }
  return moment;
}

std::chrono::nanoseconds Moment::since(const Moment& start) const {
  if (time_ && start.time_) return *time_ - *start.time_;
  if (!event_ || !start.event_) return {};
  start.event_->synchronize();
  event_->synchronize();
  const double milliseconds = start.event_->elapsedTime(*event_);
  return std::chrono::nanoseconds(std::llround(milliseconds * 1e6));
}

ReplayClock::ReplayClock(ReplayStats& stats, c10::Device device)
    : stats_(stats),
      device_(device),
      is_on_(device.is_cpu() || (stats.times_devices && can_time(device))) {
  if (is_on_) start_ = Moment::now(device_);
}

ReplayClock::~ReplayClock() {
  if (!is_on_) return;
  try {
    Moment end = Moment::now(device_);
    if (device_.is_cpu()) {
      stats_.add_time(start_, end);
    } else {
      const std::lock_guard lock(stats_.mutex);
      stats_.spans.emplace_back(std::move(start_), std::move(end));
    }
  } catch (const std::exception&) {  // no event to be had: this one is lost
  }
}

OpTimer::OpTimer(c10::Device device) : device_(device) {}

Moment OpTimer::now() const noexcept {
  try {
    return can_time(device_) ? Moment::now(device_) : Moment();
  } catch (const std::exception&) {  // no event to be had: this op is lost
    return {};
  }
}

void OpTimer::add_call(std::vector<OpSpan> ops,
                       std::shared_ptr<OpTimes> times) {
  if (times == nullptr || !can_time(device_)) return;
  {
    const std::lock_guard lock(mutex_);
    calls_.push_back({std::move(ops), std::move(times)});
  }
  if (device_.is_cpu()) settle();
}

void OpTimer::settle() {
  std::vector<Call> calls;
  {
    const std::lock_guard lock(mutex_);
    calls.swap(calls_);
  }
  for (const Call& call : calls) {
    std::vector<TimedOp> timed;
    timed.reserve(call.ops.size());
    for (const OpSpan& op : call.ops) {
      timed.push_back({op.layer, op.op->name, op.end.since(op.start).count()});
    }
    call.times->add_call(timed);
  }
}

}  // namespace memscale
