#include "memscale/core/ops/op_cost.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace memscale {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

using Shape = std::vector<std::int64_t>;
using Shapes = std::vector<Shape>;

// A call of tensors of these shapes, all float32.
OpCost cost(std::string name, const Shapes& inputs, const Shapes& outputs,
            Dtype dtype = Dtype::Float32, bool view = false) {
  Trace trace;
  Op op;
  op.name = std::move(name);
  op.view = view;
  const auto add = [&](const Shapes& shapes, std::vector<ValueId>& ids) {
    for (const Shape& shape : shapes) {
      ids.emplace_back(trace.values.size());
      trace.values.push_back(
          {.storage = {}, .dtype = dtype, .sizes = shape, .strides = {}});
    }
  };
  add(inputs, op.inputs);
  add(outputs, op.outputs);
  return op_cost(trace, op);
}

std::int64_t flops(std::string name, const Shapes& inputs,
                   const Shapes& outputs) {
  return cost(std::move(name), inputs, outputs).flops;
}

TEST(OpCost, MatrixProducts) {
  EXPECT_EQ(flops("aten::mm", {{3, 5}, {5, 7}}, {{3, 7}}), 2 * 3 * 5 * 7);
  EXPECT_EQ(flops("aten::mm.out", {{3, 5}, {5, 7}, {3, 7}}, {{3, 7}}), 210);
  EXPECT_EQ(flops("aten::addmm", {{7}, {3, 5}, {5, 7}}, {{3, 7}}), 210);
  EXPECT_EQ(flops("aten::addmm_", {{3, 7}, {3, 5}, {5, 7}}, {{3, 7}}), 210);
  EXPECT_EQ(flops("aten::_addmm_activation", {{7}, {3, 5}, {5, 7}}, {{3, 7}}),
            210);
  EXPECT_EQ(flops("aten::bmm", {{2, 3, 5}, {2, 5, 7}}, {{2, 3, 7}}), 420);
  EXPECT_EQ(
      flops("aten::baddbmm", {{2, 3, 7}, {2, 3, 5}, {2, 5, 7}}, {{2, 3, 7}}),
      420);
  EXPECT_EQ(flops("aten::addbmm", {{3, 7}, {2, 3, 5}, {2, 5, 7}}, {{3, 7}}),
            420);
  EXPECT_EQ(flops("aten::mv", {{3, 5}, {5}}, {{3}}), 30);
  // Six rows, four experts: forward, and the gradients of rows and matrices.
  EXPECT_EQ(flops("aten::_grouped_mm", {{6, 5}, {4, 5, 7}, {4}}, {{6, 7}}),
            420);
  EXPECT_EQ(flops("aten::_grouped_mm", {{4, 7, 5}, {5, 6}, {4}}, {{7, 6}}),
            420);
  EXPECT_EQ(flops("aten::_grouped_mm", {{5, 6}, {6, 7}, {4}}, {{4, 5, 7}}),
            420);
  EXPECT_EQ(flops("aten::addmv", {{1}, {3, 5}, {5}}, {{3}}), 30);
  EXPECT_EQ(flops("aten::dot", {{5}, {5}}, {{}}), 10);
  EXPECT_EQ(flops("aten::linear", {{2, 3, 5}, {7, 5}, {7}}, {{2, 3, 7}}), 420);
  EXPECT_EQ(flops("aten::linear", {{2, 3, 5}, {5}}, {{2, 3}}), 60);
  EXPECT_EQ(flops("aten::matmul", {{3, 5}, {2, 5, 7}}, {{2, 3, 7}}), 420);
  EXPECT_EQ(flops("aten::mm", {{3, 0}, {0, 7}}, {{3, 7}}), 0);
}

TEST(OpCost, Convolutions) {
  // 3x3 over 8x8 without padding: 6x6 outputs of 16 channels from 4.
  const Shape in = {2, 4, 8, 8}, weight = {16, 4, 3, 3}, out = {2, 16, 6, 6};
  const std::int64_t expected = 2LL * (2 * 16 * 6 * 6) * (4 * 3 * 3);
  for (const char* name : {"convolution", "_convolution", "mkldnn_convolution",
                           "convolution_overrideable", "cudnn_convolution"}) {
    EXPECT_EQ(flops(str("aten::", name), {in, weight, {16}}, {out}), expected)
        << name;
  }
  // Two groups: each filter sees half of the channels.
  EXPECT_EQ(flops("aten::convolution", {in, {16, 2, 3, 3}}, {out}),
            expected / 2);
  // Depthwise.
  EXPECT_EQ(flops("aten::convolution", {in, {4, 1, 3, 3}}, {{2, 4, 6, 6}}),
            2 * (2 * 4 * 6 * 6) * 9);
  // One dimension.
  EXPECT_EQ(flops("aten::convolution", {{1, 3, 10}, {6, 3, 5}}, {{1, 6, 6}}),
            2 * (6 * 6) * (3 * 5));
}

TEST(OpCost, TransposedConvolutions) {
  // (in, out / groups, 2, 2) at stride 2: each input meets 16 * 4 weights.
  const std::int64_t expected = 2 * (2 * 4 * 8 * 8) * (16 * 2 * 2);
  EXPECT_EQ(flops("aten::convolution", {{2, 4, 8, 8}, {4, 16, 2, 2}},
                  {{2, 16, 16, 16}}),
            expected);
  // Two groups.
  EXPECT_EQ(flops("aten::convolution", {{2, 4, 8, 8}, {4, 8, 2, 2}},
                  {{2, 16, 16, 16}}),
            expected / 2);
  // As many channels out as in: what enlarges is transposed, else it is not.
  EXPECT_EQ(flops("aten::convolution", {{1, 4, 8, 8}, {4, 4, 2, 2}},
                  {{1, 4, 16, 16}}),
            2 * (4 * 8 * 8) * (4 * 2 * 2));
  EXPECT_EQ(flops("aten::convolution", {{1, 4, 16, 16}, {4, 4, 2, 2}},
                  {{1, 4, 8, 8}}),
            2 * (4 * 8 * 8) * (4 * 2 * 2));
  // It shrinks, but its weight fits no plain one.
  EXPECT_EQ(
      flops("aten::convolution", {{1, 4, 8, 8}, {4, 6, 3, 3}}, {{1, 6, 6, 6}}),
      2 * (4 * 8 * 8) * (6 * 3 * 3));
  // It shrinks, and only its name tells.
  EXPECT_EQ(flops("aten::cudnn_convolution_transpose",
                  {{1, 4, 8, 8}, {4, 4, 3, 3}}, {{1, 4, 6, 6}}),
            2 * (4 * 8 * 8) * (4 * 3 * 3));
}

TEST(OpCost, ConvolutionBackwardCountsTheGradientsAskedFor) {
  const Shape in = {2, 4, 8, 8}, weight = {16, 4, 3, 3}, out = {2, 16, 6, 6};
  const std::int64_t forward = 2LL * (2 * 16 * 6 * 6) * (4 * 3 * 3);
  const Shapes inputs = {out, in, weight};
  for (const char* name : {"aten::convolution_backward",
                           "aten::convolution_backward_overrideable"}) {
    EXPECT_EQ(flops(name, inputs, {in, weight, {16}}), 2 * forward);
    EXPECT_EQ(flops(name, inputs, {weight, {16}}), forward);
    EXPECT_EQ(flops(name, inputs, {in}), forward);
    EXPECT_EQ(flops(name, inputs, {{16}}), 16);
  }
  // Of a transposed one: grad_output is the larger side.
  EXPECT_EQ(flops("aten::convolution_backward",
                  {{2, 16, 16, 16}, {2, 4, 8, 8}, {4, 16, 2, 2}},
                  {{2, 4, 8, 8}, {4, 16, 2, 2}}),
            2 * 2 * (2 * 4 * 8 * 8) * (16 * 2 * 2));
}

TEST(OpCost, Attention) {
  // 8 query heads share 2 of key and value; 10 queries, 20 keys, d 16, dv 32.
  const Shape q = {3, 8, 10, 16}, k = {3, 2, 20, 16}, v = {3, 2, 20, 32};
  const Shape out = {3, 8, 10, 32}, lse = {3, 8, 10};
  const std::int64_t pairs = 3 * 8 * 10 * 20;
  for (const char* name : {"_scaled_dot_product_flash_attention",
                           "_scaled_dot_product_flash_attention_for_cpu",
                           "_scaled_dot_product_efficient_attention",
                           "_scaled_dot_product_cudnn_attention",
                           "_scaled_dot_product_fused_attention_overrideable",
                           "_scaled_dot_product_attention_math",
                           "_scaled_dot_product_flash_attention.quantized",
                           "scaled_dot_product_attention"}) {
    EXPECT_EQ(flops(str("aten::", name), {q, k, v}, {out, lse}),
              2 * pairs * (16 + 32))
        << name;
  }
  for (const char* name :
       {"_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_fused_attention_overrideable_backward"}) {
    EXPECT_EQ(flops(str("aten::", name), {out, q, k, v, out, lse}, {q, k, v}),
              2 * pairs * (3 * 16 + 2 * 32))
        << name;
  }
}

TEST(OpCost, RecurrentLayer) {
  // An LSTM of 5 features and 6 units: 4 gates, over 7 steps of 3 sequences.
  const Shape input = {7, 3, 5}, w_input = {24, 5}, w_hidden = {24, 6};
  const Shape bias = {24}, state = {3, 6}, output = {7, 3, 6};
  const std::int64_t forward = 2 * (7 * 3) * (24 * 5 + 24 * 6);
  EXPECT_EQ(
      flops("aten::mkldnn_rnn_layer",
            {input, w_input, w_hidden, bias, bias, state, state}, {output}),
      forward);
  EXPECT_EQ(flops("aten::mkldnn_rnn_layer_backward",
                  {input, w_input, w_hidden, bias, bias, state, state, output},
                  {input, w_input, w_hidden}),
            2 * forward);
}

TEST(OpCost, OtherOpsCostTheirLargestOutput) {
  EXPECT_EQ(cost("aten::add.Tensor", {{2, 3}, {3}}, {{2, 3}}),
            (OpCost{6, Bytes(4 * (6 + 3 + 6))}));
  EXPECT_EQ(flops("aten::native_layer_norm", {{2, 3}}, {{2, 3}, {2}, {2}}), 6);
  EXPECT_EQ(flops("aten::_foreach_add_", {{2, 3}}, {}), 0);
  EXPECT_EQ(flops("mylib::mm", {{3, 5}, {5, 7}}, {{3, 7}}), 21);
  EXPECT_EQ(flops("", {}, {}), 0);
}

TEST(OpCost, ShapesThatDoNotFitTheSchemaCountAsAnyOp) {
  EXPECT_EQ(flops("aten::mm", {{3, 5}}, {{3, 7}}), 21);
  EXPECT_EQ(flops("aten::linear", {}, {{3, 7}}), 21);
  EXPECT_EQ(flops("aten::matmul", {}, {{3, 7}}), 21);
  EXPECT_EQ(flops("aten::convolution", {{4, 8, 8}, {4, 4, 3, 3}}, {{4, 6, 6}}),
            144);
  EXPECT_EQ(flops("aten::convolution_backward", {{2, 3, 4}}, {{2, 3, 4}}), 24);
  EXPECT_EQ(flops("aten::_scaled_dot_product_flash_attention", {{4}}, {{4}}),
            4);
  EXPECT_EQ(flops("aten::mkldnn_rnn_layer", {{7, 3, 5}}, {{7, 3, 6}}), 126);
  // No groups can be made of nothing.
  EXPECT_EQ(flops("aten::convolution", {{1, 0, 8}, {4, 0, 3}}, {{1, 4, 6}}), 0);
}

TEST(OpCost, ViewsCostNothing) {
  EXPECT_EQ(cost("aten::view", {{2, 3}}, {{6}}, Dtype::Float32, true),
            OpCost());
}

TEST(OpCost, MovedCountsElementsOfTheDtype) {
  const auto moved = [](Dtype dtype) {
    return cost("aten::relu", {{2, 3}}, {{2, 3}}, dtype).moved;
  };
  EXPECT_EQ(moved(Dtype::Float32), 48_B);
  EXPECT_EQ(moved(Dtype::BFloat16), 24_B);
  EXPECT_EQ(moved(Dtype::Complex128), 192_B);
  EXPECT_EQ(moved(Dtype::Float8E4M3FN), 12_B);
  EXPECT_EQ(moved(Dtype::Bool), 12_B);
}

TEST(OpCost, HugeNumbersStopAtTheMaximum) {
  const std::int64_t big = std::int64_t{1} << 31;
  EXPECT_EQ(cost("aten::mm", {{big, big}, {big, big}}, {{big, big}}),
            (OpCost{kMax, Bytes(kMax)}));
  EXPECT_EQ(flops("aten::relu", {{kMax, 4, 0}}, {{kMax, 4, 0}}), 0);
}

std::vector<std::string> uncounted(std::string name, const Shapes& inputs,
                                   const Shapes& outputs) {
  Trace trace;
  Op op;
  op.name = std::move(name);
  const auto add = [&](const Shape& sizes) {
    Value value;
    value.sizes = sizes;
    trace.values.push_back(std::move(value));
    return ValueId(trace.values.size() - 1);
  };
  for (const Shape& sizes : inputs) op.inputs.push_back(add(sizes));
  for (const Shape& sizes : outputs) op.outputs.push_back(add(sizes));
  trace.ops = {op, op};
  return uncounted_ops(trace);
}

TEST(OpCost, ExpensiveOpsWithoutACounterAreNamedOnce) {
  using Names = std::vector<std::string>;
  const Shape small = {4, 4};
  for (const char* name :
       {"aten::_trilinear", "aten::_efficient_attention_backward",
        "aten::no_such_mm.out", "aten::_cudnn_rnn", "aten::linalg_qr"}) {
    EXPECT_EQ(uncounted(name, {small}, {small}), Names{name});
  }
  // A formula that the shapes do not fit counts nothing.
  EXPECT_EQ(uncounted("aten::convolution", {small, small}, {small}),
            Names{"aten::convolution"});
}

TEST(OpCost, OpsThatAreCountedOrCheapAreNotNamed) {
  const Shape large = {1024, 1024};
  for (const char* name :
       {"aten::mm", "aten::relu", "aten::topk", "aten::_fft_r2c",
        "aten::_weight_norm_interface", "aten::comma", "aten::sort",
        "memscale::adam_step"}) {
    EXPECT_TRUE(uncounted(name, {large, large}, {large}).empty()) << name;
  }
}

TEST(OpCost, ForeignOpsAreNamedIfTheyMoveMuch) {
  const Shape little = {16, 16}, much = {512, 512};
  EXPECT_TRUE(uncounted("mylib::fused", {little}, {little}).empty());
  EXPECT_EQ(uncounted("mylib::fused", {much}, {much}),
            std::vector<std::string>{"mylib::fused"});
}

TEST(OpCost, FourierTransformsCountTheirDoublings) {
  EXPECT_EQ(flops("aten::_fft_r2c", {{8, 1024}}, {{8, 513}}),
            5 * 10 * 8 * 1024);
}

}  // namespace
}  // namespace memscale
