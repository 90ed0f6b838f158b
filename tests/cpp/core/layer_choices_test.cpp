#include "memscale/core/plan/layer_choices.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "decision_samples.h"
#include "memscale/core/predict/replayed_step.h"

namespace memscale {
namespace {

// The first options of all of the problem's layers, or their last.
std::vector<std::size_t> ends_of(const Problem& problem, bool last) {
  std::vector<std::size_t> choice;
  for (const ProblemLayer& layer : problem.layers) {
    choice.push_back(last ? problem.options[layer.options].size() - 1 : 0);
  }
  return choice;
}

TEST(Forecast, OfThePlainStepIsThePlainStep) {
  const Trace trace = stack_of(3);
  const Question question = question_of(trace);
  const Forecast found =
      forecast(question, uniform_rules(question, ReplayPolicy::Keep));
  EXPECT_EQ(found.nanoseconds, 0);
  EXPECT_EQ(found.peak, Timeline(trace, Place::Device, 512_B).peak()->bytes);
  ASSERT_EQ(found.layers.size(), trace.layers.size());
  for (const Forecast::Layer& layer : found.layers) {
    EXPECT_EQ(layer.plain, layer.held);
    EXPECT_EQ(layer.nanoseconds, 0);
  }
}

TEST(Forecast, CountsTheTimeOfWhatIsCalledAgainByLayer) {
  const Trace trace = stack_of(2);
  const Question question = question_of(trace);
  auto rules = uniform_rules(question, ReplayPolicy::Keep);
  rules[2].policy = ReplayPolicy::Block;
  const Forecast found = forecast(question, rules);
  EXPECT_EQ(found.layers[1].nanoseconds, 0);
  EXPECT_GT(found.layers[2].nanoseconds, 0);
  EXPECT_EQ(found.nanoseconds, found.layers[2].nanoseconds);
  EXPECT_LT(found.layers[2].held, found.layers[2].plain);
  const ReplayedStep step = replayed_step(trace, rules, false);
  EXPECT_EQ(found.nanoseconds, question.cost.nanoseconds(step.trace) -
                                   question.cost.nanoseconds(trace));
}

TEST(UniformRules, AreTheSameForEveryLayer) {
  const Trace trace = stack_of(2);
  Question question = question_of(trace);
  question.min_bytes = 77_B;
  const auto rules = uniform_rules(question, ReplayPolicy::Block);
  ASSERT_EQ(rules.size(), trace.layers.size());
  for (const TapeRules& rule : rules) {
    EXPECT_EQ(rule.policy, ReplayPolicy::Block);
    EXPECT_EQ(rule.keep_set, nullptr);
    EXPECT_EQ(rule.min_bytes, 77u);
  }
}

TEST(LayerChoices, EveryLayerThatHoldsSomethingHasAChoice) {
  const Trace trace = stack_of(4);
  const Question question = question_of(trace);
  const LayerChoices choices(question);
  const Problem& problem = choices.problem();
  EXPECT_NO_THROW(problem.check());
  // What runs outside, before, between and after the four.
  EXPECT_EQ(problem.layers.size(), 2u * 4 + 1);
  for (std::size_t i = 0; i < problem.layers.size(); ++i) {
    const auto& options = problem.options[problem.layers[i].options];
    if (i % 2 == 0) {
      EXPECT_EQ(options.size(), 1u);
      continue;
    }
    EXPECT_GT(options.size(), 1u);
    EXPECT_EQ(options.back().nanoseconds, 0);
    // None is beaten: what keeps more takes less time.
    for (std::size_t k = 1; k < options.size(); ++k) {
      EXPECT_LT(options[k - 1].held, options[k].held);
      EXPECT_GT(options[k - 1].nanoseconds, options[k].nanoseconds);
    }
  }
}

TEST(LayerChoices, WhereAllKeepAllNothingIsRecorded) {
  const Trace trace = stack_of(3);
  const Question question = question_of(trace);
  const LayerChoices choices(question);
  for (const TapeRules& rule :
       choices.rules(ends_of(choices.problem(), true))) {
    EXPECT_TRUE(rule.keeps_all());
  }
  const auto smallest = choices.rules(ends_of(choices.problem(), false));
  ASSERT_EQ(smallest.size(), trace.layers.size());
  for (std::size_t i = 1; i < smallest.size(); ++i) {
    ASSERT_NE(smallest[i].keep_set, nullptr);
    EXPECT_EQ(smallest[i].keep_set->ops.size(), 5u);
    EXPECT_NO_THROW(smallest[i].keep_set->check());
  }
}

// Note [Layers add up]: in a stack they do, to the byte.
TEST(LayerChoices, ASelectionIsWhatItsForecastSays) {
  const Trace trace = stack_of(4);
  const Question question = question_of(trace);
  const LayerChoices choices(question);
  const Problem& problem = choices.problem();
  std::vector<std::vector<std::size_t>> some = {ends_of(problem, false),
                                                ends_of(problem, true)};
  for (std::size_t i = 1; i < problem.layers.size(); i += 2) {
    some.push_back(some[0]);
    some.back()[i] = some[1][i];
    some.push_back(some[1]);
    some.back()[i] = some[0][i];
  }
  for (const auto& choice : some) {
    const Selection selection = evaluate(problem, choice);
    const Forecast found = forecast(question, choices.rules(choice));
    EXPECT_EQ(selection.peak, found.peak);
    EXPECT_EQ(selection.nanoseconds, found.nanoseconds);
  }
}

TEST(LayerChoices, ALayerWhoseCallsDifferHasNone) {
  TinyProgram program;
  const LayerId shared = program.layer("shared");
  const LayerId other = program.layer("other");
  program.enter(shared);
  const Value x = program.batch({64, 64});
  const Value a = program.call("aten::tanh", {x}, {64, 64});
  const Value b = program.call("aten::sin", {a}, {64, 64});
  program.save(a);
  program.let_go(a);
  program.enter(other);
  const Value c = program.call("aten::cos", {b}, {64, 64});
  program.save(b);
  program.let_go(b);
  program.enter(shared);
  const Value d = program.call("aten::tanh", {c}, {64, 64});
  program.save(d);
  program.let_go(c);
  program.let_go(d);
  const Trace trace = program.finish();
  const Question question = question_of(trace);
  const LayerChoices choices(question);
  for (const auto& options : choices.problem().options) {
    for (const bool last : {false, true}) {
      const auto rules = choices.rules(ends_of(choices.problem(), last));
      EXPECT_EQ(rules[shared.index()].keep_set, nullptr);
    }
    EXPECT_FALSE(options.empty());
  }
}

}  // namespace
}  // namespace memscale
