// Hazards of replay, one by one, on memory that counts: what is held after
// forward, what is called again, and that nothing wrong is read.

#include "memscale/core/tape/tape.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "counted_step.h"
#include "memscale/core/tape/key_map.h"
#include "tiny_program.h"

namespace memscale {
namespace {

const std::vector<std::int64_t> kSizes = {64, 64};
constexpr std::int64_t kSquare = 4 * 64 * 64;

class TapeTest : public testing::Test {
 protected:
  TinyProgram program;
  const LayerId model = program.layer("");
  const LayerId a = program.layer("a");
  const LayerId b = program.layer("b");

  Value relu(const Value& x) { return program.call("aten::relu", {x}, kSizes); }
  // Larger than what it is made from, so that it is worth dropping.
  Value cat(const Value& x) {
    return program.call("aten::cat", {x, x}, {128, 64});
  }

  CountedStep run(ReplayPolicy policy, const Trouble& trouble = {},
                  const std::vector<std::size_t>& swaps = {},
                  bool on_cpu = false) {
    const Trace plain = program.finish(swaps);
    for (const Op& op : plain.ops) {
      num_forward += op.phase == Phase::Forward ? 1 : 0;
    }
    CountedStep step = counted_step(
        plain, std::vector<TapeRules>(3, {.policy = policy}), on_cpu, trouble);
    EXPECT_EQ(step.faults, std::vector<std::string>());
    EXPECT_EQ(step.held_by_tapes, 0);
    // Beside what was there before the step, when backward begins: it has made
    // one number.
    held = step.bytes[num_forward] - residents - 4;
    return step;
  }
  Value batch() {
    residents += kSquare;
    return program.batch(kSizes);
  }

  std::size_t num_forward = 0;
  std::int64_t residents = 0;
  std::int64_t held = 0;
};

TEST_F(TapeTest, AnOldVersionIsCopiedBeforeTheWrite) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  program.save(y);
  program.write("aten::relu_", {x});
  program.let_go(y);
  EXPECT_EQ(run(ReplayPolicy::Block).num_failed, 0U);
  EXPECT_EQ(held, kSquare);  // the copy
}

TEST_F(TapeTest, AWriteAfterTheLayerIsSeenAsWell) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  program.save(y);
  program.let_go(y);
  program.enter(b);
  program.write("aten::relu_", {x});
  EXPECT_EQ(run(ReplayPolicy::Block).num_failed, 0U);
  EXPECT_EQ(held, kSquare);
}

TEST_F(TapeTest, WithoutMemoryForTheCopyTheSaveIsRefused) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  program.save(y);
  program.write("aten::relu_", {x});
  program.let_go(y);
  EXPECT_EQ(run(ReplayPolicy::Block, {.no_memory_for_copies = true}).num_failed,
            1U);
  EXPECT_EQ(held, 0);
}

TEST_F(TapeTest, AWriteInPlaceIsRepeatedOnMemoryOfItsOwn) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  const Value z = program.write("aten::relu_", {y});
  program.save(z);
  program.let_go(z);
  EXPECT_EQ(run(ReplayPolicy::Block).num_repeated, 2U);
  EXPECT_EQ(held, 0);
}

TEST_F(TapeTest, AnArgumentThatIsWrittenAndReadIsOneMemory) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  const Value z = program.write("aten::mul_.Tensor", {y, y});
  program.save(z);
  program.let_go(z);
  EXPECT_EQ(run(ReplayPolicy::Block).num_repeated, 2U);
}

TEST_F(TapeTest, WhatIsOverwrittenIsNotReadAgain) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  const Value z = program.write("aten::zero_", {y});
  program.save(z);
  program.let_go(z);
  EXPECT_EQ(run(ReplayPolicy::Block).num_repeated, 1U);
}

TEST_F(TapeTest, AViewIsItsBase) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  const Value z = program.view("aten::view", y, {128 * 64});
  program.save(z);
  program.write("aten::relu_", {relu(y)});
  program.let_go(y);
  EXPECT_EQ(run(ReplayPolicy::Block).num_repeated, 1U);
}

TEST_F(TapeTest, DrawsAreHeldInBitsOnTheCpu) {
  program.enter(a);
  const Value x = batch();
  const Value mask = program.call("aten::empty_like", {x}, kSizes);
  const Value drawn = program.write("aten::bernoulli_.float", {mask});
  const Value scaled = program.write("aten::div_.Scalar", {drawn});
  program.save(scaled);
  program.let_go(scaled);
  EXPECT_EQ(run(ReplayPolicy::Block, {}, {}, true).num_repeated, 1U);
  EXPECT_EQ(held, kSquare / 32);
}

TEST_F(TapeTest, WhatAFunctionMayWriteIsCopied) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  program.save(y);
  program.let_go(y);
  program.begin_function({x});
  const Value inside = relu(x);
  program.end_function({x});
  program.let_go(inside);
  EXPECT_EQ(run(ReplayPolicy::Block).num_failed, 0U);
  EXPECT_EQ(held, kSquare);
}

TEST_F(TapeTest, ALineageIsCutAtTheLayersInput) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  program.let_go(x);
  program.enter(b);
  const Value z = program.call("aten::cat", {y, y}, {256, 64});
  program.save(z);
  program.let_go(y);
  program.let_go(z);
  EXPECT_EQ(run(ReplayPolicy::Block).num_repeated, 1U);
  EXPECT_EQ(held, 2 * kSquare);  // y
}

// A trace tells the two calls apart, and so do tapes.
TEST_F(TapeTest, TwoCallsOfALayerAreTwoTapes) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  program.enter_again();
  const Value z = program.call("aten::cat", {y, y}, {256, 64});
  program.save(z);
  program.let_go(y);
  program.let_go(z);
  EXPECT_EQ(run(ReplayPolicy::Block).num_repeated, 1U);
  EXPECT_EQ(held, 2 * kSquare);
}

TEST_F(TapeTest, UnderCheapALineageCrossesBorders) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  program.enter(b);
  const Value z = program.call("aten::cat", {y, y}, {256, 64});
  program.save(z);
  program.let_go(y);
  program.let_go(z);
  EXPECT_EQ(run(ReplayPolicy::Cheap).num_repeated, 2U);
  EXPECT_EQ(held, 0);
}

TEST_F(TapeTest, EachOpIsRepeatedOnceInAnyOrderOfBackward) {
  for (const std::size_t swap : {0U, 1U, 2U}) {
    TinyProgram one;
    one.layer("");
    one.enter(one.layer("a"));
    const Value x = one.batch(kSizes);
    Value y = one.call("aten::cat", {x, x}, {128, 64});
    for (int i = 0; i < 3; ++i) {
      const Value next = one.call("aten::exp", {y}, {128, 64});
      one.save(next);
      one.let_go(y);
      y = next;
    }
    one.let_go(y);
    const CountedStep step = counted_step(
        one.finish({swap, swap}),
        std::vector<TapeRules>(2, {.policy = ReplayPolicy::Block}), false);
    EXPECT_EQ(step.faults, std::vector<std::string>());
    EXPECT_EQ(step.num_repeated, 4U);
    EXPECT_EQ(step.held_by_tapes, 0);
  }
}

TEST_F(TapeTest, AnOpThatRaisesCanBeRepeatedLater) {
  program.enter(a);
  const Value x = batch();
  const Value y = cat(x);
  program.save(y);
  program.let_go(y);
  const CountedStep step =
      run(ReplayPolicy::Block, {.raises = OpId(std::size_t{0})});
  EXPECT_EQ(step.num_failed, 0U);
  EXPECT_EQ(step.num_repeated, 2U);
}

TEST(KeyMap, KnowsWhatWasSetLast) {
  KeyMap map;
  EXPECT_EQ(map.find(8), kNone);
  for (StateId i = 0; i < 1000; ++i) map.set(8 * (i + 1), i);
  map.set(16, 5000);
  map.set(24, kNone);
  EXPECT_EQ(map.find(8), 0U);
  EXPECT_EQ(map.find(16), 5000U);
  EXPECT_EQ(map.find(24), kNone);
  EXPECT_EQ(map.find(8 * 1000), 999U);
  EXPECT_EQ(map.find(8 * 1001), kNone);
  map.clear();
  EXPECT_EQ(map.find(8), kNone);
}

TEST(WhyNot, FollowsTheTarget) {
  const ReplayRules sum = find_replay_rules("aten::index_add");
  EXPECT_EQ(why_not(sum, {}, {}), Why::Replayed);
  EXPECT_EQ(why_not(sum, {}, {.on_cuda = true}), Why::Unordered);
  const ReplayRules convolution = find_replay_rules("aten::convolution");
  EXPECT_EQ(why_not(convolution, {}, {.on_cuda = true}), Why::Replayed);
  EXPECT_EQ(why_not(convolution, {.transposed = true}, {.on_cuda = true}),
            Why::Unordered);
  EXPECT_EQ(why_not(convolution, {}, {.on_cuda = true, .benchmarks = true}),
            Why::Benchmarked);
  const ReplayRules relu = find_replay_rules("aten::relu");
  EXPECT_EQ(why_not(relu, {.in_function = true}, {}), Why::InFunction);
  EXPECT_EQ(why_not(relu, {.in_mode = true}, {}), Why::Mode);
  EXPECT_EQ(why_not(relu, {.all_plain = false}, {}), Why::Special);
  EXPECT_EQ(why_not(relu, {.accumulates = true}, {}), Why::Unordered);
  EXPECT_EQ(why_not(find_replay_rules("mylib::op"), {}, {}), Why::Never);
  EXPECT_EQ(why_not(find_replay_rules("aten::empty"), {}, {}), Why::Factory);
}

TEST(Covers, AWholeStorageOnce) {
  const std::vector<std::int64_t> sizes = {2, 3};
  const std::vector<std::int64_t> strides = {3, 1};
  const std::vector<std::int64_t> transposed = {1, 2};
  const std::vector<std::int64_t> expanded = {0, 1};
  EXPECT_TRUE(covers(sizes, strides, 0, 4, 24));
  EXPECT_TRUE(covers(sizes, transposed, 0, 4, 24));
  EXPECT_FALSE(covers(sizes, strides, 1, 4, 24));
  EXPECT_FALSE(covers(sizes, expanded, 0, 4, 24));
  EXPECT_FALSE(covers(sizes, strides, 0, 4, 28));
}

}  // namespace
}  // namespace memscale
