#include "memscale/core/plan/knee.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "decision_samples.h"

namespace memscale {
namespace {

// A frontier's point: its peak, and the time of the ops that are called again
// in a step that takes 1000 nanoseconds without them, so 10 are a percent.
struct Point {
  std::int64_t peak;
  std::int64_t nanoseconds;
};

std::int64_t knee_at(const std::vector<Point>& points, Bytes margin = Bytes()) {
  std::vector<Forecast> frontier;
  for (const Point& point : points) {
    Forecast& found = frontier.emplace_back();
    found.peak = Bytes(point.peak);
    found.nanoseconds = point.nanoseconds;
  }
  return knee_of(frontier, 1000, margin).peak.count();
}

TEST(Knee, IsWhereAPercentOfTimeBuysLessThanAPercentOfThePeak) {
  // From the right: 10 % of the peak for 5 % of time, 1 % for 2 %.
  EXPECT_EQ(knee_at({{8910, 70}, {9000, 50}, {10000, 0}}), 9000);
  // A little more than a percent for each percent: to the end.
  EXPECT_EQ(knee_at({{8800, 110}, {9400, 50}, {10000, 0}}), 8800);
  // Never as much as a percent for a percent: nothing is spent.
  EXPECT_EQ(knee_at({{9300, 100}, {9700, 50}, {10000, 0}}), 10000);
}

TEST(Knee, LooksBehindAFlatStretch) {
  // Three percent of time that buy nearly nothing, then half of the peak.
  const Point drop = {5000, 60};
  EXPECT_EQ(knee_at({drop, {9980, 30}, {9990, 20}, {10000, 0}}), drop.peak);
  // A drop that is not worth the whole way there is left.
  EXPECT_EQ(knee_at({{9500, 90}, {9980, 30}, {9990, 20}, {10000, 0}}), 10000);
  // The stretch is behind a first knee, and the drop makes good for both.
  EXPECT_EQ(knee_at({drop, {9000, 50}, {10000, 0}}), drop.peak);
}

TEST(Knee, IsTheFasterOneOfEqualProducts) {
  // 1000 * 1100 == 1100 * 1000 == 1.25 * 0.8 of it.
  EXPECT_EQ(knee_at({{1000, 100}, {1100, 0}}), 1100);
  EXPECT_EQ(knee_at({{880, 250}, {1000, 100}, {1100, 0}}), 1100);
  EXPECT_EQ(knee_at({{999, 100}, {1100, 0}}), 999);
}

TEST(Knee, OfOnePointIsThatPoint) {
  EXPECT_EQ(knee_at({{10000, 0}}), 10000);
  EXPECT_EQ(knee_at({{10000, 200}}), 10000);
}

TEST(Knee, CountsTheMarginAsPeak) {
  // 10 % of the peak for 8 % of time; with as much again beside it, 5 %.
  const std::vector<Point> points = {{9000, 80}, {10000, 0}};
  EXPECT_EQ(knee_at(points), 9000);
  EXPECT_EQ(knee_at(points, Bytes(10000)), 10000);
}

TEST(Knee, TakesProductsThatDoNotFit64Bits) {
  // 2^62 and 2^64, of which 64 bits would leave nothing.
  std::vector<Forecast> frontier(2);
  frontier[0].peak = 2_MiB;
  frontier[0].nanoseconds = std::int64_t{1} << 40;
  frontier[1].peak = 16_MiB;
  EXPECT_EQ(&knee_of(frontier, std::int64_t{1} << 40, Bytes()), &frontier[0]);
}

// ---- as the rule that decides by mode uses it ----

class KneeOfPlansTest : public testing::Test {
 protected:
  const Trace trace = stack_of(8);
  const Question question = question_of(trace);
  const std::vector<Plan> frontier = plan_frontier(question, 24);

  // The smallest peak for at most a quarter of time.
  const Plan& smallest_allowed() const {
    return *std::ranges::find_if(
        frontier, [](const Plan& plan) { return plan.slowdown() <= 0.25; });
  }
  static double product(const Plan& plan) {
    return static_cast<double>(plan.peak.count()) * (1 + plan.slowdown());
  }
};

TEST_F(KneeOfPlansTest, BalancedHasTheSmallestProductOfTimeAndPeak) {
  const Plan plan = decide(question).plan;
  for (const Plan& other : frontier) {
    if (other.slowdown() <= 0.25) {
      EXPECT_LE(product(plan), product(other));
    }
  }
  EXPECT_GT(plan.peak, smallest_allowed().peak);
  EXPECT_LT(plan.slowdown(), smallest_allowed().slowdown());
  const std::string& text = plan.verdicts.back().text;
  EXPECT_TRUE(text.starts_with("stops at ")) << text;
  EXPECT_TRUE(
      text.ends_with(" % more time: a further percent would buy less "
                     "than a percent of the peak"))
      << text;
}

TEST_F(KneeOfPlansTest, AsLongAsThatFitsTheDevice) {
  const Plan knee = decide(question).plan;
  Question some = question;
  some.device_memory = knee.peak;
  EXPECT_EQ(decide(some).plan.layers, knee.layers);

  // One byte less, and the whole quarter is spent.
  some.device_memory = knee.peak - 1_B;
  const Plan more = decide(some).plan;
  EXPECT_EQ(more.peak, smallest_allowed().peak);
  EXPECT_EQ(more.slowdown(), smallest_allowed().slowdown());
  const std::string& text = more.verdicts.back().text;
  EXPECT_TRUE(text.starts_with("the step does not fit at ")) << text;
  EXPECT_TRUE(
      text.ends_with(" % more time, so more is spent: the smallest "
                     "peak for at most 25 % more time"))
      << text;

  // The share of the device that may be used counts, and so does the margin.
  some.device_memory = knee.peak;
  some.utilization = 0.99;
  EXPECT_EQ(decide(some).plan.peak, smallest_allowed().peak);
  some.utilization = 1;
  some.margin = 1_B;
  EXPECT_EQ(decide(some).plan.peak, smallest_allowed().peak + 1_B);
}

TEST_F(KneeOfPlansTest, SaysThatNothingIsSpent) {
  // Beside bytes that cannot be dropped, nothing is worth its time.
  Question some = question;
  some.margin = 10_GiB;
  const Plan plan = decide(some).plan;
  EXPECT_EQ(plan.nanoseconds, 0);
  EXPECT_EQ(plan.verdicts.back().text,
            "spends no time: a percent would buy less than a percent of the "
            "peak");
}

TEST_F(KneeOfPlansTest, OtherModesAndBudgetsDoNotStopThere) {
  const Plan knee = decide(question).plan;
  Config config;
  config.mode = OptimizationMode::Aggressive;
  EXPECT_EQ(decide(question_of(trace, config)).plan.peak,
            frontier.front().peak);
  config.mode = OptimizationMode::Conservative;
  const Plan careful = decide(question_of(trace, config)).plan;
  EXPECT_EQ(careful.peak, std::ranges::find_if(frontier, [](const Plan& plan) {
                            return plan.slowdown() <= 0.05;
                          })->peak);
  const Bytes budget = smallest_allowed().peak;
  EXPECT_LE(decide(with_budget(question, budget)).plan.peak, budget);
  EXPECT_LT(budget, knee.peak);
}

}  // namespace
}  // namespace memscale
