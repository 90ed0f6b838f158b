#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "decision_samples.h"
#include "memscale/core/plan/technique.h"
#include "memscale/core/techniques/optimizer_state.h"
#include "plan_samples.h"

namespace memscale {
namespace {

// A step with Adam's moments, and, if asked for, with something that only a
// cache holds: the last op before backward forgets it, the program by itself
// would hold it to the end of the step.
Trace full_step(Bytes cached) {
  Trace trace = stack_of(3);
  Storage state;
  state.category = Category::OptimizerState;
  state.bytes = 1_MiB;
  state.count = 2;
  trace.storages.push_back(state);
  if (cached > 0_B) {
    Storage& cache = trace.storages.emplace_back();
    cache.bytes = cached;
    cache.born = OpId(1);
    cache.freed = OpId(2);
    cache.plain_freed = OpId(trace.ops.size() - 1);
  }
  return trace;
}

Question full_question(const Trace& trace, const Config& config) {
  Question question = question_of(trace, config);
  question.step.optimizer = "AdamW";
  question.step.optimizer_is_adam = true;
  question.on_cpu = true;  // its kernel needs no temporaries
  return question;
}

std::vector<std::string> used(const Plan& plan) {
  std::vector<std::string> names;
  for (const Choice& choice : plan.choices) names.push_back(choice.technique);
  return names;
}

TEST(Techniques, AreCompleteAndHaveTheirOwnNames) {
  std::vector<std::string_view> names;
  std::vector<std::string_view> rules;
  for (const Technique& technique : techniques()) {
    names.push_back(technique.name);
    rules.push_back(technique.rule);
    EXPECT_FALSE(technique.choices.empty()) << technique.name;
    EXPECT_EQ(technique.field.empty(), technique.is_on == nullptr);
    if (!technique.field.empty()) {
      EXPECT_NO_THROW(Config::field(technique.field));
    }
    for (const auto* function :
         {reinterpret_cast<const void*>(technique.why_not),
          reinterpret_cast<const void*>(technique.decide),
          reinterpret_cast<const void*>(technique.predict),
          reinterpret_cast<const void*>(technique.fallback),
          reinterpret_cast<const void*>(technique.describe)}) {
      EXPECT_NE(function, nullptr) << technique.name;
    }
    EXPECT_EQ(find_technique(technique.name), &technique);
  }
  EXPECT_EQ(names, (std::vector<std::string_view>{
                       "use_cache", "optimizer_state", "recompute"}));
  std::ranges::sort(rules);
  EXPECT_EQ(std::ranges::adjacent_find(rules), rules.end());
  EXPECT_EQ(find_technique("magic"), nullptr);
}

TEST(Techniques, APlansPredictionIsTheStepUnderItsChoices) {
  const Trace trace = full_step(128_KiB);
  Config config;
  config.mode = OptimizationMode::Aggressive;
  const Question question = full_question(trace, config);
  const Plan plan = decide(question).plan;
  EXPECT_EQ(used(plan),
            (std::vector<std::string>{"use_cache", "optimizer_state"}));
  EXPECT_TRUE(std::ranges::any_of(plan.layers, &LayerPlan::recomputes));
  EXPECT_EQ(plan.peak, replayed_peak(question, plan));
  for (const Plan& each : plan_frontier(question, 6)) {
    EXPECT_EQ(each.peak, replayed_peak(question, each));
    EXPECT_EQ(used(each), used(plan));
  }
  // Without any choice it is the plain step.
  Plan plain = plan;
  plain.choices.clear();
  for (LayerPlan& layer : plain.layers) layer.choices.clear();
  EXPECT_EQ(plan.plain_peak, replayed_peak(question, plain));
}

TEST(UseCache, IsForgottenByARuleLikeAnyOther) {
  const Trace trace = full_step(128_KiB);
  Question question = full_question(trace, Config());
  question.disabled_rules = {"quantise_optimizer", "recompute_layers"};
  const Plan plan = decide(question).plan;
  ASSERT_EQ(plan.choices.size(), 1u);
  EXPECT_EQ(plan.choices[0].technique, "use_cache");
  EXPECT_EQ(plan.choices[0].bytes, 128_KiB);
  EXPECT_EQ(plan.verdicts[0].rule, "forget_cache");
  EXPECT_EQ(plan.plain_peak - plan.peak, 128_KiB);

  question.disabled_rules.push_back("forget_cache");
  const Plan held = decide(question).plan;
  EXPECT_TRUE(held.choices.empty());
  EXPECT_EQ(held.peak, plan.plain_peak);
  EXPECT_EQ(held.plain_peak, plan.plain_peak);
}

TEST(UseCache, AStepWithoutCachesHasNoSuchChoice) {
  const Trace trace = full_step(0_B);
  const Plan plan = decide(full_question(trace, Config())).plan;
  EXPECT_TRUE(plan.choices.empty());
  EXPECT_NE(plan.verdicts[0].rule, "forget_cache");
}

TEST(OptimizerState, IsChosenByFieldModeAndNeed) {
  const Trace trace = full_step(0_B);
  const auto bits = [&](const Config& config, bool has_kernel = true) {
    Question question = full_question(trace, config);
    question.has_state_kernel = has_kernel;
    return state_bits(decide(question).plan.choices);
  };
  Config config;
  EXPECT_EQ(bits(config), 32);
  config.mode = OptimizationMode::Aggressive;
  EXPECT_EQ(bits(config), 8);
  EXPECT_EQ(bits(config, false), 32);  // it takes long: no mode alone
  config.use_8bit_optimizer = true;
  EXPECT_EQ(bits(config, false), 8);

  Question other = full_question(trace, config);
  other.step.optimizer = "SGD";
  other.step.optimizer_is_adam = false;
  const Plan plan = decide(other).plan;
  EXPECT_EQ(state_bits(plan.choices), 32);
  EXPECT_EQ(plan.verdicts[1].text, "the state of SGD stays as it is");
}

TEST(Fallback, IsByModeAndByWhatWasAskedFor) {
  const auto words = [](const Config& config, bool only_asked,
                        bool has_kernel = true, bool is_compiled = false) {
    Target target;
    target.has_state_kernel = has_kernel;
    StepFacts facts;
    facts.is_compiled = is_compiled;
    std::string text;
    for (const Choice& choice : fallback_choices(
             Question::of(nullptr, config, target, facts), only_asked)) {
      text += str(choice.technique, "=", choice.choice, " ");
    }
    return text;
  };
  Config config;
  EXPECT_EQ(words(config, false), "recompute=cheap ");
  EXPECT_EQ(words(config, true), "");
  config.budget = 1_GiB;
  EXPECT_EQ(words(config, false), "recompute=block ");
  config.budget = std::nullopt;
  config.mode = OptimizationMode::Aggressive;
  EXPECT_EQ(words(config, false), "optimizer_state=8bit recompute=block ");
  EXPECT_EQ(words(config, false, false), "recompute=block ");
  EXPECT_EQ(words(config, false, true, true), "optimizer_state=8bit ");
  config.use_8bit_optimizer = true;
  EXPECT_EQ(words(config, true, false), "optimizer_state=8bit ");
  config.enable_checkpointing = false;
  config.use_8bit_optimizer = false;
  EXPECT_EQ(words(config, false), "");
}

}  // namespace
}  // namespace memscale
