#include "memscale/core/ops/workspace/workspace.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memscale/base/error.h"

// The numbers were measured with memscale.memory.track() around single ops:
// torch 2.13 on a CPU with AVX-512 (without its bfloat16 part).

namespace memscale {
namespace {

using Sizes = std::vector<std::int64_t>;

Sizes packed(const Sizes& sizes) {
  Sizes strides(sizes.size());
  std::int64_t next = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = next;
    next *= sizes[d];
  }
  return strides;
}

Value tensor(Sizes sizes, Dtype dtype = Dtype::Float32) {
  Value value;
  value.dtype = dtype;
  value.strides = packed(sizes);
  value.sizes = std::move(sizes);
  return value;
}

Value half(Sizes sizes) { return tensor(std::move(sizes), Dtype::BFloat16); }

Value strided(Sizes sizes, Sizes strides, Dtype dtype = Dtype::Float32) {
  Value value = tensor(std::move(sizes), dtype);
  value.strides = std::move(strides);
  return value;
}

Value nhwc(Sizes s) {
  Sizes strides = {s[1] * s[2] * s[3], 1, s[3] * s[1], s[1]};
  return strided(std::move(s), std::move(strides));
}

struct Sample {
  Trace trace;
  Op op;
};

Sample sample(std::string name, const std::vector<Value>& inputs,
              const std::vector<Value>& outputs) {
  Sample s;
  s.op.name = std::move(name);
  const auto add = [&](const Value& value) {
    s.trace.values.push_back(value);
    return ValueId(s.trace.values.size() - 1);
  };
  for (const Value& value : inputs) s.op.inputs.push_back(add(value));
  for (const Value& value : outputs) s.op.outputs.push_back(add(value));
  return s;
}

std::optional<std::int64_t> bytes(const Sample& s, int threads = 2) {
  const auto result = workspace(s.trace, s.op, threads);
  return result ? std::optional(result->count()) : std::nullopt;
}

std::optional<std::int64_t> bytes(std::string name,
                                  const std::vector<Value>& inputs,
                                  const std::vector<Value>& outputs,
                                  int threads = 2) {
  return bytes(sample(std::move(name), inputs, outputs), threads);
}

// Not below the measured bytes, and at most a tenth above.
void expect_covers(std::int64_t measured, std::optional<std::int64_t> told) {
  ASSERT_TRUE(told.has_value());
  EXPECT_GE(*told, measured);
  EXPECT_LE(*told, measured + measured / 10 + 1024);
}

TEST(Workspace, UnknownOpsAreNotGuessed) {
  const Value x = tensor({4, 4});
  EXPECT_EQ(bytes("mylib::fused", {x}, {x}), std::nullopt);
  EXPECT_EQ(bytes("mylib::add", {x}, {x}), std::nullopt);
  EXPECT_EQ(bytes("aten::_linalg_svd", {x}, {x}), std::nullopt);
  EXPECT_EQ(bytes("aten::no_such_op.out", {x}, {x}), std::nullopt);
}

TEST(Workspace, OpaqueOpsAreUnknownAndViewsTakeNone) {
  const Value x = tensor({4, 4});
  Sample s = sample("aten::relu", {x}, {x});
  s.op.opaque = true;
  EXPECT_EQ(bytes(s), std::nullopt);
  s = sample("mylib::as_window", {x}, {x});
  s.op.view = true;
  EXPECT_EQ(bytes(s), 0);
}

TEST(Workspace, ArgumentsThatDoNotFitAreUnknown) {
  const Value x = tensor({4});
  EXPECT_EQ(bytes("aten::mm", {}, {}), std::nullopt);
  EXPECT_EQ(bytes("aten::mm", {x, x}, {x}), std::nullopt);
  EXPECT_EQ(bytes("aten::copy_", {}, {}), std::nullopt);
  EXPECT_EQ(bytes("aten::convolution", {x, x}, {x}), std::nullopt);
  EXPECT_EQ(
      bytes("aten::convolution", {tensor({2, 3, 8, 8}), tensor({4, 5, 3, 3})},
            {tensor({2, 4, 6, 6})}),
      std::nullopt);
  EXPECT_EQ(bytes("aten::add.Tensor", {tensor({4}, Dtype::QUInt8), x}, {x}),
            std::nullopt);
  EXPECT_EQ(bytes("aten::sum", {strided({4, 4}, {4})}, {x}), std::nullopt);
}

TEST(Workspace, EmptyTensorsTakeNone) {
  const Value none = tensor({0, 4});
  EXPECT_EQ(bytes("aten::_softmax", {none}, {none}), 0);
  EXPECT_EQ(
      bytes("aten::bmm", {half({0, 8, 8}), half({0, 8, 8})}, {half({0, 8, 8})}),
      0);
}

TEST(Workspace, ThreadsMustBePositive) {
  const Value x = tensor({4});
  EXPECT_THROW(bytes("aten::relu", {x}, {x}, 0), InternalError);
}

TEST(Workspace, ElementwiseOpsOfOneDtypeTakeNone) {
  const Value x = tensor({3, 70, 128});
  EXPECT_EQ(bytes("aten::add.Tensor", {x, x}, {x}), 0);
  EXPECT_EQ(bytes("aten::add_.Tensor", {x, x}, {x}), 0);
  EXPECT_EQ(bytes("aten::gelu_backward", {x, x}, {x}), 0);
  EXPECT_EQ(bytes("aten::_foreach_addcdiv_.ScalarList", {x, x, x}, {}), 0);
  EXPECT_EQ(bytes("aten::_foreach_mul_.Tensor", {x, x}, {}), 0);
  EXPECT_EQ(bytes("aten::mul.Tensor", {x, tensor({}, Dtype::Float64)}, {x}), 4)
      << "a 0-dim operand is cast as well";
}

TEST(Workspace, ANumberForManyTensorsTakesTwoBlocks) {
  const Value x = tensor({3, 70, 128});
  EXPECT_EQ(bytes("aten::_foreach_mul_.Scalar", {x}, {}), 513);
  EXPECT_EQ(bytes("aten::_foreach_div_.ScalarList", {x}, {}), 513);
}

TEST(Workspace, OperandsAreCastToTheCommonDtype) {
  const Value wide = tensor({3, 70, 128}), narrow = half({3, 70, 128});
  EXPECT_EQ(bytes("aten::add.Tensor", {narrow, wide}, {wide}), 107520);
  EXPECT_EQ(
      bytes("aten::add.Tensor", {tensor({4, 4, 64, 64}), half({4, 1, 64, 64})},
            {tensor({4, 4, 64, 64})}),
      65536)
      << "before it is broadcast";
  const Value mask = tensor({4, 50, 96}, Dtype::Bool);
  EXPECT_EQ(bytes("aten::mul.Tensor", {tensor({4, 50, 1}), mask},
                  {tensor({4, 50, 96})}),
            76800);
  EXPECT_EQ(
      bytes("aten::gt.Tensor",
            {tensor({4, 50, 96}), tensor({4, 50, 96}, Dtype::Float64)}, {mask}),
      153600);
  EXPECT_EQ(
      bytes("aten::where.self", {mask, half({4, 50, 96}), tensor({4, 50, 96})},
            {tensor({4, 50, 96})}),
      76800)
      << "a condition is not cast";
}

TEST(Workspace, ForeachCastsOneTensorAtATime) {
  const Value wide = tensor({200, 200}), narrow = half({200, 200});
  EXPECT_EQ(bytes("aten::_foreach_add_.List",
                  {wide, wide, narrow, half({10, 10})}, {}),
            160000);
  EXPECT_EQ(bytes("aten::_foreach_copy_", {narrow, wide}, {}), 0);
}

TEST(Workspace, NormOfHalfPrecisionAsFloat) {
  EXPECT_EQ(bytes("aten::linalg_vector_norm", {half({200, 200})}, {tensor({})}),
            160000);
  EXPECT_EQ(bytes("aten::linalg_vector_norm", {half({200, 200})}, {half({})}),
            0);
}

TEST(Workspace, ReductionsInHalfPrecision) {
  EXPECT_EQ(
      bytes("aten::mean.dim", {half({4, 128, 6, 6})}, {half({4, 128, 1, 1})}),
      75776);
  EXPECT_EQ(bytes("aten::mean.dim", {tensor({4, 128, 6, 6})},
                  {tensor({4, 128, 1, 1})}),
            0);
  EXPECT_EQ(bytes("aten::sum.dim_IntList",
                  {strided({6, 20, 500}, {10000, 1, 20}, Dtype::BFloat16)},
                  {half({1, 1, 500})}),
            242000)
      << "two dimensions apart";
  EXPECT_EQ(
      bytes("aten::sum.dim_IntList", {half({6, 20, 500})}, {half({1, 1, 500})}),
      0)
      << "walked as one";
}

TEST(Workspace, SumsOfBoolsAreInt64) {
  EXPECT_EQ(bytes("aten::sum.dim_IntList", {tensor({4, 50, 96}, Dtype::Bool)},
                  {tensor({4, 50, 1}, Dtype::Int64)}),
            153600);
  EXPECT_EQ(bytes("aten::cumsum", {tensor({4, 50, 96}, Dtype::Bool)},
                  {tensor({4, 50, 96}, Dtype::Int64)}),
            153600);
}

TEST(Workspace, WhatIsNotContiguousIsCopied) {
  const Value x = tensor({4, 50, 96});
  const Value turned = strided({4, 50, 96}, {4800, 1, 50});
  const Value rows = tensor({4, 50, 1}), columns = tensor({96});
  EXPECT_EQ(bytes("aten::_log_softmax", {x}, {x}), 0);
  EXPECT_EQ(bytes("aten::_log_softmax", {turned}, {x}), 76800);
  EXPECT_EQ(bytes("aten::native_layer_norm", {turned, columns, columns},
                  {x, rows, rows}),
            76800);
  EXPECT_EQ(
      bytes("aten::native_layer_norm_backward",
            {x, turned, rows, rows, columns, columns}, {x, columns, columns}),
      78336);
  EXPECT_EQ(
      bytes("aten::embedding_dense_backward",
            {strided({6, 20, 48}, {48, 288, 1}), tensor({6, 20}, Dtype::Int64)},
            {tensor({500, 48})}),
      23040);
  EXPECT_EQ(bytes("aten::max", {turned}, {tensor({})}), 76800);
  EXPECT_EQ(bytes("aten::max.dim", {turned}, {rows, rows}), 0)
      << "another overload";
}

TEST(Workspace, ProductsOfMatrices) {
  EXPECT_EQ(bytes("aten::mm", {tensor({210, 128}), tensor({128, 512})},
                  {tensor({210, 512})}),
            0);
  EXPECT_EQ(bytes("aten::mm",
                  {strided({50, 48}, {96, 2}), strided({48, 50}, {2, 96})},
                  {tensor({50, 50})}),
            19200)
      << "BLAS cannot skip elements";
  EXPECT_EQ(bytes("aten::bmm",
                  {strided({4, 50, 48}, {4800, 96, 2}),
                   strided({4, 48, 50}, {4800, 2, 96})},
                  {tensor({4, 50, 50})}),
            19200)
      << "one matrix at a time";
  expect_covers(430208, bytes("aten::addmm",
                              {half({512}), half({210, 128}), half({128, 512})},
                              {half({210, 512})}));
  const Sample batch =
      sample("aten::bmm", {half({12, 70, 32}), half({12, 32, 70})},
             {half({12, 70, 70})});
  expect_covers(39552, bytes(batch, 2));
  EXPECT_LT(bytes(batch, 1), bytes(batch, 2)) << "one sum for each thread";
}

TEST(Workspace, Losses) {
  const Value x = tensor({2, 3, 48, 64});
  EXPECT_EQ(bytes("aten::mse_loss", {x, x}, {tensor({})}), 73728)
      << "measured 73740: scalars are left out";
  EXPECT_EQ(bytes("aten::mse_loss", {x, x}, {x}), 0) << "not reduced";
  const Value y = half({8, 33, 512});
  EXPECT_EQ(bytes("aten::binary_cross_entropy_with_logits", {y, y}, {half({})}),
            1081344)
      << "measured 1081356";
}

TEST(Workspace, BatchNormBackwardTakesACopyOfItsInput) {
  const Value c = tensor({128});
  for (const Value& x : {tensor({4, 128, 6, 6}), nhwc({4, 128, 6, 6})}) {
    EXPECT_EQ(bytes("aten::native_batch_norm_backward", {x, x, c, c, c, c, c},
                    {x, c, c}),
              73728);
  }
}

TEST(Workspace, SmallUpsamplingIsDoneInNhwc) {
  const Value in = tensor({2, 32, 24, 32}), out = tensor({2, 32, 48, 64});
  EXPECT_EQ(bytes("aten::upsample_nearest2d", {in}, {out}), 983040);
  EXPECT_EQ(bytes("aten::upsample_nearest2d", {nhwc({2, 32, 24, 32})},
                  {nhwc({2, 32, 48, 64})}),
            0);
  EXPECT_EQ(bytes("aten::upsample_bilinear2d", {tensor({2, 32, 100, 100})},
                  {tensor({2, 32, 200, 200})}),
            9600)
      << "above 128 rows and columns: weights only";
}

Sample attention(const Value& q, const Value& k,
                 const std::string& suffix = "") {
  const Value rows = tensor({q.sizes[0], q.sizes[1], q.sizes[2]});
  const std::string name =
      "aten::_scaled_dot_product_flash_attention_for_cpu" + suffix;
  if (suffix.empty()) return sample(name, {q, k, k}, {q, rows});
  return sample(name, {q, q, k, k, q, rows}, {q, k, k});
}

TEST(Workspace, AttentionTilesGrowWithTheQueries) {
  struct Row {
    std::int64_t queries, keys, head, measured;
  };
  // (scores + two rows + result) x 4 bytes x 2 threads
  for (const Row& r : {Row{70, 70, 32, 26624}, Row{191, 191, 64, 65792},
                       Row{192, 192, 64, 132096}, Row{768, 768, 64, 1183744},
                       Row{100, 1000, 64, 147968}}) {
    const Value q = tensor({2, 4, r.queries, r.head});
    const Value k = tensor({2, 4, r.keys, r.head});
    EXPECT_EQ(bytes(attention(q, k)), r.measured) << r.queries;
    EXPECT_EQ(bytes(attention(q, k), 1), r.measured / 2) << r.queries;
  }
}

TEST(Workspace, AttentionBackward) {
  const Value q = tensor({2, 4, 70, 32}), h = half({2, 4, 70, 32});
  EXPECT_EQ(bytes(attention(q, q, "_backward"), 1), 18048);
  EXPECT_EQ(bytes(attention(q, q, "_backward"), 2), 36096);
  expect_covers(36100, bytes(attention(h, h, "_backward"), 1));
}

Sample lstm(std::int64_t steps, std::int64_t batch, std::int64_t features,
            std::int64_t hidden) {
  const Value w = tensor({4 * hidden, hidden}), b = tensor({4 * hidden});
  const Value state = tensor({batch, hidden});
  return sample("aten::mkldnn_rnn_layer",
                {tensor({steps, batch, features}),
                 tensor({4 * hidden, features}), w, b, b, state, state},
                {tensor({steps, batch, hidden}), state, state,
                 tensor({0}, Dtype::UInt8) /* as a fake tensor has it */});
}

TEST(Workspace, LstmLayer) {
  EXPECT_EQ(bytes(lstm(20, 6, 48, 64)), 266808);
  EXPECT_EQ(bytes(lstm(40, 6, 64, 64)), 415288);
  EXPECT_EQ(bytes(lstm(20, 6, 64, 100)), 469368);
  EXPECT_EQ(bytes(lstm(10, 64, 300, 650)), 16937816);
  EXPECT_EQ(bytes(lstm(50, 32, 512, 512)), 21815864);
}

TEST(LstmReserve, IsWhatTheLayerReturnsForBackward) {
  const auto reserve = [](std::int64_t steps, std::int64_t batch,
                          std::int64_t features, std::int64_t hidden) {
    const Sample s = lstm(steps, batch, features, hidden);
    return reserved_bytes(s.trace, s.op);
  };
  EXPECT_EQ(reserve(64, 8, 512, 512), Bytes(16166912));
  EXPECT_EQ(reserve(64, 8, 1024, 512), Bytes(22556672));
  EXPECT_EQ(reserve(64, 8, 512, 256), Bytes(11415552));
  EXPECT_EQ(reserve(33, 5, 100, 40), Bytes(720896));
  EXPECT_EQ(reserve(20, 6, 48, 64), Bytes(491520));
  EXPECT_EQ(reserve(50, 32, 512, 512), Bytes(50638848));
  EXPECT_EQ(reserve(1, 8, 128, 256), Bytes(225280));
  EXPECT_EQ(reserve(33, 17, 80, 72), Bytes(2617344));
}

TEST(LstmReserve, IsUnknownElsewhere) {
  Sample s = lstm(20, 6, 48, 64);
  s.trace.values[s.op.inputs[0].index()].dtype = Dtype::BFloat16;
  EXPECT_EQ(reserved_bytes(s.trace, s.op), std::nullopt);
  s = lstm(20, 6, 48, 64);
  s.op.outputs.pop_back();
  EXPECT_EQ(reserved_bytes(s.trace, s.op), std::nullopt) << "without gradients";
  s = lstm(20, 6, 48, 64);
  s.op.inputs.resize(1);
  EXPECT_EQ(reserved_bytes(s.trace, s.op), std::nullopt) << "not its schema";
  s = lstm(20, 6, 48, 64);
  for (const char* name : {"aten::mkldnn_rnn_layer_backward", "aten::gru.input",
                           "mylib::mkldnn_rnn_layer"}) {
    s.op.name = name;
    EXPECT_EQ(reserved_bytes(s.trace, s.op), std::nullopt) << name;
  }
}

Value image(std::int64_t n, std::int64_t c, std::int64_t side) {
  return tensor({n, c, side, side});
}

TEST(Workspace, ConvolutionReordersIntoBlocks) {
  const auto conv = [](const Value& x, const Value& w, const Value& y) {
    return bytes("aten::convolution", {x, w}, {y});
  };
  EXPECT_EQ(conv(image(4, 32, 24), tensor({32, 32, 3, 3}), image(4, 32, 24)),
            331776);
  EXPECT_EQ(conv(image(4, 32, 24), tensor({64, 32, 3, 3}), image(4, 64, 12)),
            368640);
  EXPECT_EQ(conv(image(4, 3, 96), tensor({32, 3, 7, 7}), image(4, 32, 48)),
            1179648)
      << "the first layer";
  EXPECT_EQ(conv(image(4, 128, 6), tensor({128, 128, 3, 3}), image(4, 128, 6)),
            663552);
  EXPECT_EQ(
      conv(nhwc({4, 32, 24, 24}), nhwc({64, 32, 3, 3}), nhwc({4, 64, 12, 12})),
      86064)
      << "only the weight";
  EXPECT_EQ(conv(tensor({1, 16, 33, 37}), tensor({24, 16, 3, 3}),
                 tensor({1, 24, 33, 37})),
            703296)
      << "one small image: columns";
  EXPECT_EQ(conv(tensor({3, 96, 14, 18}), tensor({96, 1, 3, 3}),
                 tensor({3, 96, 14, 18})),
            293760)
      << "by channel";
  expect_covers(
      340096, conv(image(4, 32, 24), tensor({64, 32, 1, 1}), image(4, 64, 12)));
  expect_covers(393216, conv(tensor({2, 64, 12, 16}), tensor({64, 32, 2, 2}),
                             tensor({2, 32, 24, 32})));
}

TEST(Workspace, ConvolutionBackward) {
  const auto backward = [](const Value& grad, const Value& x, const Value& w,
                           bool input = true) {
    return bytes("aten::convolution_backward", {grad, x, w},
                 input ? std::vector{x, w} : std::vector{w});
  };
  EXPECT_EQ(
      backward(image(4, 128, 6), image(4, 128, 6), tensor({128, 128, 3, 3})),
      589824);
  EXPECT_EQ(
      backward(image(4, 64, 12), image(4, 64, 12), tensor({64, 64, 3, 3})),
      294912);
  expect_covers(3050880,
                backward(tensor({8, 64, 29, 29}), tensor({8, 32, 33, 33}),
                         tensor({64, 32, 5, 5})));
  expect_covers(2193408, backward(image(4, 16, 16), image(4, 64, 33),
                                  tensor({16, 64, 3, 3})));
  expect_covers(1206912, backward(image(4, 32, 48), image(4, 3, 96),
                                  tensor({32, 3, 7, 7}), false));
  expect_covers(20078848, backward(image(4, 768, 14), image(4, 3, 224),
                                   tensor({768, 3, 16, 16}), false));
  // By channel, large kernel: up to one buffer for each thread.
  const auto by_channel =
      bytes("aten::convolution_backward",
            {image(1, 256, 17), image(1, 256, 33), tensor({256, 1, 5, 5})},
            {tensor({256, 1, 5, 5}), tensor({256})});
  ASSERT_TRUE(by_channel.has_value());
  EXPECT_NEAR(static_cast<double>(*by_channel), 262856, 2628);
  EXPECT_EQ(backward(image(2, 32, 8), image(2, 32, 8), tensor({32, 8, 3, 3})),
            32768)
      << "groups of 8 channels";
}

// One convolution with a bias on one thread, as bytes were measured: forward,
// then the gradients of input, weight and bias, of the input alone and of the
// weight alone.
struct Measured {
  const char* what;
  Sizes in, weight, out;
  std::int64_t forward, all, of_input, of_weight;
  bool transposed = false;
};

void expect_convolution(const Measured& m, std::int64_t channels) {
  SCOPED_TRACE(m.what);
  const Value x = tensor(m.in), w = tensor(m.weight), y = tensor(m.out);
  const Value b = tensor({channels});
  const auto told = [&](std::string name, const std::vector<Value>& inputs,
                        const std::vector<Value>& outputs) {
    Sample s = sample(std::move(name), inputs, outputs);
    s.op.transposed = m.transposed;
    return bytes(s, 1);
  };
  // Scratch below 4 KiB is left out.
  const auto near = [](std::int64_t measured, std::optional<std::int64_t> got) {
    ASSERT_TRUE(got.has_value());
    EXPECT_GE(*got, measured - 512);
    EXPECT_LE(*got, measured + 512);
  };
  near(m.forward, told("aten::convolution", {x, w, b}, {y}));
  near(m.all, told("aten::convolution_backward", {y, x, w}, {x, w, b}));
  near(m.of_input, told("aten::convolution_backward", {y, x, w}, {x}));
  near(m.of_weight, told("aten::convolution_backward", {y, x, w}, {w}));
}

TEST(Workspace, ConvolutionsOfVolumes) {
  const std::vector<Measured> plain = {
      {"3x3x3",
       {2, 16, 8, 8, 8},
       {32, 16, 3, 3, 3},
       {2, 32, 8, 8, 8},
       131072,
       196608,
       186368,
       196608},
      {"one image, by torch itself",
       {1, 16, 8, 8, 8},
       {32, 16, 3, 3, 3},
       {1, 32, 8, 8, 8},
       884736,
       884736,
       884736,
       884736},
      {"three channels",
       {2, 3, 8, 8, 8},
       {16, 3, 3, 3, 3},
       {2, 16, 8, 8, 8},
       65536,
       141184,
       146432,
       65536},
      {"strided",
       {2, 16, 16, 16, 16},
       {32, 16, 3, 3, 3},
       {2, 32, 8, 8, 8},
       579584,
       993152,
       1048576,
       655360},
      {"strided, eight channels",
       {2, 8, 16, 16, 16},
       {16, 8, 3, 3, 3},
       {2, 16, 8, 8, 8},
       65536,
       510400,
       524288,
       110848},
      {"by channel",
       {2, 32, 8, 8, 8},
       {32, 1, 3, 3, 3},
       {2, 32, 8, 8, 8},
       262144,
       127488,
       131072,
       20992},
      {"groups of eight",
       {2, 32, 8, 8, 8},
       {32, 8, 3, 3, 3},
       {2, 32, 8, 8, 8},
       158720,
       166144,
       158720,
       166144},
      {"patches",
       {2, 3, 8, 64, 64},
       {64, 3, 2, 16, 16},
       {2, 64, 4, 4, 4},
       393216,
       1789696,
       2183168,
       1671424},
      {"uneven channels",
       {2, 20, 8, 8, 8},
       {24, 20, 3, 3, 3},
       {2, 24, 8, 8, 8},
       274688,
       321152,
       290816,
       320896},
      {"as deep as its padding",
       {2, 128, 2, 2, 2},
       {128, 128, 3, 3, 3},
       {2, 128, 2, 2, 2},
       1777664,
       7133440,
       1777664,
       7133440},
  };
  for (const Measured& m : plain) expect_convolution(m, m.out[1]);
}

TEST(Workspace, TransposedConvolutions) {
  const std::vector<Measured> transposed = {
      {"2x2, stride 2",
       {2, 16, 16, 16},
       {16, 16, 2, 2},
       {2, 16, 32, 32},
       262144,
       163840,
       135168,
       163840,
       true},
      {"2x2, stride 2, to one channel",
       {2, 16, 16, 16},
       {16, 1, 2, 2},
       {2, 1, 32, 32},
       73880,
       32768,
       32768,
       32768,
       true},
      {"3x3x3, stride 2, to two channels",
       {2, 16, 8, 8, 8},
       {16, 2, 3, 3, 3},
       {2, 2, 16, 16, 16},
       162968,
       65536,
       65536,
       65536,
       true},
      {"3x3, stride 1",
       {2, 32, 16, 16},
       {32, 16, 3, 3},
       {2, 16, 16, 16},
       116864,
       98240,
       65536,
       98304,
       true},
      {"one dimension, stride 4",
       {2, 64, 100},
       {64, 32, 8},
       {2, 32, 400},
       204800,
       153600,
       167936,
       153600,
       true},
  };
  for (const Measured& m : transposed) expect_convolution(m, m.out[1]);
}

TEST(Workspace, ConvolutionsOfOneDimensionAndOddGroups) {
  const std::vector<Measured> plain = {
      {"strided",
       {2, 16, 64},
       {16, 16, 3},
       {2, 16, 32},
       11264,
       40920,
       44056,
       12288},
      {"a kernel of 16",
       {4, 256, 64},
       {512, 256, 16},
       {4, 512, 7},
       8650752,
       33669376,
       8499224,
       33669376},
      {"groups of five",
       {4, 20, 16, 16},
       {20, 5, 3, 3},
       {4, 20, 16, 16},
       81920,
       78240,
       81920,
       60736},
  };
  for (const Measured& m : plain) expect_convolution(m, m.out[1]);
}

// Strides tell what shapes leave open: (8, 64, 1, 1) is both.
TEST(Workspace, ConvolutionsOfOnePixelFollowStrides) {
  const Value w = tensor({64, 1, 7, 7});
  const Value pixels = strided({8, 64, 1, 1}, {64, 1, 64, 64});
  const auto last =
      bytes("aten::convolution_backward", {pixels, pixels, w}, {pixels, w}, 1);
  const Value first = tensor({8, 64, 1, 1});
  const auto plain =
      bytes("aten::convolution_backward", {first, first, w}, {first, w}, 1);
  ASSERT_TRUE(last.has_value() && plain.has_value());
  EXPECT_GT(*last, 3'000'000);
  EXPECT_LT(*plain, 60'000);
}

TEST(Workspace, CellsOfTheSimulatedDevice) {
  const Value gates = tensor({64, 1950}), bias = tensor({1950});
  const Value state = tensor({64, 650});
  EXPECT_EQ(
      bytes("aten::_thnn_fused_gru_cell", {gates, gates, state, bias, bias},
            {state, tensor({64, 3250})}),
      1497600);
}

}  // namespace
}  // namespace memscale
