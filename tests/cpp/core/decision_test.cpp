#include "memscale/core/plan/decision.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "decision_samples.h"
#include "memscale/base/error.h"
#include "plan_samples.h"

namespace memscale {
namespace {

std::vector<std::string> rules_asked(const Plan& plan) {
  std::vector<std::string> names;
  for (const Verdict& verdict : plan.verdicts) names.push_back(verdict.rule);
  return names;
}

bool keeps_all(const Plan& plan) {
  return std::ranges::none_of(plan.layers, &LayerPlan::recomputes);
}

class DecisionTest : public testing::Test {
 protected:
  const Trace trace = stack_of(4);
  const Question question = question_of(trace);
  const Plan plain = [this] {
    Question off = question;
    off.config.enable_checkpointing = false;
    return decide(off).plan;
  }();
  const Bytes smallest = *decide(with_budget(question, 1_B)).smallest_budget;

  Question in_mode(OptimizationMode mode) const {
    Config config;
    config.mode = mode;
    return question_of(trace, config);
  }
};

TEST_F(DecisionTest, RulesAreAskedInTheirOrder) {
  const std::vector<std::string> names = {
      "forget_cache", "weigh_memory", "quantise_optimizer", "skip_tiny_model",
      "recompute_layers"};
  EXPECT_EQ(rule_names(), names);
  EXPECT_EQ(rules_asked(decide(question).plan),
            (std::vector<std::string>{"weigh_memory", "recompute_layers"}));
}

TEST_F(DecisionTest, ARuleCanBeDisabledByItsName) {
  Question some = question;
  some.disabled_rules = {"weigh_memory"};
  const Plan plan = decide(some).plan;
  EXPECT_EQ(rules_asked(plan), std::vector<std::string>{"recompute_layers"});
  EXPECT_EQ(plan.layers, decide(question).plan.layers);

  some.disabled_rules = rule_names();
  EXPECT_TRUE(rules_asked(decide(some).plan).empty());
  EXPECT_TRUE(keeps_all(decide(some).plan));

  some.force = false;
  some.disabled_rules = {"skip_tiny_model"};
  EXPECT_FALSE(keeps_all(decide(some).plan));
}

TEST_F(DecisionTest, ARuleThatThereIsNotCannotBeDisabled) {
  Question some = question;
  some.disabled_rules = {"weigh_memory", "no such\n"};
  EXPECT_EQ(plan_error_of([&] { decide(some); }),
            "disabled_rules must name rules, got 'no such\\n'");
  EXPECT_EQ(plan_error_of([&] { plan_frontier(some, 3); }),
            "disabled_rules must name rules, got 'no such\\n'");
}

TEST_F(DecisionTest, ATinyModelIsLeftAsItIs) {
  Question some = question;
  some.force = false;
  const Plan plan = decide(some).plan;
  EXPECT_TRUE(keeps_all(plan));
  EXPECT_EQ(plan.nanoseconds, 0);
  EXPECT_EQ(plan.peak, plan.plain_peak);
  EXPECT_EQ(rules_asked(plan),
            (std::vector<std::string>{"weigh_memory", "skip_tiny_model"}));
}

TEST_F(DecisionTest, ATinyModelIsPlannedWhereItMatters) {
  Question some = question;
  some.force = false;
  // A budget, a device that is smaller still, or the user says so.
  EXPECT_FALSE(keeps_all(decide(with_budget(some, smallest)).plan));
  some.device_memory = plain.peak - 1_B;
  EXPECT_FALSE(keeps_all(decide(some).plan));
  some.device_memory = plain.peak;
  EXPECT_TRUE(keeps_all(decide(some).plan));
  some.utilization = 0.5;
  EXPECT_FALSE(keeps_all(decide(some).plan));
  EXPECT_FALSE(keeps_all(decide(question).plan));
}

TEST_F(DecisionTest, APlanSaysForWhomItIs) {
  const Plan plan = decide(with_budget(question, plain.peak)).plan;
  EXPECT_EQ(plan.model, "Stack");
  EXPECT_EQ(plan.call, "x=float32[64, 256]");
  EXPECT_EQ(plan.device, "sim");
  EXPECT_EQ(plan.optimizer, "sgd");
  EXPECT_EQ(plan.mode, OptimizationMode::Balanced);
  EXPECT_EQ(plan.budget, plain.peak);
  EXPECT_EQ(plan.fingerprint, fingerprint_of(trace));
  ASSERT_EQ(plan.layers.size(), trace.layers.size());
  for (std::size_t i = 0; i < plan.layers.size(); ++i) {
    EXPECT_EQ(plan.layers[i].layer, trace.layers[i].name);
  }
  const Timeline timeline(trace, Place::Device, 512_B);
  EXPECT_EQ(plan.plain_peak, timeline.peak()->bytes);
  EXPECT_EQ(plan.plain_nanoseconds, question.cost.nanoseconds(trace));
}

TEST_F(DecisionTest, UnderALooseBudgetAllIsKeptForNothing) {
  for (const Bytes budget :
       {plain.peak, plain.peak + 1_B, Bytes(std::int64_t{1} << 50)}) {
    const Decision decision = decide(with_budget(question, budget));
    EXPECT_FALSE(decision.smallest_budget);
    EXPECT_TRUE(keeps_all(decision.plan));
    EXPECT_EQ(decision.plan.nanoseconds, 0);
    EXPECT_EQ(decision.plan.peak, plain.peak);
  }
}

TEST_F(DecisionTest, ATightBudgetIsKept) {
  const Bytes budget = plain.peak - 2 * kBlock;
  const Decision decision = decide(with_budget(question, budget));
  EXPECT_FALSE(decision.smallest_budget);
  EXPECT_LE(decision.plan.peak, budget);
  EXPECT_GT(decision.plan.nanoseconds, 0);
  EXPECT_EQ(decision.plan.peak, replayed_peak(question, decision.plan));
  // As few layers as do: each frees more than a block.
  const auto layers = std::span(decision.plan.layers).subspan(1);
  EXPECT_LE(std::ranges::count_if(layers, &LayerPlan::recomputes), 2);
}

TEST_F(DecisionTest, WhatIsTooTightHasASmallestBudgetThatWorks) {
  for (const Bytes budget : {1_B, smallest / 2, smallest - 1_B}) {
    const Decision decision = decide(with_budget(question, budget));
    ASSERT_TRUE(decision.smallest_budget);
    EXPECT_EQ(*decision.smallest_budget, smallest);
    EXPECT_EQ(decision.plan.peak, smallest);
    EXPECT_EQ(decision.plan.peak, replayed_peak(question, decision.plan));
    EXPECT_EQ(
        decision.plan.verdicts.back().text,
        str("no plan is under the budget; the smallest peak is ", smallest));
  }
  const Decision decision = decide(with_budget(question, smallest));
  EXPECT_FALSE(decision.smallest_budget);
  EXPECT_LE(decision.plan.peak, smallest);
}

TEST_F(DecisionTest, WithALargerBudgetNoPlanIsSlower) {
  std::int64_t last = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < 12; ++i) {
    const Bytes budget = smallest + (plain.peak - smallest) * i / 11;
    const Plan plan = decide(with_budget(question, budget)).plan;
    EXPECT_LE(plan.peak, budget);
    EXPECT_LE(plan.nanoseconds, last) << budget;
    last = plan.nanoseconds;
  }
  EXPECT_EQ(last, 0);
}

TEST_F(DecisionTest, ModesSpendWhatTheyMay) {
  const Plan careful = decide(in_mode(OptimizationMode::Conservative)).plan;
  // Where memory is short; where it is not, see plan/knee_test.cpp.
  Question pressed = in_mode(OptimizationMode::Balanced);
  pressed.device_memory = 1_B;
  const Plan balanced = decide(pressed).plan;
  const Plan hungry = decide(in_mode(OptimizationMode::Aggressive)).plan;
  EXPECT_LE(careful.slowdown(), 0.05);
  EXPECT_LE(balanced.slowdown(), 0.25);
  EXPECT_GT(balanced.slowdown(), 0.05);
  EXPECT_LT(careful.peak, plain.peak);
  EXPECT_LT(balanced.peak, careful.peak);
  EXPECT_LT(hungry.peak, balanced.peak);
  EXPECT_EQ(hungry.peak, smallest);
  for (const Plan& plan : plan_frontier(question, 24)) {
    EXPECT_LE(hungry.peak, plan.peak);
  }
}

TEST_F(DecisionTest, AFieldOverridesItsMode) {
  Config config;
  config.mode = OptimizationMode::Aggressive;
  config.enable_checkpointing = false;
  const Decision decision = decide(question_of(trace, config));
  EXPECT_TRUE(keeps_all(decision.plan));
  EXPECT_EQ(decision.plan.verdicts.back().text,
            "enable_checkpointing is off: every layer keeps all");
}

TEST_F(DecisionTest, ABudgetCountsWhateverKeepsLayersFromRecomputing) {
  // Nothing may be recomputed: the plain step is the smallest there is.
  Question off = question;
  off.config.enable_checkpointing = false;
  Question disabled = question;
  disabled.disabled_rules = {"recompute_layers"};
  for (const Question& one : {off, disabled}) {
    EXPECT_EQ(decide(with_budget(one, smallest)).smallest_budget, plain.peak);
    EXPECT_FALSE(decide(with_budget(one, plain.peak)).smallest_budget);
  }
}

TEST_F(DecisionTest, AMarginIsAddedToWhatIsPredicted) {
  Question some = question;
  some.margin = 10_KiB;
  EXPECT_EQ(decide(some).plan.peak, decide(question).plan.peak + 10_KiB);
  EXPECT_EQ(decide(with_budget(some, 1_B)).smallest_budget, smallest + 10_KiB);
  EXPECT_TRUE(decide(with_budget(some, smallest)).smallest_budget);

  const Decision fits = decide(with_budget(some, smallest + 10_KiB));
  EXPECT_FALSE(fits.smallest_budget);
  EXPECT_EQ(fits.plan.peak, smallest + 10_KiB);
  // The plain step itself is over the budget, by less than the margin.
  EXPECT_FALSE(keeps_all(decide(with_budget(some, plain.peak)).plan));
}

TEST_F(DecisionTest, SaysHowMuchMoreThanTheDeviceHasIsNeeded) {
  Question some = question;
  some.device_memory = smallest - 1_KiB;
  EXPECT_NE(decide(some).plan.verdicts.back().text.find("more than there is"),
            std::string::npos);
  some.device_memory = smallest;
  EXPECT_NE(decide(some).plan.verdicts.back().text.find(
                "a slower plan would fit: mode aggressive, or a budget"),
            std::string::npos);
  some.device_memory = plain.peak;
  some.config.stops_at_knee = false;
  EXPECT_EQ(decide(some).plan.verdicts.back().text,
            "the smallest peak for at most 25 % more time");
  // States pressure in hundredths.
  some.device_memory = 3 * plain.peak;
  EXPECT_TRUE(decide(some).plan.verdicts[0].text.ends_with(
      "that may be used of the device: pressure 0.33"));
}

TEST_F(DecisionTest, WithoutKnownSavesAllIsKept) {
  Trace other = trace;
  other.saves_known = false;
  const Question some = question_of(other);
  const Decision decision = decide(some);
  EXPECT_TRUE(keeps_all(decision.plan));
  EXPECT_EQ(decision.plan.peak, plain.peak);
  EXPECT_EQ(decision.plan.nanoseconds, 0);
  EXPECT_EQ(decision.plan.verdicts.back().text,
            "what backward needs is not known: every layer keeps all");
  EXPECT_EQ(decide(with_budget(some, smallest)).smallest_budget, plain.peak);
  EXPECT_EQ(plan_frontier(some, 5).size(), 1u);
}

TEST_F(DecisionTest, AFrontierRisesInPeakAndFallsInTime) {
  for (const std::size_t most : {1u, 2u, 5u}) {
    const std::vector<Plan> plans = plan_frontier(question, most);
    ASSERT_FALSE(plans.empty());
    EXPECT_LE(plans.size(), most);
    EXPECT_EQ(plans.front().peak, smallest);
    if (most > 1) {
      EXPECT_EQ(plans.back().nanoseconds, 0);
    }
    for (std::size_t i = 0; i < plans.size(); ++i) {
      EXPECT_NO_THROW(plans[i].check());
      EXPECT_EQ(plans[i].peak, replayed_peak(question, plans[i]));
      if (i == 0) continue;
      EXPECT_LT(plans[i - 1].peak, plans[i].peak);
      EXPECT_GT(plans[i - 1].nanoseconds, plans[i].nanoseconds);
    }
  }
  EXPECT_EQ(plan_error_of([&] { plan_frontier(question, 0); }),
            "max_points must be >= 1, got 0");
}

TEST_F(DecisionTest, AFrontierIsAskedOfTheSameRules) {
  Question some = question;
  some.disabled_rules = {"recompute_layers"};
  const std::vector<Plan> plans = plan_frontier(some, 5);
  ASSERT_EQ(plans.size(), 1u);
  EXPECT_TRUE(keeps_all(plans[0]));
  EXPECT_EQ(rules_asked(plans[0]), std::vector<std::string>{"weigh_memory"});

  some = question;
  some.config.enable_checkpointing = false;
  EXPECT_EQ(plan_frontier(some, 5).size(), 1u);
  // What it is not about: sizes and times.
  some = with_budget(question, 1_B);
  some.force = false;
  const std::vector<Plan> others = plan_frontier(some, 5);
  ASSERT_GT(others.size(), 1u);
  EXPECT_EQ(others, plan_frontier(question, 5));
  EXPECT_EQ(rules_asked(others[0]),
            (std::vector<std::string>{"weigh_memory", "recompute_layers"}));
}

TEST_F(DecisionTest, ABudgetThatIsTooSmallIsAnErrorThatNamesTheSmallest) {
  EXPECT_EQ(plan_for(with_budget(question, smallest)).peak, smallest);
  const std::string error =
      plan_error_of([&] { plan_for(with_budget(question, 1_KiB)); });
  EXPECT_TRUE(error.starts_with(str("budget must be at least ",
                                    smallest.count(), " bytes (", smallest,
                                    ", at a predicted slowdown of ")))
      << error;
  EXPECT_TRUE(error.ends_with(
      "%) for Stack with x=float32[64, 256] and sgd, got 1024 (1.00 KiB)"))
      << error;
}

TEST(Decision, TakesStepsWithoutAnythingToChoose) {
  TinyProgram program;
  program.enter(program.layer(""));
  const Value x = program.batch({16});
  program.let_go(program.call("aten::sum", {x}, {1}));
  const Trace trace = program.finish();
  const Question question = question_of(trace);
  EXPECT_EQ(decide(question).plan.nanoseconds, 0);
  EXPECT_EQ(plan_frontier(question, 4).size(), 1u);
  EXPECT_TRUE(decide(with_budget(question, 1_B)).smallest_budget);
}

}  // namespace
}  // namespace memscale
