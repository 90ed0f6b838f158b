#include "memscale/core/time/cost_model.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <string_view>

#include "memscale/core/hardware/known_devices.h"

namespace memscale {
namespace {

// One op that reads a tensor of this type and makes one of a million elements.
Trace one_op(std::string name, Dtype dtype = Dtype::Float32) {
  Trace trace;
  trace.storages.resize(2);
  for (std::size_t i = 0; i < 2; ++i) {
    trace.values.push_back({.storage = StorageId(i),
                            .dtype = dtype,
                            .sizes = {1'000, 1'000},
                            .strides = {1'000, 1}});
  }
  Op& op = trace.ops.emplace_back();
  op.name = std::move(name);
  op.inputs = {ValueId(0)};
  op.outputs = {ValueId(1)};
  return trace;
}

DeviceSpec some_card() {
  DeviceSpec card;
  card.fp32_flops = {10e12, Source::Known};
  card.half_flops = {40e12, Source::Known};
  card.memory_bandwidth = {1e12, Source::Known};
  return card;
}

// Without what the call itself takes.
std::int64_t work(const CostModel& model, const Trace& trace) {
  return model.nanoseconds(trace) - model.nanoseconds(one_op("aten::add"));
}

TEST(CostModel, Tf32IsForProductsThatMayUseIt) {
  DeviceSpec card = some_card();
  card.tf32_flops = {80e12, Source::Known};
  const auto time = [&](std::string name, const Tf32& tf32,
                        Dtype dtype = Dtype::Float32) {
    Trace trace = one_op(std::move(name), dtype);
    trace.ops[0].flops = 40'000'000'000;
    return work(CostModel::of(card, tf32), trace);
  };
  const Tf32 off{.matmuls = false, .convolutions = false};
  const Tf32 on{.matmuls = true, .convolutions = true};
  EXPECT_EQ(time("aten::mm", off), 8'000'000);
  EXPECT_EQ(time("aten::mm", on), 1'000'000);
  EXPECT_EQ(time("aten::convolution_backward", off), 8'000'000);
  EXPECT_EQ(time("aten::convolution_backward", on), 1'000'000);
  EXPECT_EQ(time("aten::sin", on), 8'000'000);
  EXPECT_EQ(time("aten::mm", on, Dtype::Float64), 8'000'000);
  EXPECT_EQ(time("aten::mm", on, Dtype::BFloat16), 2'000'000);
  // As torch has it by default.
  EXPECT_EQ(time("aten::mm", {}), time("aten::mm", off));
  EXPECT_EQ(time("aten::convolution", {}), time("aten::convolution", on));
}

TEST(CostModel, WithTf32AnA100IsFasterThanA3090) {
  Trace trace = one_op("aten::addmm");
  trace.ops[0].flops = 40'000'000'000;
  const auto time = [&](std::string_view card, const Tf32& tf32) {
    return CostModel::of(find_device(card), tf32).nanoseconds(trace);
  };
  const Tf32 on{.matmuls = true};
  EXPECT_LT(time("A100 40GB", on), time("RTX 3090", on));
  // Without tensor cores it has fewer units, and is the slower one.
  EXPECT_GT(time("A100 40GB", {}), time("RTX 3090", {}));
  EXPECT_EQ(time("V100 16GB", on), time("V100 16GB", {}));
}

TEST(CostModel, ViewsCostNothing) {
  Trace trace = one_op("aten::view");
  trace.ops[0].view = true;
  trace.ops[0].flops = 1'000'000;
  trace.ops[0].moved = 1_GiB;
  EXPECT_EQ(CostModel::of_cpu().nanoseconds(trace), 0);
  EXPECT_EQ(CostModel::of(some_card()).nanoseconds(trace), 0);
}

TEST(CostModel, ACallCostsSomethingByItself) {
  const Trace trace = one_op("aten::add");
  EXPECT_EQ(CostModel::of_cpu().nanoseconds(trace), 1'500);
  EXPECT_EQ(CostModel::of(some_card()).nanoseconds(trace), 4'000);
}

TEST(CostModel, TheLargerOfComputingAndMovingCounts) {
  const CostModel cpu = CostModel::of_cpu();
  Trace trace = one_op("aten::mm");
  trace.ops[0].flops = 80'000'000;  // 1 ms at 80 GFLOP/s
  EXPECT_EQ(work(cpu, trace), 1'000'000);
  trace.ops[0].moved = Bytes(12'000'000);  // as long at 12 GB/s
  EXPECT_EQ(work(cpu, trace), 1'000'000);
  trace.ops[0].moved = Bytes(24'000'000);
  EXPECT_EQ(work(cpu, trace), 2'000'000);
}

TEST(CostModel, AStepIsTheSumOfItsOps) {
  const CostModel cpu = CostModel::of_cpu();
  Trace trace = one_op("aten::mm");
  trace.ops[0].flops = 8'000'000;
  const std::int64_t one = cpu.nanoseconds(trace);
  trace.ops.push_back(trace.ops[0]);
  trace.ops.push_back(trace.ops[0]);
  trace.ops[1].view = true;
  EXPECT_EQ(cpu.nanoseconds(trace), 2 * one);
  EXPECT_EQ(cpu.nanoseconds(trace, trace.ops[2]), one);
  EXPECT_EQ(cpu.nanoseconds(Trace()), 0);
}

TEST(CostModel, SomeFunctionsTakeLongerOnACpu) {
  const CostModel cpu = CostModel::of_cpu();
  const CostModel card = CostModel::of(some_card());
  // A million elements, picoseconds each; in place or not, any overload.
  EXPECT_EQ(work(cpu, one_op("aten::tanh")), 2'600'000);
  EXPECT_EQ(work(cpu, one_op("aten::pow.Tensor_Scalar")), 1'500'000);
  EXPECT_EQ(work(cpu, one_op("aten::native_dropout")), 7'000'000);
  EXPECT_EQ(work(cpu, one_op("aten::relu")), 0);
  EXPECT_EQ(work(card, one_op("aten::tanh")), 0);
  // Bytes that take longer still count.
  Trace trace = one_op("aten::tanh");
  trace.ops[0].moved = Bytes(120'000'000);
  EXPECT_EQ(work(cpu, trace), 10'000'000);
}

TEST(CostModel, ACardReachesAPartOfItsPeaks) {
  const CostModel card = CostModel::of(some_card());
  Trace trace = one_op("aten::mm");
  trace.ops[0].flops = 5'000'000'000;  // 1 ms at half of 10 TFLOP/s
  EXPECT_EQ(work(card, trace), 1'000'000);
  trace.ops[0].moved = Bytes(1'600'000'000);  // 2 ms at 0.8 TB/s
  EXPECT_EQ(work(card, trace), 2'000'000);
}

TEST(CostModel, ACardIsFasterInHalfPrecision) {
  const CostModel card = CostModel::of(some_card());
  const CostModel cpu = CostModel::of_cpu();
  for (Dtype dtype : {Dtype::BFloat16, Dtype::Float16, Dtype::Float32}) {
    Trace trace = one_op("aten::mm", dtype);
    trace.ops[0].flops = 20'000'000'000;
    const bool half = dtype != Dtype::Float32;
    EXPECT_EQ(work(card, trace), half ? 1'000'000 : 4'000'000)
        << to_string(dtype);
    EXPECT_EQ(work(cpu, trace), 250'000'000) << to_string(dtype);
  }
}

TEST(CostModel, WhatIsNotKnownOfACardIsThatOfAMiddlingOne) {
  DeviceSpec card;
  card.fp32_flops = {123, Source::Unknown};
  const CostModel model = CostModel::of(card);
  Trace trace = one_op("aten::mm");
  trace.ops[0].flops = 7'500'000'000;  // half of 15 TFLOP/s
  EXPECT_EQ(work(model, trace), 1'000'000);
  Trace half = one_op("aten::mm", Dtype::Float16);
  half.ops[0].flops = 30'000'000'000;
  EXPECT_EQ(work(model, half), 1'000'000);
  Trace moving = one_op("aten::add");
  moving.ops[0].moved = Bytes(400'000'000);
  EXPECT_EQ(work(model, moving), 1'000'000);
}

TEST(CostModel, TheLargestNumbersStayWithinAnInteger) {
  Trace trace = one_op("aten::mm");
  trace.ops[0].flops = std::numeric_limits<std::int64_t>::max();
  trace.ops[0].moved = Bytes(std::numeric_limits<std::int64_t>::max());
  trace.ops.resize(9'000, trace.ops[0]);
  EXPECT_GT(CostModel::of_cpu().nanoseconds(trace), 0);
  EXPECT_GT(CostModel::of(some_card()).nanoseconds(trace), 0);
}

}  // namespace
}  // namespace memscale
