#include "memscale/core/session/session.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "decision_samples.h"
#include "plan_samples.h"

namespace memscale {
namespace {

CallKind call(std::vector<std::int64_t> sizes, std::string dtype = "float32") {
  return {{std::move(dtype), "train"}, std::move(sizes)};
}

class SessionTest : public testing::Test {
 protected:
  static std::vector<std::string> names(const Trace& trace) {
    std::vector<std::string> all;
    for (const Layer& layer : trace.layers) all.push_back(layer.name);
    return all;
  }

  const Trace trace = stack_of(4);
  const Question question = question_of(trace);
  const Bytes plain = decide(question).plan.plain_peak;
  const Bytes smallest = *decide(with_budget(question, 1_B)).smallest_budget;
  Session session{Config(), names(trace)};

  // The first step, which does not count, and those that do.
  std::optional<Review> measure(std::size_t kind, Bytes peak) {
    MeasuredStep step;
    step.peak = peak;
    EXPECT_FALSE(session.add_step(kind, step));
    EXPECT_FALSE(session.add_step(kind, step));
    return session.add_step(kind, step);
  }
};

TEST(CallKind, CoversCallsThatAreNowhereLarger) {
  EXPECT_TRUE(call({4, 128}).covers(call({4, 128})));
  EXPECT_TRUE(call({4, 128}).covers(call({4, 7})));
  EXPECT_FALSE(call({4, 128}).covers(call({5, 7})));
  EXPECT_FALSE(call({4, 128}).covers(call({4, 7}, "float16")));
  EXPECT_FALSE(call({4, 128}).covers(call({4})));
  EXPECT_FALSE(call({4}).covers(call({4, 128})));
}

TEST_F(SessionTest, HasAPlanForEachKindOfCall) {
  EXPECT_FALSE(session.find(call({4, 128})));
  const std::size_t kind = session.add(call({4, 128}));
  EXPECT_EQ(session.plan_of(kind), nullptr);
  EXPECT_EQ(session.plan(kind, question), decide(question).plan);
  ASSERT_NE(session.plan_of(kind), nullptr);
  EXPECT_EQ(session.find(call({4, 100})), kind);
  EXPECT_FALSE(session.find(call({8, 128})));
  const std::size_t other = session.add(call({8, 128}));
  EXPECT_NE(other, kind);
  EXPECT_EQ(session.find(call({8, 128})), other);
  EXPECT_EQ(session.plans().size(), 1u);  // the other has none
  EXPECT_EQ(session.plan_of(99), nullptr);
}

TEST_F(SessionTest, PlansForSoManyKindsAndNoMore) {
  for (std::size_t i = 0; i < Session::kMaxKinds; ++i) {
    EXPECT_FALSE(session.is_full());
    session.add(call({static_cast<std::int64_t>(i) + 1}));
  }
  EXPECT_TRUE(session.is_full());
  EXPECT_EQ(plan_error_of([&] { session.add(call({99})); }),
            "a session plans for 16 kinds of calls");
}

TEST_F(SessionTest, ABudgetThatIsTooSmallLeavesTheKindWithoutAPlan) {
  const std::size_t kind = session.add(call({1}));
  EXPECT_TRUE(plan_error_of([&] {
                session.plan(kind, with_budget(question, 1_B));
              }).starts_with("budget must be at least "));
  EXPECT_EQ(session.plan_of(kind), nullptr);
  EXPECT_EQ(session.times_to_measure(kind), nullptr);
}

TEST_F(SessionTest, StepsThatAreAsPredictedEndInTheLedger) {
  const std::size_t kind = session.add(call({1}));
  EXPECT_EQ(session.times_to_measure(kind), nullptr);
  const Bytes peak = session.plan(kind, question).peak;
  EXPECT_NE(session.times_to_measure(kind), nullptr);
  const auto review = measure(kind, peak);
  ASSERT_TRUE(review);
  EXPECT_FALSE(review->has_new_plan);
  EXPECT_EQ(review->problem, "");
  ASSERT_TRUE(review->last);
  EXPECT_EQ(review->last->measured_peak, peak);
  EXPECT_EQ(session.ledger().size(), 2u);
  EXPECT_EQ(session.times_to_measure(kind), nullptr);
  EXPECT_FALSE(session.add_step(kind, {}));
}

// ---- see Note [A budget is a promise] ----

MeasuredStep step_of(Bytes peak) {
  MeasuredStep step;
  step.peak = peak;
  return step;
}

TEST_F(SessionTest, AStepAboveTheBudgetHasItsPlanMadeAnewAtOnce) {
  const Bytes budget = plain;
  const std::size_t kind = session.add(call({1}));
  const Plan first = session.plan(kind, with_budget(question, budget));
  EXPECT_EQ(first.peak, plain);
  // Far within the tolerance of predictions, and the very first step.
  const auto review = session.add_step(kind, step_of(budget + 1_B));
  ASSERT_TRUE(review);
  EXPECT_TRUE(review->has_new_plan);
  EXPECT_EQ(review->problem, "");
  EXPECT_TRUE(review->reason.starts_with("a step took ")) << review->reason;
  const Plan second = *session.plan_of(kind);
  EXPECT_LE(second.peak, budget);
  EXPECT_EQ(second.peak, replayed_peak(question, second) + 1_B);
  EXPECT_EQ(second.plain_peak, plain + 1_B);  // both with the margin
  // The new plan is measured again, and so on.
  const auto next = session.add_step(kind, step_of(budget + 64_KiB));
  ASSERT_TRUE(next);
  EXPECT_TRUE(next->has_new_plan);
  const Plan& third = *session.plan_of(kind);
  EXPECT_LT(replayed_peak(question, third), replayed_peak(question, second));
  EXPECT_LE(third.peak, budget);
}

TEST_F(SessionTest, UnderABudgetEveryStepIsMeasured) {
  const std::size_t kind = session.add(call({1}));
  const Bytes budget = plain + 64_KiB;
  session.plan(kind, with_budget(question, budget));
  EXPECT_EQ(session.measure_of(kind), Measure::All);
  EXPECT_TRUE(measure(kind, budget));
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(session.measure_of(kind), Measure::Peak);
    EXPECT_EQ(session.times_to_measure(kind), nullptr);
    EXPECT_FALSE(session.add_step(kind, step_of(budget)));
  }
  const auto review = session.add_step(kind, step_of(budget + 1_B));
  ASSERT_TRUE(review);
  EXPECT_TRUE(review->has_new_plan);
  EXPECT_EQ(session.ledger().size(), 2u);  // of the first plan
  EXPECT_EQ(session.measure_of(kind), Measure::All);
}

TEST_F(SessionTest, UnderABudgetPeaksAreMeasuredWithoutWarmupSteps) {
  Config config;
  config.warmup_steps = 0;
  Session other(config, names(trace));
  const std::size_t kind = other.add(call({1}));
  other.plan(kind, with_budget(question, plain));
  EXPECT_EQ(other.measure_of(kind), Measure::Step);
  EXPECT_EQ(other.times_to_measure(kind), nullptr);
  EXPECT_FALSE(other.add_step(kind, step_of(plain)));
  const auto review = other.add_step(kind, step_of(plain + 1_B));
  ASSERT_TRUE(review);
  EXPECT_TRUE(review->has_new_plan);
}

TEST_F(SessionTest, WhereNoPlanKeepsTheBudgetTheSmallestOneGoesOn) {
  const std::size_t kind = session.add(call({1}));
  const Bytes budget = plain;
  session.plan(kind, with_budget(question, budget));
  // More than any plan has room for: the smallest is tried.
  const auto review = session.add_step(kind, step_of(plain + budget));
  ASSERT_TRUE(review);
  EXPECT_TRUE(review->has_new_plan);
  EXPECT_EQ(review->problem, "");
  EXPECT_EQ(replayed_peak(question, *session.plan_of(kind)), smallest);
  // It is measured before anything is said.
  const auto last = session.add_step(kind, step_of(budget + 1_KiB));
  ASSERT_TRUE(last);
  EXPECT_FALSE(last->has_new_plan);
  EXPECT_NE(last->problem.find(
                str("Set a budget of at least ", (budget + 1_KiB).count())),
            std::string::npos)
      << last->problem;
  EXPECT_EQ(session.measure_of(kind), Measure::Nothing);  // said once
  EXPECT_FALSE(session.add_step(kind, step_of(budget + 1_KiB)));
}

TEST_F(SessionTest, TheSmallestPlanIsNotMadeAnew) {
  const std::size_t kind = session.add(call({1}));
  const Plan first = session.plan(kind, with_budget(question, smallest));
  const auto review = session.add_step(kind, step_of(smallest + 1_MiB));
  ASSERT_TRUE(review);
  EXPECT_FALSE(review->has_new_plan);
  EXPECT_NE(review->problem.find("is not kept"), std::string::npos)
      << review->problem;
  EXPECT_EQ(session.plan_of(kind)->layers, first.layers);
}

TEST_F(SessionTest, ABudgetIsWatchedWithoutAPlan) {
  Config config;
  config.budget = plain;
  Session other(config, names(trace));
  const std::size_t kind = other.add(call({1}));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(other.measure_of(kind), Measure::Step);
    EXPECT_FALSE(other.add_step(kind, step_of(plain)));
  }
  EXPECT_EQ(other.measure_of(kind), Measure::Peak);
  const auto review = other.add_step(kind, step_of(plain + 1_B));
  ASSERT_TRUE(review);
  EXPECT_NE(review->problem.find("is not kept"), std::string::npos);
}

TEST_F(SessionTest, WithoutABudgetThePeakHasATolerance) {
  const std::size_t kind = session.add(call({1}));
  const Plan first = session.plan(kind, question);
  const auto review = measure(kind, first.peak * 2);
  ASSERT_TRUE(review);
  EXPECT_TRUE(review->has_new_plan);
  EXPECT_NE(review->reason, "");
  const Plan& second = *session.plan_of(kind);
  EXPECT_EQ(second.peak, replayed_peak(question, second) + first.peak);
  // Once: afterwards it is only measured.
  session.add_step(kind, step_of(first.peak * 9));
  const auto last = session.add_step(kind, step_of(first.peak * 9));
  ASSERT_TRUE(last);
  EXPECT_FALSE(last->has_new_plan);
  EXPECT_EQ(session.measure_of(kind), Measure::Nothing);
}

TEST_F(SessionTest, SlowStepsMakeAPlanFromTheTimesThatWereMeasured) {
  const std::size_t kind = session.add(call({1}));
  const Plan first = session.plan(kind, with_budget(question, smallest));
  std::vector<TimedOp> ops;
  for (const Op& op : trace.ops) {
    if (op.phase != Phase::Forward || !op.layer.valid()) continue;
    ops.push_back({op.layer.index(), op.name, 1'000'000});
  }
  session.times_to_measure(kind)->add_call(ops);
  MeasuredStep step{.before = {},
                    .peak = first.peak,
                    .nanoseconds = 2'000,
                    .nanoseconds_replayed = 1'000,
                    .held = std::nullopt};
  session.add_step(kind, step);
  session.add_step(kind, step);
  const auto review = session.add_step(kind, step);
  ASSERT_TRUE(review);
  EXPECT_TRUE(review->has_new_plan);
  const Plan& second = *session.plan_of(kind);
  EXPECT_GT(second.plain_nanoseconds, first.plain_nanoseconds);
  EXPECT_LE(second.peak, smallest);
}

TEST_F(SessionTest, NothingIsMeasuredWithoutWarmupSteps) {
  Config config;
  config.warmup_steps = 0;
  Session other(config, names(trace));
  const std::size_t kind = other.add(call({1}));
  other.plan(kind, question);
  EXPECT_EQ(other.times_to_measure(kind), nullptr);
  EXPECT_FALSE(other.add_step(kind, {}));
}

}  // namespace
}  // namespace memscale
