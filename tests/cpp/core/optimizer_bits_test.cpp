#include "memscale/core/optimizer_bits.h"

#include <gtest/gtest.h>

#include "memscale/core/timeline.h"

namespace memscale {
namespace {

// A weight of 10,000 elements and a bias of 10, a forward op, a backward op
// that makes the gradients, and an optimizer's step with a temporary.
Trace adam_step_of(std::string dtype, std::int64_t width) {
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
       {std::pair("float32", 4), std::pair("bfloat16", 2)}) {
    const Trace plain = adam_step_of(dtype, width);
    const Trace made = with_8bit_state(plain, true);
    made.check();
    // 10,000 are 40 blocks; small states are floats whatever they were.
    EXPECT_EQ(optimizer_state_bytes(plain), Bytes((5 * 10'000 + 20) * width));
    EXPECT_EQ(optimizer_state_bytes(made),
              Bytes(5 * (10'000 + 40 * 4) + 20 * 4));
  }
}

TEST(OptimizerBits, TheStepIsOneOpWithoutTemporaries) {
  const Trace plain = adam_step_of("float32", 4);
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
  const Trace plain = adam_step_of("float32", 4);
  const Trace made = with_8bit_state(plain, true);
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(made.ops[i], plain.ops[i]);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(made.storages[i], plain.storages[i]);
  }
}

}  // namespace
}  // namespace memscale
