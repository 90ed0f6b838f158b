#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/core/plan/plan.h"

namespace memscale {

// One step: what was predicted, and what was measured. A slowdown of 0.25: a
// step takes 25 % longer. No time is measured where a device tells none.
struct LedgerEntry {
  Bytes predicted_peak;
  Bytes measured_peak;
  double predicted_slowdown = 0;
  std::optional<double> measured_slowdown;

  // "peak 1.00 GiB measured, 1.01 GiB predicted; ...".
  std::string text() const;

  bool operator==(const LedgerEntry&) const = default;
};

// What one step of training showed.
struct MeasuredStep {
  Bytes before;  // allocated when the step began
  Bytes peak;    // the most that was allocated during it
  // How long the step took, and how much of that was replay. None: the device
  // does not tell.
  std::optional<std::int64_t> nanoseconds;
  std::int64_t nanoseconds_replayed = 0;
  // Of what was allocated when the step began, this training's own:
  // parameters, gradients, buffers, optimizer state, the batch. Given where a
  // process has other tensors beside them (on the CPU). None: all of it is.
  std::optional<Bytes> held = std::nullopt;

  // The most that this training took, in bytes that a budget counts.
  Bytes training_peak() const { return held ? *held + peak - before : peak; }
};

// How far a step may be off before a plan is made anew: its peak by a share of
// the predicted one, its slowdown by a share of a step. A budget has no
// tolerance.
struct Tolerance {
  double peak = 0.03;
  double time = 0.05;
};

// The first steps under one plan.
class FirstSteps final {
 public:
  // `num_steps`: so many are measured. `skips_first`: one more, before them, is
  // left out: the optimizer makes its state in it.
  FirstSteps(const Plan& plan, std::int64_t num_steps, bool skips_first);

  bool is_done() const { return left_ == 0; }
  void add(const MeasuredStep& step);
  const std::vector<LedgerEntry>& entries() const { return entries_; }

  // The bytes by which the prediction was too low; 0: it was near enough.
  Bytes margin(const Tolerance& tolerance) const;
  // Whether all steps were slower than predicted. The fastest counts: whatever
  // else the machine did meanwhile, it took no less.
  bool is_slow(const Tolerance& tolerance) const;

 private:
  Bytes predicted_peak_;
  double predicted_slowdown_;  // by replay, which is what is measured
  std::int64_t left_;
  bool skips_next_;
  std::vector<LedgerEntry> entries_;
};

}  // namespace memscale
