#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/base/enum_names.h"

// Which option for each layer, so that a step is fastest and fits at every
// instant. Plain values; integers throughout: the same on every host.

namespace memscale {

// One way to run a layer. No field may be negative.
struct Option {
  Bytes held{};                  // from the layer's forward to its backward
  Bytes forward_peak{};          // beyond held, while its forward runs
  Bytes backward_peak{};         // beyond held, while its backward runs
  Bytes host{};                  // of the host's memory, for all of the step
  std::int64_t nanoseconds = 0;  // what it costs

  bool operator==(const Option&) const = default;
};

struct ProblemLayer {
  std::size_t options = 0;  // which list of Problem::options
  // All that is there beside what layers hold: parameters, gradients so far,
  // optimizer state.
  Bytes forward_base{};
  Bytes backward_base{};
};

struct Problem {
  std::vector<std::vector<Option>> options;  // equal layers share a list
  std::vector<ProblemLayer> layers;          // in the order of forward
  Bytes other_peak;  // at instants that no choice changes
  Bytes device_budget;
  Bytes host_budget;

  // Throws PlanError if a list is missing or empty, a number is negative, or
  // sums are of more than 50 bits.
  void check() const;
};

// Layers' choices, and what comes of them.
struct Selection {
  std::vector<std::size_t> choice;  // by layer: which of its options
  std::int64_t nanoseconds = 0;
  Bytes peak;
  Bytes host;

  bool operator==(const Selection&) const = default;
};

enum class SolveStatus : std::uint8_t { Optimal, Feasible, Infeasible };

template <>
struct EnumNames<SolveStatus> {
  static constexpr std::string_view kWhat = "solve status";
  static constexpr SolveStatus kLast = SolveStatus::Infeasible;
  static constexpr std::array kTable = {
      EnumName{SolveStatus::Optimal, "optimal"},
      EnumName{SolveStatus::Feasible, "feasible"},
      EnumName{SolveStatus::Infeasible, "infeasible"}};
};

struct SolveResult {
  SolveStatus status = SolveStatus::Infeasible;
  // The fastest that fits, or (Feasible) the fastest that was found. If none
  // fits: the fastest at the smallest budget that works; empty if none does.
  Selection plan;
  // No plan under the budget (Infeasible: under the smallest one) is faster.
  std::int64_t lower_bound = 0;
  // If none fits: the smallest device budget that works; empty if the host's
  // budget is too small for any.
  std::optional<Bytes> smallest_budget;

  // How much slower than the best the plan may be, at most: 0.01 is 1 %.
  double gap() const;
};

// How hard to try.
struct SolveLimits {
  // Partial plans that are looked at, layer by layer (fewer, if there are very
  // many layers). With more than this left, those least likely to be good are
  // given up, and the result may be Feasible.
  std::size_t num_states = 20'000;
  // A plan this near to the best will do: 0.01 is 1 %.
  double gap = 0.0;
};

// The peak and the time of these choices. Throws PlanError if there is not one
// for each layer, or one is out of range.
Selection evaluate(const Problem& problem, std::vector<std::size_t> choice);

// Never slower with a larger budget, where both results are Optimal.
SolveResult solve(const Problem& problem, const SolveLimits& limits = {});

// Plans from the smallest peak that works to the peak of the fastest: all that
// are best, if there are at most `max_points`, else as many, spread evenly over
// budgets. Peaks rise, times fall strictly, and no plan with such a peak or
// less is faster than the one given for it. problem.device_budget is not used.
// Empty if the host's budget is too small.
std::vector<SolveResult> pareto(const Problem& problem, std::size_t max_points,
                                const SolveLimits& limits = {});

}  // namespace memscale
