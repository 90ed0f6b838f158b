#include "memscale/core/session/first_steps.h"

#include <gtest/gtest.h>

#include <optional>

namespace memscale {
namespace {

Plan plan_of(Bytes peak, std::int64_t nanoseconds) {
  Plan plan;
  plan.peak = peak;
  plan.nanoseconds = nanoseconds;
  plan.plain_nanoseconds = 1'000;
  return plan;
}

MeasuredStep step(std::int64_t peak,
                  std::optional<std::int64_t> nanoseconds = std::nullopt,
                  std::int64_t replayed = 0) {
  return {Bytes(0), Bytes(peak), nanoseconds, replayed, std::nullopt};
}

TEST(FirstSteps, LeavesOutTheVeryFirstAndStopsAfterEnough) {
  FirstSteps steps(plan_of(1'000_B, 100), 2, true);
  EXPECT_FALSE(steps.is_done());
  steps.add(step(9'999));
  EXPECT_TRUE(steps.entries().empty());
  steps.add(step(1'010, 1'250, 250));
  EXPECT_FALSE(steps.is_done());
  steps.add(step(990));
  EXPECT_TRUE(steps.is_done());
  steps.add(step(5'000));
  ASSERT_EQ(steps.entries().size(), 2u);
  EXPECT_EQ(steps.entries()[0],
            (LedgerEntry{1'000_B, 1'010_B, 0.1, std::optional(0.25)}));
  EXPECT_EQ(steps.entries()[1],
            (LedgerEntry{1'000_B, 990_B, 0.1, std::nullopt}));
}

TEST(FirstSteps, WhereOthersHoldMemoryTheTrainingsOwnAndWhatAStepAddsCount) {
  FirstSteps steps(plan_of(1'000_B, 0), 1, false);
  steps.add({.before = 5'000_B,
             .peak = 5'300_B,
             .nanoseconds = std::nullopt,
             .nanoseconds_replayed = 0,
             .held = 600_B});
  ASSERT_TRUE(steps.is_done());
  EXPECT_EQ(steps.entries()[0].measured_peak, 900_B);
}

FirstSteps measured(std::initializer_list<MeasuredStep> all) {
  FirstSteps steps(plan_of(1'000_B, 100), static_cast<std::int64_t>(all.size()),
                   true);
  steps.add({});
  for (const MeasuredStep& one : all) steps.add(one);
  return steps;
}

TEST(FirstSteps, TheLargestPeakIsComparedWithThePrediction) {
  EXPECT_EQ(measured({step(1'030), step(900)}).margin({}), 0_B);
  EXPECT_EQ(measured({step(1'031), step(900)}).margin({}), 31_B);
  EXPECT_EQ(measured({step(1'031)}).margin({.peak = 0.1}), 0_B);
}

TEST(FirstSteps, TheFastestStepIsComparedWithThePrediction) {
  // Of 1,000 ns without replay: 0.5, and 0.14, which is near 0.1.
  EXPECT_FALSE(
      measured({step(1, 1'500, 500), step(1, 1'140, 140)}).is_slow({}));
  EXPECT_TRUE(measured({step(1, 1'500, 500), step(1, 1'160, 160)}).is_slow({}));
  EXPECT_FALSE(measured({step(1)}).is_slow({}));  // no time is known
}

TEST(LedgerEntry, IsALineForPeople) {
  EXPECT_EQ((LedgerEntry{1_MiB, 2_MiB, 0.1, std::nullopt}).text(),
            "peak 2.00 MiB measured, 1.00 MiB predicted");
  EXPECT_EQ((LedgerEntry{1_MiB, 2_MiB, 0.1, std::optional(0.0446)}).text(),
            "peak 2.00 MiB measured, 1.00 MiB predicted; 4.5% slower measured, "
            "10.0% predicted");
}

}  // namespace
}  // namespace memscale
