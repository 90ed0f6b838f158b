#include <algorithm>
#include <optional>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/solver/instance.h"
#include "memscale/core/solver/solver.h"

namespace memscale {
namespace {

// Plans found so far, the largest peak first.
class Frontier {
 public:
  // `result` has a smaller peak than those before, or is one of them.
  void add(SolveResult result) {
    if (!points_.empty() && result.plan.peak >= points_.back().plan.peak) {
      return;
    }
    while (!points_.empty() &&
           result.plan.nanoseconds <= points_.back().plan.nanoseconds) {
      points_.pop_back();
    }
    points_.push_back(std::move(result));
  }
  std::size_t size() const { return points_.size(); }
  std::vector<SolveResult> take() {
    std::ranges::reverse(points_);
    return std::move(points_);
  }

 private:
  std::vector<SolveResult> points_;
};

}  // namespace

std::vector<SolveResult> pareto(const Problem& problem, std::size_t max_points,
                                const SolveLimits& limits) {
  problem.check();
  if (max_points == 0) throw PlanError("max_points must be >= 1, got 0");
  const solver::Instance instance(problem);
  const auto smallest = smallest_budget(instance, limits.num_states);
  if (!smallest) return {};
  Problem limited = problem;
  const auto solve_under = [&](std::int64_t budget) {
    limited.device_budget = Bytes(budget);
    return solve(limited, limits);
  };

  // All of them, from the fastest on, if that does not take too many steps.
  const SolveResult fastest = solve_under(solver::kNoLimit.count());
  Frontier all;
  SolveResult last = fastest;
  for (std::size_t i = 0; i < 2 * max_points; ++i) {
    const std::int64_t peak = last.plan.peak.count();
    all.add(std::move(last));
    if (all.size() > max_points) break;
    if (peak <= smallest->budget) return all.take();
    last = solve_under(peak - 1);
  }

  Frontier some;
  const std::int64_t span = fastest.plan.peak.count() - smallest->budget;
  const auto num_gaps = static_cast<std::int64_t>(max_points - 1);
  for (std::int64_t i = num_gaps; i >= 0; --i) {
    // In this order: nothing overflows.
    const std::int64_t part =
        num_gaps == 0 ? 0
                      : span / num_gaps * i + span % num_gaps * i / num_gaps;
    some.add(solve_under(smallest->budget + part));
  }
  return some.take();
}

}  // namespace memscale
