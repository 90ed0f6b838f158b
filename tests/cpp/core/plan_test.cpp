#include "memscale/core/plan/plan.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "plan_samples.h"
#include "tiny_program.h"

namespace memscale {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

TEST(LayerPlan, SaysWhatItDoes) {
  const Plan plan = small_plan();
  EXPECT_EQ(plan.layers[0].technique(), "keep");
  EXPECT_FALSE(plan.layers[0].recomputes());
  EXPECT_EQ(plan.layers[1].technique(), "recompute (cheap)");
  EXPECT_TRUE(plan.layers[1].recomputes());
  EXPECT_EQ(plan.layers[2].technique(), "recompute (keeps 2 results of 2 ops)");
  EXPECT_TRUE(plan.layers[2].recomputes());
  LayerPlan block;
  block.choices = {made_choice("recompute", "block")};
  EXPECT_EQ(block.technique(), "recompute (block)");
  EXPECT_EQ(plan.layers[0].reason(), "");
  EXPECT_EQ(LayerPlan().reason(), "holds nothing");
  EXPECT_EQ(plan.layers[1].reason(), "frees 3.00 MiB");
  EXPECT_EQ(plan.layers[1].nanoseconds(), 1'499);
}

TEST(Plan, SlowdownIsAShareOfThePlainStep) {
  Plan plan = small_plan();
  EXPECT_EQ(plan.slowdown(), (3'999.0 + 1.0) / 40'000.0);
  plan.plain_nanoseconds = 0;
  EXPECT_EQ(plan.slowdown(), 0.0);
}

TEST(PlanCheck, NamesWhatIsWrong) {
  struct Case {
    std::function<void(Plan&)> spoil;
    std::string_view error;
  };
  const Case cases[] = {
      {[](Plan&) {}, "no error"},
      {[](Plan& p) { p.budget.reset(); }, "no error"},
      {[](Plan& p) { p.plain_peak = Bytes(-1); },
       "plain_peak must be >= 0, got -1"},
      {[](Plan& p) { p.peak = Bytes(-2); }, "peak must be >= 0, got -2"},
      {[](Plan& p) { p.host_peak = Bytes(-3); },
       "host_peak must be >= 0, got -3"},
      {[](Plan& p) { p.plain_nanoseconds = -4; },
       "plain_nanoseconds must be >= 0, got -4"},
      {[](Plan& p) { p.nanoseconds = -5; }, "nanoseconds must be >= 0, got -5"},
      {[](Plan& p) { p.budget = 0_B; }, "budget must be > 0, got 0"},
      {[](Plan& p) { p.budget = Bytes(-6); }, "budget must be > 0, got -6"},
      {[](Plan& p) { p.layers.clear(); }, "layers must not be empty"},
      {[](Plan& p) { p.layers[2].layer = "a"; },
       "layers[2].layer must not be there twice, got 'a'"},
      {[](Plan& p) { p.layers[0].plain_bytes = Bytes(-7); },
       "layers[0].plain_bytes must be >= 0, got -7"},
      {[](Plan& p) { p.layers[1].held_bytes = Bytes(-8); },
       "layers[1].held_bytes must be >= 0, got -8"},
      {[](Plan& p) { p.layers[2].choices[0].nanoseconds = -9; },
       "layers[2].choices[0].nanoseconds must be >= 0, got -9"},
      {[](Plan& p) { p.choices[0].bytes = Bytes(-1); },
       "choices[0].bytes must be >= 0, got -1"},
      {[](Plan& p) { p.layers[2].choices[0].keep_set->kept = {{2, 0}}; },
       "layers[2].choices[0].keep_set.kept[0] must name one of 2 ops, got 2"},
      {[](Plan& p) {
         p.layers[2].choices[0].keep_set->kept = {{1, 0}, {0, 0}};
       },
       "layers[2].choices[0].keep_set.kept must be sorted without repetition, "
       "kept[1] is not after kept[0]"},
      {[](Plan& p) {
         p.layers[2].choices[0].keep_set->kept = {{0, 1}, {0, 1}};
       },
       "layers[2].choices[0].keep_set.kept must be sorted without repetition, "
       "kept[1] is not after kept[0]"},
      {[](Plan& p) { p.layers[2].choices[0].keep_set->kept.clear(); },
       "no error"},
      {[](Plan& p) { p.layers[2].choices[0].keep_set.reset(); },
       "layers[2].choices[0].keep_set must be given with the choice 'chosen'"},
      {[](Plan& p) { p.choices[0].keep_set.emplace(); },
       "choices[0].keep_set must not be given with the choice '8bit'"},
      {[](Plan& p) { p.choices[0].technique = "magic"; },
       "choices[0].technique must be one of use_cache, optimizer_state, got "
       "'magic'"},
      {[](Plan& p) { p.choices[0] = p.layers[1].choices[0]; },
       "choices[0].technique must be one of use_cache, optimizer_state, got "
       "'recompute'"},
      {[](Plan& p) { p.layers[1].choices = p.choices; },
       "layers[1].choices[0].technique must be one of recompute, got "
       "'optimizer_state'"},
      {[](Plan& p) { p.layers[1].choices[0].choice = "keep"; },
       "layers[1].choices[0].choice must be one of cheap, block, chosen, got "
       "'keep'"},
      {[](Plan& p) { p.choices.push_back(p.choices[0]); },
       "choices[1].technique must not be there twice, got 'optimizer_state'"},
  };
  for (const Case& one : cases) {
    Plan plan = small_plan();
    one.spoil(plan);
    EXPECT_EQ(plan_error_of([&] { plan.check(); }), one.error);
  }
}

TEST(PlanCheckFits, SaysWhatDiffers) {
  const Plan plan = small_plan();
  const auto error = [&](std::vector<std::string> names) {
    return plan_error_of([&] { plan.check_fits(names); });
  };
  EXPECT_EQ(error({"", "a", "b.0"}), "no error");
  EXPECT_EQ(error({"", "a"}),
            "the plan must be of this model, but it is of 'Net' with 3 layers "
            "instead of 2");
  EXPECT_EQ(error({}),
            "the plan must be of this model, but it is of 'Net' with 3 layers "
            "instead of 0");
  EXPECT_EQ(error({"", "a", "b.1"}),
            "the plan must be of this model, but it is of 'Net' whose layer 2 "
            "is 'b.0' instead of 'b.1'");
  EXPECT_EQ(error({"a", "", "b.0"}),
            "the plan must be of this model, but it is of 'Net' whose layer 0 "
            "is '' instead of 'a'");
}

TEST(PlanCheckFits, ComparesParametersWhereBothAreKnown) {
  const Plan plan = small_plan();
  const auto error = [&](std::vector<Bytes> bytes) {
    return plan_error_of([&] { plan.check_fits({"", "a", "b.0"}, bytes); });
  };
  EXPECT_EQ(error({}), "no error");
  EXPECT_EQ(error({0_B, 1_MiB, 256_KiB}), "no error");
  EXPECT_EQ(error({0_B, 2_MiB, 128_KiB}),
            "the plan must be of this model, but it is of 'Net' whose layer 2, "
            "'b.0', has 256.00 KiB of parameters (layers[2].parameter_bytes is "
            "262144) instead of 128.00 KiB (131072): make a plan for this "
            "model");
}

TEST(PlanErrors, StayShortAndInOneLine) {
  // Names may come from a file.
  Plan plan = small_plan();
  plan.model = std::string(1'000'000, 'm') + "\n";
  plan.layers[1].layer = plan.layers[2].layer = std::string(1'000'000, 'l');
  for (const std::string& error :
       {plan_error_of([&] { plan.check_fits({"", "a", "b"}); }),
        plan_error_of([&] { plan.check_fits({""}); }),
        plan_error_of([&] { plan.check(); })}) {
    EXPECT_NE(error, "no error");
    EXPECT_LT(error.size(), 400u);
    EXPECT_EQ(error.find('\n'), error.npos);
  }
  // The hundredth byte falls inside of a character, which must not be cut.
  plan = small_plan();
  plan.model = "x";
  for (int i = 0; i < 100; ++i) plan.model += "\xc3\xa9";
  const std::string error = plan_error_of([&] { plan.check_fits({}); });
  EXPECT_NE(error.find("\xc3\xa9'... with"), error.npos) << error;
}

TEST(PlanExplain, IsReasonsRuleByRuleAndLayerByLayer) {
  EXPECT_EQ(small_plan().explain(),
            "Net with x=float32[4, 8] for sim, adamw, mode aggressive, budget "
            "6.00 MiB\n"
            "peak 10.00 MiB -> 5.00 MiB (-50 %), predicted slowdown +10 %\n"
            "rule weigh_memory: little\n"
            "rule recompute_layers: some\n"
            "(the model itself): keep, 1.00 KiB -> 1.00 KiB\n"
            "a: recompute (cheap), 4.00 MiB -> 1.00 MiB, 1 us: frees 3.00 MiB\n"
            "b.0: recompute (keeps 2 results of 2 ops), 4.00 MiB -> 1.00 MiB, "
            "3 us: frees 3.00 MiB\n");
}

TEST(PlanExplain, LeavesOutLayersThatHoldNothing) {
  Plan plan = small_plan();
  plan.layers[0].plain_bytes = 0_B;
  EXPECT_EQ(plan.explain().find("(the model itself)"), std::string::npos);
  plan.layers[0].choices = {made_choice("recompute", "block")};
  EXPECT_NE(plan.explain().find("(the model itself): recompute (block)"),
            std::string::npos);
}

TEST(PlanExplain, TakesTheLargestNumbers) {
  Plan plan = small_plan();
  plan.plain_peak = plan.peak = plan.host_peak = Bytes(kMax);
  plan.plain_nanoseconds = plan.nanoseconds = kMax;
  for (LayerPlan& layer : plan.layers) {
    layer.plain_bytes = layer.held_bytes = Bytes(kMax);
    for (Choice& choice : layer.choices) choice.nanoseconds = kMax;
  }
  plan.check();
  EXPECT_NE(plan.explain().find("9223372036854776 us"), std::string::npos)
      << plan.explain();
  EXPECT_NE(plan.explain().find("predicted slowdown +100 %"),
            std::string::npos);
  plan.plain_nanoseconds = 1;
  plan.plain_peak = 1_B;
  EXPECT_FALSE(plan.explain().empty());
  EXPECT_FALSE(plan.diff(small_plan()).empty());
}

TEST(PlanDiff, IsEmptyForEqualPlans) {
  EXPECT_EQ(small_plan().diff(small_plan()), "");
}

TEST(PlanDiff, SaysLineByLineWhatTheOtherDoes) {
  const Plan plan = small_plan();
  Plan other = plan;
  other.model = "Web";
  other.call = "y";
  other.device = "cuda:0";
  other.optimizer = "sgd";
  other.mode = OptimizationMode::Balanced;
  other.budget = 7_MiB;
  other.peak = 6_MiB;
  other.nanoseconds = 0;
  other.choices.clear();
  other.layers[0].choices = {made_choice("recompute", "block")};
  other.layers[2].choices[0].keep_set->kept.back() = {1, 0};
  EXPECT_EQ(plan.diff(other),
            "model: Net -> Web\n"
            "call: x=float32[4, 8] -> y\n"
            "device: sim -> cuda:0\n"
            "optimizer: adamw -> sgd\n"
            "mode: aggressive -> balanced\n"
            "budget: 6.00 MiB -> 7.00 MiB\n"
            "optimizer_state: 8 bits -> not used\n"
            "predicted peak: 5.00 MiB -> 6.00 MiB\n"
            "predicted slowdown: +10 % -> +0 %\n"
            "(the model itself): keep -> recompute (block)\n"
            "b.0: keeps other results\n");
}

TEST(PlanDiff, ABudgetThatIsNotThereIsNone) {
  Plan plan = small_plan();
  Plan other = plan;
  other.budget.reset();
  EXPECT_EQ(plan.diff(other), "budget: 6.00 MiB -> none\n");
  EXPECT_EQ(other.diff(plan), "budget: none -> 6.00 MiB\n");
}

TEST(PlanDiff, NamesLayersThatOnlyOneHas) {
  const Plan plan = small_plan();
  Plan other = plan;
  other.layers[1].layer = "c";
  EXPECT_EQ(plan.diff(other),
            "a: only in the first\n"
            "c: only in the second\n");
}

TEST(Fingerprint, ChangesWithLayersAndForwardOpsAlone) {
  TinyProgram program;
  program.enter(program.layer("a"));
  const Value x = program.batch({4});
  const Value y = program.call("aten::tanh", {x}, {4});
  program.save(y);
  const Trace trace = program.finish();

  const std::string fingerprint = fingerprint_of(trace);
  EXPECT_EQ(fingerprint, "a9bbff99aa040ccc");  // equal on every host
  const auto changed = [&](const std::function<void(Trace&)>& change) {
    Trace other = trace;
    change(other);
    return fingerprint_of(other) != fingerprint;
  };
  EXPECT_FALSE(changed([](Trace& t) { t.ops.back().name = "other"; }));
  EXPECT_FALSE(changed([](Trace& t) { t.ops[0].flops = 99; }));
  EXPECT_TRUE(changed([](Trace& t) { t.ops[0].name = "aten::sin"; }));
  EXPECT_TRUE(changed([](Trace& t) { t.ops[0].layer = {}; }));
  EXPECT_TRUE(changed([](Trace& t) { t.layers[0].name = "b"; }));
  EXPECT_TRUE(changed([](Trace& t) { t.layers.push_back({"b"}); }));
}

}  // namespace
}  // namespace memscale
