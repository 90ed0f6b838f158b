#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "memscale/core/time/op_times.h"

// Note [Times of devices]
// A device that computes on its own is called and goes on alone: how long the
// call takes says nothing. It is asked for its own times, by events in its
// streams, and they are read when it is through. Where it has none to give,
// nothing is measured: the time of a launch never reaches a plan.

namespace memscale {

struct OpInfo;
struct ReplayStats;

// Whether work on the device can be timed: on the CPU by the clock, elsewhere
// by events. Found out once for each type of device.
bool can_time(c10::Device device);

// When what this thread has called so far on the device is done.
class Moment final {
 public:
  Moment() = default;  // never
  static Moment now(c10::Device device);

  // From then to this one. Waits for the device. Zero if one is never.
  std::chrono::nanoseconds since(const Moment& start) const;

 private:
  using Clock = std::chrono::steady_clock;
  std::optional<Clock::time_point> time_;
  std::optional<c10::Event> event_;
};

// Adds how long its life took on the device to stats.nanoseconds_replayed. Of
// other devices than the CPU only while stats.times_devices.
class ReplayClock final {
 public:
  ReplayClock(ReplayStats& stats, c10::Device device);
  ~ReplayClock();
  ReplayClock(const ReplayClock&) = delete;
  ReplayClock& operator=(const ReplayClock&) = delete;

 private:
  ReplayStats& stats_;
  const c10::Device device_;
  const bool is_on_;
  Moment start_;
};

// An op of forward that was called.
struct OpSpan {
  std::size_t layer = 0;
  const OpInfo* op = nullptr;
  Moment start;
  Moment end;
};

// Ops of calls on one device, until it has told how long they took.
// Thread-safe.
class OpTimer final {
 public:
  explicit OpTimer(c10::Device device);

  // Never, if the device cannot be timed.
  Moment now() const noexcept;
  void add_call(std::vector<OpSpan> ops, std::shared_ptr<OpTimes> times);
  // Waits for the device, and gives all to where they belong.
  void settle();

 private:
  struct Call {
    std::vector<OpSpan> ops;
    std::shared_ptr<OpTimes> times;
  };
  const c10::Device device_;
  std::mutex mutex_;
  std::vector<Call> calls_;
};

}  // namespace memscale
