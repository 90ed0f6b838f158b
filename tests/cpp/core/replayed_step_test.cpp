#include "memscale/core/predict/replayed_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "memscale/base/error.h"
#include "tiny_program.h"

namespace memscale {
namespace {

using testing::Test;

TapeRules with(ReplayPolicy policy) { return {.policy = policy}; }

std::vector<TapeRules> all(ReplayPolicy policy, std::size_t count) {
  return std::vector<TapeRules>(count, with(policy));
}

// Names of the ops that were called again, in order.
std::vector<std::string> replayed(const ReplayedStep& step) {
  std::vector<std::string> names;
  for (const Op& op : step.trace.ops) {
    const bool repeats =
        op.phase == Phase::Backward && op.forward.valid() &&
        (op.name == step.trace.at(op.forward).name || op.opaque);
    if (repeats) names.push_back(op.name);
  }
  return names;
}

// What forward made and backward finds.
Bytes held(const Trace& trace) {
  const auto backward = std::ranges::find_if(
      trace.ops, [](const Op& op) { return op.phase == Phase::Backward; });
  const OpId first(static_cast<std::size_t>(backward - trace.ops.begin()));
  Bytes sum;
  for (const Storage& storage : trace.storages) {
    if (storage.born.valid() && storage.born < first &&
        first <= storage.freed) {
      sum += storage.bytes;
    }
  }
  return sum;
}

std::size_t num_recomputed(const Trace& trace) {
  return static_cast<std::size_t>(std::ranges::count(
      trace.storages, Category::Recompute, &Storage::category));
}

constexpr Bytes kSquare{4 * 64 * 64};
const std::vector<std::int64_t> kSizes = {64, 64};

// The model, and inside of it two layers.
class ReplayedStepTest : public Test {
 protected:
  TinyProgram program;
  const LayerId model = program.layer("");
  const LayerId a = program.layer("a");
  const LayerId b = program.layer("b");

  // What a layer of its own made of the batch.
  Value input() {
    program.enter(model);
    const Value weight = program.parameter({256, 64});
    const Value batch = program.batch({64, 256});
    const Value result = program.call("aten::mm", {batch, weight}, kSizes);
    program.save(batch);
    return result;
  }
};

TEST_F(ReplayedStepTest, AChainIsComputedAgainFromTheLayersInput) {
  const Value x = input();
  program.enter(a);
  const Value y = program.call("aten::cat", {x, x}, {128, 64});
  program.save(y);
  const Value z = program.call("aten::exp", {y}, {128, 64});
  program.save(z);
  program.let_go(x);
  program.let_go(y);
  program.let_go(z);
  const Trace plain = program.finish();
  ASSERT_EQ(held(plain), 4 * kSquare);

  const ReplayedStep step =
      replayed_step(plain, all(ReplayPolicy::Block, 3), false);
  EXPECT_EQ(held(step.trace), kSquare);  // x
  EXPECT_EQ(replayed(step),
            (std::vector<std::string>{"aten::cat", "aten::exp"}));
  EXPECT_EQ(step.num_replayed, 2U);
  EXPECT_EQ(step.layers[a.index()].ops, 2U);
  EXPECT_EQ(step.layers[a.index()].flops, 2);
  EXPECT_EQ(step.layers[a.index()].held_plain, 4 * kSquare);
  EXPECT_EQ(step.layers[model.index()].held, kSquare);
  EXPECT_EQ(step.trace.saves.size(), 1U);  // of the batch
  // cat's result goes with its own gradient, exp's before that.
  const auto& storages = step.trace.storages;
  EXPECT_LT(storages.back().freed, storages[storages.size() - 2].freed);
}

TEST_F(ReplayedStepTest, WithKeepNothingChanges) {
  const Value x = input();
  program.enter(a);
  const Value y = program.call("aten::relu", {x}, kSizes);
  program.save(y);
  program.let_go(x);
  program.let_go(y);
  const Trace plain = program.finish();
  const ReplayedStep step =
      replayed_step(plain, all(ReplayPolicy::Keep, 3), true);
  EXPECT_EQ(step.trace, plain);
  EXPECT_EQ(step.num_replayed, 0U);
}

TEST_F(ReplayedStepTest, CheapKeepsWhatIsMuchWork) {
  const Value x = input();
  program.enter(a);
  const Value weight = program.parameter(kSizes);
  const Value wide = program.batch({64, 256});
  const Value thin = program.parameter({256, 64});
  const Value y = program.call("aten::mm", {wide, thin}, kSizes);
  const Value z = program.call("aten::mul.Tensor", {y, x}, kSizes);
  program.save(y);
  const Value w = program.call("aten::mul.Tensor", {z, weight}, kSizes);
  program.save(z);
  for (const Value& value : {x, y, z, w}) program.let_go(value);
  const Trace plain = program.finish();

  const ReplayedStep step =
      replayed_step(plain, all(ReplayPolicy::Cheap, 3), false);
  // z comes from x, which would have to be held for it: no gain.
  EXPECT_EQ(held(step.trace), 2 * kSquare);
  EXPECT_EQ(step.num_replayed, 0U);
}

TEST_F(ReplayedStepTest, AWriteInPlaceIsRepeatedInTheSameBytes) {
  const Value x = input();
  program.enter(a);
  const Value y = program.call("aten::add.Tensor", {x, x}, {128, 64});
  const Value z = program.write("aten::relu_", {y});
  program.save(z);
  program.let_go(x);
  program.let_go(z);
  const Trace plain = program.finish();

  const ReplayedStep step =
      replayed_step(plain, all(ReplayPolicy::Block, 3), false);
  EXPECT_EQ(held(step.trace), kSquare);
  EXPECT_EQ(replayed(step),
            (std::vector<std::string>{"aten::add.Tensor", "aten::relu_"}));
  EXPECT_EQ(num_recomputed(step.trace), 1U);
}

TEST_F(ReplayedStepTest, WhatIsNeededStillIsCopiedBeforeAWrite) {
  const Value x = input();
  program.enter(a);
  const Value y = program.call("aten::cat", {x, x}, {128, 64});
  program.save(y);
  program.let_go(y);
  const Value w = program.write("aten::relu_", {x});
  program.let_go(w);
  const Trace plain = program.finish();

  const ReplayedStep step =
      replayed_step(plain, all(ReplayPolicy::Block, 3), false);
  EXPECT_EQ(held(step.trace), kSquare);  // the copy, not x
  EXPECT_EQ(step.trace.storages[x.storage.index()].category,
            Category::Transient);
  EXPECT_EQ(replayed(step), std::vector<std::string>{"aten::cat"});
}

TEST_F(ReplayedStepTest, AViewIsOfTheBytesThatItShows) {
  const Value x = input();
  program.enter(a);
  const Value y = program.call("aten::cat", {x, x}, {128, 64});
  const Value z = program.view("aten::view", y, {64, 128});
  const Value w = program.call("aten::exp", {z}, {64, 128});
  program.save(z);
  for (const Value& value : {x, y, w}) program.let_go(value);
  const Trace plain = program.finish();
  ASSERT_EQ(held(plain), 2 * kSquare);

  const ReplayedStep step =
      replayed_step(plain, all(ReplayPolicy::Block, 3), false);
  EXPECT_EQ(held(step.trace), kSquare);
  EXPECT_EQ(replayed(step), std::vector<std::string>{"aten::cat"});
  // Backward reads the view of the new bytes.
  const auto backward =
      std::ranges::find(step.trace.ops, "aten::exp_backward", &Op::name);
  const Value& read = step.trace.at(backward->inputs[1]);
  EXPECT_EQ(step.trace.at(read.storage).category, Category::Recompute);
  EXPECT_EQ(read.sizes, z.sizes);
}

TEST_F(ReplayedStepTest, ACheapLineageMayCrossBorders) {
  const Value x = input();
  program.enter(a);
  const Value kernel = program.parameter({64, 64, 3, 3});
  const Value y = program.call("aten::convolution", {x, kernel}, kSizes);
  const Value n = program.call("aten::native_layer_norm", {y}, kSizes);
  program.save(y);
  program.enter(b);
  const Value r = program.call("aten::relu", {n}, kSizes);
  program.save(r);
  for (const Value& value : {x, y, n, r}) program.let_go(value);
  const Trace plain = program.finish();
  ASSERT_EQ(held(plain), 2 * kSquare);

  const auto cheap = replayed_step(plain, all(ReplayPolicy::Cheap, 3), false);
  EXPECT_EQ(held(cheap.trace), kSquare);  // y
  EXPECT_EQ(replayed(cheap), (std::vector<std::string>{
                                 "aten::native_layer_norm", "aten::relu"}));
  // With another policy around them there is no way across.
  std::vector<TapeRules> rules = all(ReplayPolicy::Cheap, 3);
  rules[model.index()] = with(ReplayPolicy::Keep);
  const auto apart = replayed_step(plain, rules, false);
  EXPECT_EQ(held(apart.trace), 2 * kSquare);
}

TEST_F(ReplayedStepTest, OnCudaSumsWithoutOrderAreKept) {
  const Value x = input();
  program.enter(a);
  const Value y = program.call("aten::cumsum", {x}, {128, 64});
  program.save(y);
  for (const Value& value : {x, y}) program.let_go(value);
  const Trace plain = program.finish();

  const auto rules = all(ReplayPolicy::Block, 3);
  const auto elsewhere = replayed_step(plain, rules, false);
  const auto on_cuda = replayed_step(plain, rules, false, {.on_cuda = true});
  EXPECT_EQ(on_cuda.num_replayed, 0U);
  EXPECT_EQ(on_cuda.trace.saves.size(), plain.saves.size());
  EXPECT_LT(elsewhere.trace.saves.size(), plain.saves.size());
}

TEST_F(ReplayedStepTest, OnTheCpuDropoutsDrawsAreKeptAsBits) {
  const Value x = input();
  program.enter(a);
  const Value noise = program.call("aten::empty_like", {x}, kSizes);
  const Value drawn = program.write("aten::bernoulli_.float", {noise});
  const Value scaled = program.write("aten::div_.Scalar", {drawn});
  const Value y = program.call("aten::mul.Tensor", {x, scaled}, kSizes);
  program.save(scaled);
  for (const Value& value : {x, scaled, y}) program.let_go(value);
  const Trace plain = program.finish();

  const auto on_cpu = replayed_step(plain, all(ReplayPolicy::Block, 3), true);
  EXPECT_EQ(held(on_cpu.trace), kSquare / 32);
  EXPECT_EQ(replayed(on_cpu), (std::vector<std::string>{"memscale::unpack_bits",
                                                        "aten::div_.Scalar"}));
  EXPECT_EQ(on_cpu.num_replayed, 1U);
  const auto on_card = replayed_step(plain, all(ReplayPolicy::Block, 3), false);
  EXPECT_EQ(held(on_card.trace), 0_B);
  EXPECT_EQ(on_card.num_replayed, 2U);
}

TEST_F(ReplayedStepTest, AKeepSetIsFollowed) {
  const Value x = input();
  program.enter(a);
  const Value y = program.call("aten::relu", {x}, kSizes);
  program.save(y);
  const Value z = program.call("aten::exp", {y}, {65, 64});
  program.save(z);
  for (const Value& value : {x, y, z}) program.let_go(value);
  const Trace plain = program.finish();

  std::vector<TapeRules> rules = all(ReplayPolicy::Keep, 3);
  rules[a.index()].keep_set = std::make_shared<KeepSet>(
      KeepSet{.ops = {"aten::relu", "aten::exp"}, .kept = {{0, 0}}});
  const ReplayedStep step = replayed_step(plain, rules, false);
  EXPECT_EQ(held(step.trace), kSquare);  // y
  EXPECT_EQ(replayed(step), std::vector<std::string>{"aten::exp"});
}

TEST_F(ReplayedStepTest, AfterADifferenceTheRulesSayHowItGoesOn) {
  const Value x = input();
  program.enter(a);
  const Value weight = program.parameter({256, 64});
  const Value wide = program.batch({64, 256});
  const Value y = program.call("aten::mm", {wide, weight}, kSizes);
  program.save(y);
  for (const Value& value : {x, y}) program.let_go(value);
  const Trace plain = program.finish();

  std::vector<TapeRules> rules = all(ReplayPolicy::Keep, 3);
  TapeRules& rule = rules[a.index()];
  rule.keep_set =
      std::make_shared<KeepSet>(KeepSet{.ops = {"aten::exp"}, .kept = {}});
  EXPECT_TRUE(replayed(replayed_step(plain, rules, false)).empty());  // is kept
  rule.after_difference = ReplayPolicy::Block;
  EXPECT_EQ(replayed(replayed_step(plain, rules, false)),
            std::vector<std::string>{"aten::mm"});
}

TEST_F(ReplayedStepTest, WhatTheModelReturnsIsThereAnyway) {
  const Value x = input();
  program.enter(a);
  const Value weight = program.parameter({256, 64});
  const Value wide = program.batch({64, 256});
  const Value y = program.call("aten::mm", {wide, weight}, kSizes);
  const Value z = program.call("aten::exp", {y}, kSizes);
  program.save(z);
  program.let_go(x);
  program.let_go(z);
  program.let_go(y);
  Trace plain = program.finish();

  const auto rules = all(ReplayPolicy::Cheap, 3);
  EXPECT_TRUE(replayed(replayed_step(plain, rules, false)).empty());
  plain.storages[y.storage.index()].returned = true;
  EXPECT_EQ(replayed(replayed_step(plain, rules, false)),
            std::vector<std::string>{"aten::exp"});
}

TEST_F(ReplayedStepTest, SmallAndUnrepeatableResultsAreKept) {
  const Value x = input();
  program.enter(a);
  const Value y = program.call("other::kernel", {x}, {128, 64});
  program.save(y);
  const Value z = program.call("aten::exp", {x}, {128, 64});
  program.save(z);
  for (const Value& value : {x, y, z}) program.let_go(value);
  const Trace plain = program.finish();

  std::vector<TapeRules> rules = all(ReplayPolicy::Block, 3);
  EXPECT_EQ(held(replayed_step(plain, rules, false).trace), 3 * kSquare);
  rules[a.index()].min_bytes = 1 << 20;
  EXPECT_EQ(held(replayed_step(plain, rules, false).trace), 4 * kSquare);
}

TEST_F(ReplayedStepTest, RefusesWhatItCannotKnow) {
  Trace plain = program.finish();
  EXPECT_THROW(replayed_step(plain, all(ReplayPolicy::Block, 2), false),
               TraceError);
  plain.saves_known = false;
  EXPECT_THROW(replayed_step(plain, all(ReplayPolicy::Block, 3), false),
               TraceError);
}

}  // namespace
}  // namespace memscale
