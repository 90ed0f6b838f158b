#include "memscale/core/session/first_steps.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "memscale/base/error.h"

namespace memscale {
namespace {

// 0.1234 as "12.3%".
std::string percent(double share) {
  const long long tenths = std::llround(share * 1000);
  return str(tenths < 0 ? "-" : "", std::abs(tenths) / 10, ".",
             std::abs(tenths) % 10, "%");
}

}  // namespace

std::string LedgerEntry::text() const {
  std::string text =
      str("peak ", measured_peak, " measured, ", predicted_peak, " predicted");
  if (measured_slowdown) {
    text += str("; ", percent(*measured_slowdown), " slower measured, ",
                percent(predicted_slowdown), " predicted");
  }
  return text;
}

FirstSteps::FirstSteps(const Plan& plan, std::int64_t num_steps,
                       bool skips_first)
    : predicted_peak_(plan.peak),
      predicted_slowdown_(
          plan.plain_nanoseconds == 0
              ? 0
              : static_cast<double>(plan.nanoseconds) /
                    static_cast<double>(plan.plain_nanoseconds)),
      left_(num_steps),
      skips_next_(skips_first) {}

void FirstSteps::add(const MeasuredStep& step) {
  if (is_done()) return;
  if (std::exchange(skips_next_, false)) return;
  --left_;
  LedgerEntry& entry = entries_.emplace_back();
  entry.predicted_peak = predicted_peak_;
  entry.predicted_slowdown = predicted_slowdown_;
  entry.measured_peak = step.training_peak();
  if (step.nanoseconds) {
    const std::int64_t replayed =
        std::max<std::int64_t>(step.nanoseconds_replayed, 0);
    const std::int64_t plain =
        std::max<std::int64_t>(*step.nanoseconds - replayed, 1);
    entry.measured_slowdown =
        static_cast<double>(replayed) / static_cast<double>(plain);
  }
}

Bytes FirstSteps::margin(const Tolerance& tolerance) const {
  Bytes most;
  for (const LedgerEntry& entry : entries_) {
    most = std::max(most, entry.measured_peak);
  }
  const double limit =
      static_cast<double>(predicted_peak_.count()) * (1 + tolerance.peak);
  return static_cast<double>(most.count()) > limit ? most - predicted_peak_
                                                   : Bytes();
}

bool FirstSteps::is_slow(const Tolerance& tolerance) const {
  std::optional<double> least;
  for (const LedgerEntry& entry : entries_) {
    if (!entry.measured_slowdown) continue;
    const double excess = *entry.measured_slowdown - entry.predicted_slowdown;
    least = least ? std::min(*least, excess) : excess;
  }
  return least && *least > tolerance.time;
}

}  // namespace memscale
