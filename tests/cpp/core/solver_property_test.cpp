#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "memscale/core/solver/solver.h"

namespace memscale {
namespace {

// From all of the range, in the first test as in the last.
template <typename T>
T any_in(T from, T below) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange(from, below));
}

Bytes any_bytes(std::int64_t below) {
  return Bytes(any_in<std::int64_t>(0, below));
}

Problem any_problem(std::size_t max_layers, bool uses_host) {
  Problem problem;
  const auto num_lists = any_in<std::size_t>(1, 4);
  // Small numbers, so that there are ties; large ones, so that there are none.
  const auto below = *rc::gen::element<std::int64_t>(4, 20, 1'000'000'000);
  for (std::size_t i = 0; i < num_lists; ++i) {
    auto& options = problem.options.emplace_back();
    const auto num_options = any_in<std::size_t>(1, 6);
    for (std::size_t c = 0; c < num_options; ++c) {
      options.push_back({.held = any_bytes(below),
                         .forward_peak = any_bytes(below),
                         .backward_peak = any_bytes(below),
                         .host = uses_host ? any_bytes(below) : Bytes(),
                         .nanoseconds = any_in<std::int64_t>(0, below)});
    }
  }
  const auto num_layers = any_in<std::size_t>(0, max_layers + 1);
  for (std::size_t k = 0; k < num_layers; ++k) {
    problem.layers.push_back({.options = any_in<std::size_t>(0, num_lists),
                              .forward_base = any_bytes(below),
                              .backward_base = any_bytes(below)});
  }
  problem.other_peak = any_bytes(3 * below);
  problem.device_budget =
      any_bytes(below * static_cast<std::int64_t>(num_layers + 2));
  problem.host_budget =
      any_bytes(below * static_cast<std::int64_t>(num_layers + 1));
  return problem;
}

// Calls visit(plan) for every choice there is.
template <typename F>
void for_each_plan(const Problem& problem, const F& visit) {
  std::vector<std::size_t> choice(problem.layers.size(), 0);
  while (true) {
    visit(evaluate(problem, choice));
    std::size_t k = 0;
    while (k < choice.size() &&
           ++choice[k] == problem.options[problem.layers[k].options].size()) {
      choice[k++] = 0;
    }
    if (k == choice.size()) return;
  }
}

constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

std::int64_t least_time(const Problem& problem, Bytes budget) {
  std::int64_t best = kNone;
  for_each_plan(problem, [&](const Selection& plan) {
    if (plan.peak <= budget && plan.host <= problem.host_budget) {
      best = std::min(best, plan.nanoseconds);
    }
  });
  return best;
}

std::optional<Bytes> least_peak(const Problem& problem) {
  std::optional<Bytes> best;
  for_each_plan(problem, [&](const Selection& plan) {
    if (plan.host > problem.host_budget) return;
    best = best ? std::min(*best, plan.peak) : plan.peak;
  });
  return best;
}

TEST(SolverProperty, AsGoodAsTryingEverything) {
  ASSERT_TRUE(rc::check("brute force", [](bool uses_host) {
    const Problem problem = any_problem(7, uses_host);
    const SolveResult result = solve(problem);
    const std::int64_t best = least_time(problem, problem.device_budget);
    if (result.status == SolveStatus::Infeasible) {
      RC_ASSERT(best == kNone);
      RC_ASSERT(result.smallest_budget == least_peak(problem));
      if (!result.smallest_budget) return;
      RC_ASSERT(result.plan.peak <= *result.smallest_budget);
      RC_ASSERT(result.plan.nanoseconds ==
                least_time(problem, *result.smallest_budget));
    } else {
      RC_ASSERT(result.status == SolveStatus::Optimal);
      RC_ASSERT(result.plan.nanoseconds == best);
      RC_ASSERT(result.plan.peak <= problem.device_budget);
    }
    RC_ASSERT(result.plan.host <= problem.host_budget);
    RC_ASSERT(result.lower_bound == result.plan.nanoseconds);
    RC_ASSERT(result.plan == evaluate(problem, result.plan.choice));
  }));
}

// With so few states that nearly all are given up.
TEST(SolverProperty, BoundsHoldWhenStatesAreGivenUp) {
  ASSERT_TRUE(rc::check("bounds", [](bool uses_host) {
    const Problem problem = any_problem(7, uses_host);
    const auto num_states = any_in<std::size_t>(1, 4);
    const SolveResult result = solve(problem, {.num_states = num_states});
    if (result.status == SolveStatus::Infeasible) return;
    const std::int64_t best = least_time(problem, problem.device_budget);
    RC_ASSERT(result.lower_bound <= best);
    RC_ASSERT(best <= result.plan.nanoseconds);
    RC_ASSERT(result.plan.peak <= problem.device_budget);
    RC_ASSERT(result.plan.host <= problem.host_budget);
    if (result.status == SolveStatus::Optimal) {
      RC_ASSERT(result.plan.nanoseconds == best);
    }
  }));
}

TEST(SolverProperty, MoreBudgetIsNeverSlower) {
  ASSERT_TRUE(rc::check("monotone", [](bool uses_host) {
    Problem problem = any_problem(12, uses_host);
    const SolveResult less = solve(problem);
    problem.device_budget += any_bytes(problem.device_budget.count() + 2);
    const SolveResult more = solve(problem);
    RC_PRE(less.status != SolveStatus::Infeasible);
    RC_ASSERT(less.status == SolveStatus::Optimal);
    RC_ASSERT(more.status == SolveStatus::Optimal);
    RC_ASSERT(more.plan.nanoseconds <= less.plan.nanoseconds);
  }));
}

TEST(SolverProperty, TheFrontierIsWhole) {
  ASSERT_TRUE(rc::check("pareto", [](bool uses_host) {
    const Problem problem = any_problem(4, uses_host);
    const auto max_points = *rc::gen::element<std::size_t>(1, 3, 600);
    const auto points = pareto(problem, max_points);
    RC_ASSERT(points.size() <= max_points);
    RC_ASSERT(points.empty() == !least_peak(problem).has_value());
    if (points.empty()) return;
    RC_ASSERT(points.front().plan.peak == *least_peak(problem));
    for (std::size_t i = 0; i < points.size(); ++i) {
      const Selection& plan = points[i].plan;
      RC_ASSERT(plan.nanoseconds == least_time(problem, plan.peak));
      if (i == 0) continue;
      RC_ASSERT(points[i - 1].plan.peak < plan.peak);
      RC_ASSERT(points[i - 1].plan.nanoseconds > plan.nanoseconds);
    }
    if (max_points < 600) return;
    for_each_plan(problem, [&](const Selection& plan) {
      if (plan.host > problem.host_budget) return;
      RC_ASSERT(std::ranges::any_of(points, [&](const SolveResult& point) {
        return point.plan.peak <= plan.peak &&
               point.plan.nanoseconds <= plan.nanoseconds;
      }));
    });
  }));
}

}  // namespace
}  // namespace memscale
