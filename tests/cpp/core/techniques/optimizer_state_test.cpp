#include "memscale/core/techniques/optimizer_state.h"

#include <gtest/gtest.h>

#include "memscale/core/trace/timeline.h"

namespace memscale {
namespace {

// A weight of 10,000 elements and a bias of 10, a forward op, a backward op
// that makes the gradients, and an optimizer's step with a temporary.
Trace adam_step_of(Dtype dtype, std::int64_t width) {
  Trace trace;
  trace.layers = {{""}};
  const auto storage = [&](std::int64_t elements, Category category,
                           OpId born = {}, OpId freed = {}) {
    Storage& made = trace.storages.emplace_back();
    made.bytes = Bytes(elements * width);
    made.category = category;
    made.born = born;
    made.freed = freed;
    trace.values.push_back({.storage = StorageId(trace.storages.size() - 1),
                            .dtype = dtype,
                            .sizes = {elements},
                            .strides = {1}});
  };
  storage(10'000, Category::Parameter);
  storage(10, Category::Parameter);
  storage(10'000, Category::Gradient, OpId(1), OpId(3));
  for (int moment = 0; moment < 2; ++moment) {
    storage(10'000, Category::OptimizerState);
    storage(10, Category::OptimizerState);
  }
  storage(10'000, Category::Transient, OpId(2), OpId(3));
  // One that the traced ones stand for: it has no value.
  trace.storages.push_back(trace.storages[3]);
  trace.storages.back().count = 3;
  const auto op = [&](Phase phase, std::vector<ValueId> inputs,
                      std::vector<ValueId> outputs) {
    Op& made = trace.ops.emplace_back();
    made.name = "aten::op";
    made.phase = phase;
    made.inputs = std::move(inputs);
    made.outputs = std::move(outputs);
  };
  op(Phase::Forward, {ValueId(0)}, {});
  op(Phase::Backward, {}, {ValueId(2)});
  op(Phase::Optimizer, {ValueId(3)}, {ValueId(7)});
  op(Phase::Optimizer, {ValueId(7)}, {ValueId(0)});
  trace.check();
  return trace;
}

TEST(OptimizerBits, BytesOfStates) {
  for (const auto& [dtype, width] :
       {std::pair(Dtype::Float32, 4), std::pair(Dtype::BFloat16, 2)}) {
    const Trace plain = adam_step_of(dtype, width);
    const Trace made = with_8bit_state(plain, true);
    made.check();
    // 10,000 are 40 blocks; small states are floats whatever they were.
    EXPECT_EQ(optimizer_state_bytes(plain), Bytes((5 * 10'000 + 20) * width));
    EXPECT_EQ(optimizer_state_bytes(made),
              Bytes(5 * (10'000 + 40 * 4) + 20 * 4));
  }
}

TEST(OptimizerBits, OtherTypesStayAsTheyAre) {
  const Trace plain = adam_step_of(Dtype::Float64, 8);
  EXPECT_EQ(optimizer_state_bytes(with_8bit_state(plain, true)),
            optimizer_state_bytes(plain));
  // Of a state that may be either, more bytes.
  Trace both = adam_step_of(Dtype::Float32, 4);
  both.values.push_back(both.values[3]);
  both.values.back().dtype = Dtype::BFloat16;
  EXPECT_EQ(optimizer_state_bytes(with_8bit_state(both, true)),
            Bytes(5 * (20'000 + 79 * 4) + 20 * 4));
}

TEST(OptimizerBits, TheStepIsOneOpWithoutTemporaries) {
  const Trace plain = adam_step_of(Dtype::Float32, 4);
  const Trace made = with_8bit_state(plain, true);
  ASSERT_EQ(made.ops.size(), 3U);
  EXPECT_EQ(made.ops.back().phase, Phase::Optimizer);
  EXPECT_EQ(made.ops.back().workspace, Bytes());
  // Parameters, the gradient that the step reads, states; no temporary.
  const Timeline timeline(made, Place::Device, Bytes(1));
  EXPECT_EQ(timeline.instants().back().bytes,
            Bytes(40'040 + 40'000) + optimizer_state_bytes(made));
  // Elsewhere in pieces.
  EXPECT_EQ(with_8bit_state(plain, false).ops.back().workspace,
            Bytes(10'000 * 24));
}

TEST(OptimizerBits, ForwardAndBackwardStay) {
  const Trace plain = adam_step_of(Dtype::Float32, 4);
  const Trace made = with_8bit_state(plain, true);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(made.ops[i], plain.ops[i]);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(made.storages[i], plain.storages[i]);
  }
}

TEST(OptimizerBits, AStepByAKernelIsNoSlower) {
  Trace plain = adam_step_of(Dtype::Float32, 4);
  // As torch's AdamW moves them; one of each kind was traced, for others too.
  for (Op& op : plain.ops) op.moved = Bytes(50 * 10'000);
  for (const CostModel& cost :
       {CostModel::of_cpu(), CostModel::of(DeviceSpec())}) {
    const StepTimes times = optimizer_step_times(plain, cost, false);
    EXPECT_GT(times.plain, 0);
    EXPECT_GT(times.with_8bit, 0);
    EXPECT_EQ(times.extra(), 0);
    EXPECT_EQ(times.times(), 1);
  }
}

TEST(OptimizerBits, AStepInPiecesHasItsPrice) {
  Trace plain = adam_step_of(Dtype::Float32, 4);
  for (Op& op : plain.ops) op.moved = Bytes(50 * 10'000);
  for (const CostModel& cost :
       {CostModel::of_cpu(), CostModel::of(DeviceSpec())}) {
    const StepTimes times = optimizer_step_times(plain, cost, true);
    EXPECT_GT(times.times(), 3);
    EXPECT_EQ(times.extra(), times.with_8bit - times.plain);
    // All of a kind, not only the one that was traced.
    Trace more = plain;
    more.storages.back().count = 300;
    EXPECT_GT(optimizer_step_times(more, cost, true).extra(),
              20 * times.extra());
  }
  // Nothing to step: no time, and no division by it.
  const StepTimes none =
      optimizer_step_times(Trace(), CostModel::of_cpu(), true);
  EXPECT_EQ(none.extra(), 0);
  EXPECT_EQ(none.times(), 1);
}

}  // namespace
}  // namespace memscale
