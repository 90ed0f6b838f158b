#include "memscale/core/solver/solver.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <random>

#include "memscale/base/error.h"
#include "solver_problems.h"

namespace memscale {
namespace {

TEST(Solve, TakesTheFastestThatFits) {
  Problem problem = problem_of({{{.held = 100_B, .nanoseconds = 0},
                                 {.held = 60_B, .nanoseconds = 5},
                                 {.held = 10_B, .nanoseconds = 50}}},
                               1);
  problem.device_budget = 99_B;
  const SolveResult result = solve(problem);
  EXPECT_EQ(result.status, SolveStatus::Optimal);
  EXPECT_EQ(result.plan, (Selection{{1}, 5, 60_B, 0_B}));
  EXPECT_EQ(result.lower_bound, 5);
  EXPECT_EQ(result.gap(), 0.0);
  EXPECT_EQ(result.smallest_budget, std::nullopt);
  problem.device_budget = 100_B;
  EXPECT_EQ(solve(problem).plan.choice, std::vector<std::size_t>{0});
}

TEST(Solve, LayersBeforeStillHoldTheirs) {
  // Dropping costs less in the second layer, but in the first one it also
  // makes room for the second one's large forward.
  Problem problem =
      problem_of({{{.held = 10_B, .nanoseconds = 0}, {.nanoseconds = 9}},
                  {{.held = 10_B, .forward_peak = 90_B, .nanoseconds = 0},
                   {.held = 5_B, .forward_peak = 95_B, .nanoseconds = 1}}},
                 1);
  problem.device_budget = 109_B;
  const SolveResult result = solve(problem);
  EXPECT_EQ(result.plan.choice, (std::vector<std::size_t>{1, 0}));
  EXPECT_EQ(result.plan.peak, 100_B);
}

TEST(Solve, CountsBackwardWithWhatIsThereThen) {
  Problem problem =
      problem_of({{{.held = 10_B, .nanoseconds = 0},
                   {.backward_peak = 10_B, .nanoseconds = 1},
                   {.held = 4_B, .backward_peak = 3_B, .nanoseconds = 2}}},
                 1);
  problem.layers[0].forward_base = 50_B;
  problem.layers[0].backward_base = 70_B;
  problem.device_budget = 79_B;
  EXPECT_EQ(solve(problem).plan, (Selection{{2}, 2, 77_B, 0_B}));
  problem.device_budget = 80_B;
  EXPECT_EQ(solve(problem).plan, (Selection{{0}, 0, 80_B, 0_B}));
}

TEST(Solve, SaysTheSmallestBudgetThatWorks) {
  Problem problem = problem_of({{{.held = 10_B, .nanoseconds = 0},
                                 {.held = 2_B, .nanoseconds = 4},
                                 {.held = 2_B, .nanoseconds = 3}}},
                               3);
  problem.device_budget = 5_B;
  SolveResult result = solve(problem);
  EXPECT_EQ(result.status, SolveStatus::Infeasible);
  EXPECT_EQ(result.smallest_budget, 6_B);
  EXPECT_EQ(result.plan, (Selection{{2, 2, 2}, 9, 6_B, 0_B}));
  problem.other_peak = 14_B;
  result = solve(problem);
  EXPECT_EQ(result.status, SolveStatus::Infeasible);
  EXPECT_EQ(result.smallest_budget, 14_B);
  EXPECT_EQ(result.plan.nanoseconds, 6);
}

TEST(Solve, KeepsToTheHostsBudget) {
  Problem problem = problem_of({{{.held = 10_B, .nanoseconds = 0},
                                 {.held = 1_B, .host = 9_B, .nanoseconds = 1},
                                 {.held = 1_B, .nanoseconds = 7}}},
                               4);
  problem.device_budget = 13_B;
  problem.host_budget = 18_B;
  const SolveResult result = solve(problem);
  EXPECT_EQ(result.status, SolveStatus::Optimal);
  EXPECT_EQ(result.plan.nanoseconds, 0 + 1 + 1 + 7);
  EXPECT_EQ(result.plan.host, 18_B);
  problem.options[0].pop_back();
  problem.device_budget = 4_B;
  const SolveResult smallest = solve(problem);
  EXPECT_EQ(smallest.status, SolveStatus::Infeasible);
  EXPECT_EQ(smallest.smallest_budget, 22_B);
  problem.options[0].erase(problem.options[0].begin());
  const SolveResult none = solve(problem);
  EXPECT_EQ(none.status, SolveStatus::Infeasible);
  EXPECT_EQ(none.smallest_budget, std::nullopt);
  EXPECT_TRUE(none.plan.choice.empty());
}

TEST(Solve, AModelWithoutLayers) {
  Problem problem;
  problem.other_peak = 7_B;
  problem.device_budget = 7_B;
  EXPECT_EQ(solve(problem).status, SolveStatus::Optimal);
  EXPECT_EQ(solve(problem).plan.peak, 7_B);
  problem.device_budget = 6_B;
  EXPECT_EQ(solve(problem).smallest_budget, 7_B);
}

TEST(Solve, RefusesWhatIsNotAProblem) {
  const auto broken = [](auto change) {
    Problem problem = problem_of({{{.held = 1_B, .nanoseconds = 1}}}, 2);
    change(problem);
    return problem;
  };
  using P = Problem&;
  for (const Problem& problem :
       {broken([](P p) { p.options[0].clear(); }),
        broken([](P p) { p.layers[1].options = 1; }),
        broken([](P p) { p.options[0][0].held = Bytes(-1); }),
        broken([](P p) { p.options[0][0].nanoseconds = -1; }),
        broken([](P p) { p.options[0][0].host = Bytes(1LL << 50); }),
        broken([](P p) { p.layers[0].backward_base = Bytes(-1); }),
        broken([](P p) { p.host_budget = Bytes(-1); }),
        broken([](P p) { p.other_peak = Bytes(-1); })}) {
    EXPECT_THROW(solve(problem), PlanError);
    EXPECT_THROW(pareto(problem, 3), PlanError);
  }
  const Problem fine = broken([](P) {});
  EXPECT_THROW(evaluate(fine, {0}), PlanError);
  EXPECT_THROW(evaluate(fine, {0, 1}), PlanError);
  EXPECT_THROW(pareto(fine, 0), PlanError);
}

// ---- published knapsacks: ops to keep under a budget ----

struct Knapsack {
  std::vector<std::int64_t> memory;
  std::vector<std::int64_t> runtimes;
};

// An op is a layer that keeps its result, or pays its time.
std::int64_t runtime_saved(const Knapsack& knapsack, std::int64_t budget) {
  Problem problem;
  for (std::size_t i = 0; i < knapsack.memory.size(); ++i) {
    problem.options.push_back({{.held = Bytes(knapsack.memory[i])},
                               {.nanoseconds = knapsack.runtimes[i]}});
    problem.layers.push_back({.options = i});
  }
  problem.device_budget = Bytes(budget);
  const SolveResult result = solve(problem);
  EXPECT_EQ(result.status, SolveStatus::Optimal);
  EXPECT_LE(result.plan.peak, Bytes(budget));
  return std::accumulate(knapsack.runtimes.begin(), knapsack.runtimes.end(),
                         std::int64_t{0}) -
         result.plan.nanoseconds;
}

// Memory, runtimes, budget and best saved time of the cases that torch
// publishes with its partitioner; the one in halves is doubled.
TEST(Solve, PublishedKnapsacks) {
  struct Case {
    Knapsack knapsack;
    std::int64_t budget;
    std::int64_t saved;
  };
  for (const Case& known :
       {Case{{{2, 3, 2, 4, 1}, {1, 2, 1, 3, 2}}, 5, 5},
        Case{{{1, 1, 1}, {1, 2, 3}}, 3, 6},
        Case{{{10, 20, 30}, {1, 2, 3}}, 5, 0},
        Case{{{1, 2, 3}, {10, 20, 30}}, 1, 10},
        Case{{{1, 1, 1}, {2, 2, 2}}, 2, 4}, Case{{{0, 2, 3}, {5, 2, 3}}, 5, 10},
        Case{{{1, 2, 3}, {0, 2, 3}}, 3, 3},
        Case{{{100, 200, 300}, {1000, 2000, 3000}}, 500, 5000},
        Case{{{1, 3, 4}, {1, 2, 3}}, 4, 3}, Case{{{}, {}}, 10, 0},
        Case{{{1, 2, 3}, {1, 2, 3}}, 0, 0}, Case{{{0, 0, 0}, {1, 2, 3}}, 0, 6},
        Case{{{1, 2, 3}, {0, 0, 0}}, 6, 0}}) {
    EXPECT_EQ(runtime_saved(known.knapsack, known.budget), known.saved);
  }
}

// Of torch's per-module policies: eight ops, seven budgets, and which ops the
// published optimum keeps (memory of what it cannot drop is zero).
TEST(Solve, PublishedPolicies) {
  const Knapsack ops{{0, 100, 100, 120, 0, 100, 0, 0},
                     {5, 5, 8, 15, 15, 9, 1, 5}};
  struct Case {
    std::int64_t budget;
    std::array<int, 8> kept;
  };
  for (const Case& known :
       {Case{0, {1, 0, 0, 0, 1, 0, 0, 0}}, Case{100, {1, 0, 0, 0, 1, 1, 0, 1}},
        Case{120, {1, 0, 0, 1, 1, 0, 0, 0}},
        Case{200, {1, 0, 1, 0, 1, 1, 0, 1}},
        Case{220, {1, 0, 0, 1, 1, 1, 0, 1}},
        Case{320, {1, 0, 1, 1, 1, 1, 0, 1}},
        Case{420, {1, 1, 1, 1, 1, 1, 0, 1}}}) {
    const std::int64_t saved =
        std::inner_product(known.kept.begin(), known.kept.end(),
                           ops.runtimes.begin(), std::int64_t{0});
    EXPECT_GE(runtime_saved(ops, known.budget), saved) << known.budget;
  }
}

// ---- as large as models are ----

TEST(Solve, EqualLayersAreSolvedExactly) {
  std::mt19937 random(1);
  Problem problem = equal_layers(random, 24, 10, false);
  const Bytes least = *solve(with_budget(problem, 0_B)).smallest_budget;
  const Bytes most = pareto(problem, 2).back().plan.peak;
  std::int64_t last = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i <= 20; ++i) {
    const Bytes budget = least + (most - least) * i / 20;
    const SolveResult result = solve(with_budget(problem, budget));
    EXPECT_EQ(result.status, SolveStatus::Optimal) << i;
    EXPECT_LE(result.plan.peak, budget);
    EXPECT_LE(result.plan.nanoseconds, last) << i;
    last = result.plan.nanoseconds;
  }
}

TEST(Solve, HundredsOfLayersAreSolvedToAPercent) {
  std::mt19937 random(2);
  const Problem problem = equal_layers(random, 200, 8, true);
  const SolveLimits quick{.num_states = 64};
  const Bytes least = *solve(with_budget(problem, 0_B), quick).smallest_budget;
  const SolveResult result = solve(with_budget(problem, least * 2), quick);
  EXPECT_NE(result.status, SolveStatus::Infeasible);
  EXPECT_LE(result.gap(), 0.01);
}

TEST(Solve, GivesUpStatesAndSaysSo) {
  std::mt19937 random(3);
  const Problem problem = different_layers(random, 30, 6, true);
  const Bytes least = *solve(with_budget(problem, 0_B)).smallest_budget;
  const Problem tight = with_budget(problem, least + least / 8);
  const SolveResult rough = solve(tight, {.num_states = 2});
  const SolveResult exact = solve(tight);
  EXPECT_EQ(exact.status, SolveStatus::Optimal);
  EXPECT_EQ(rough.status, SolveStatus::Feasible);
  EXPECT_LE(rough.lower_bound, exact.plan.nanoseconds);
  EXPECT_GE(rough.plan.nanoseconds, exact.plan.nanoseconds);
  EXPECT_GT(rough.gap(), 0.0);
  EXPECT_LE(rough.plan.peak, tight.device_budget);
}

TEST(Pareto, GoesFromTheSmallestPeakToTheFastest) {
  Problem problem = problem_of({{{.held = 10_B, .nanoseconds = 0},
                                 {.held = 4_B, .nanoseconds = 1},
                                 {.held = 1_B, .nanoseconds = 5}}},
                               2);
  std::vector<std::pair<Bytes, std::int64_t>> points;
  for (const SolveResult& point : pareto(problem, 10)) {
    EXPECT_EQ(point.status, SolveStatus::Optimal);
    points.emplace_back(point.plan.peak, point.plan.nanoseconds);
  }
  EXPECT_EQ(points, (std::vector<std::pair<Bytes, std::int64_t>>{
                        {2_B, 10}, {5_B, 6}, {8_B, 2}, {14_B, 1}, {20_B, 0}}));
  const auto few = pareto(problem, 3);
  ASSERT_LE(few.size(), 3u);
  EXPECT_EQ(few.front().plan.peak, 2_B);
  EXPECT_EQ(few.back().plan.peak, 20_B);
  EXPECT_EQ(pareto(problem, 1).size(), 1u);
  problem.other_peak = 6_B;
  EXPECT_EQ(pareto(problem, 10).front().plan.nanoseconds, 6);
}

// Found by the property test: an option without host memory looked faster than
// the best plan known, by the price of the host memory that it leaves unused.
TEST(Solver, UnusedHostMemoryIsNotTimeWon) {
  Problem problem;
  problem.options = {{{.held = 2_B, .forward_peak = 4_B, .nanoseconds = 3},
                      {.held = 3_B, .forward_peak = 3_B, .host = 3_B},
                      {.forward_peak = 4_B, .host = 2_B, .nanoseconds = 2}}};
  problem.layers = {{.options = 0}};
  problem.device_budget = 8_B;
  problem.host_budget = 2_B;
  const SolveResult result = solve(problem);
  EXPECT_EQ(result.status, SolveStatus::Optimal);
  EXPECT_EQ(result.plan.choice, (std::vector<std::size_t>{2}));
  EXPECT_EQ(result.plan.nanoseconds, 2);
}

}  // namespace
}  // namespace memscale
