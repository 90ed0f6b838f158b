#include "memscale/core/tape/tape_rules.h"

#include <gtest/gtest.h>

#include "memscale/base/error.h"

namespace memscale {
namespace {

TEST(ReplayRules, KnowOpsByNameWithoutOverload) {
  EXPECT_EQ(find_replay_rules("aten::addmm").work, Work::Matmul);
  EXPECT_EQ(find_replay_rules("aten::addmm.out").factor, 1u);
  EXPECT_EQ(find_replay_rules("aten::convolution").work, Work::Convolution);
  EXPECT_EQ(find_replay_rules("aten::linalg_qr").work, Work::Much);
  EXPECT_EQ(find_replay_rules("aten::add.Tensor").work, Work::Little);
  EXPECT_EQ(find_replay_rules("aten::mm_like").work, Work::Little);
}

TEST(ReplayRules, WeighProductsByWorkPerByte) {
  EXPECT_TRUE(is_worth_keeping(768, 4));
  EXPECT_TRUE(is_worth_keeping(128, 4));
  EXPECT_FALSE(is_worth_keeping(64, 4));  // scores of attention, in float
  EXPECT_TRUE(is_worth_keeping(64, 2));
  EXPECT_FALSE(is_worth_keeping(9, 4));  // a depthwise filter
}

TEST(ReplayRules, SeeWhatIsWrittenWhole) {
  EXPECT_TRUE(find_replay_rules("aten::bernoulli_.float").overwrites);
  EXPECT_TRUE(find_replay_rules("aten::mul.out").overwrites);
  EXPECT_TRUE(find_replay_rules("aten::max.dim_max").overwrites == false);
  EXPECT_FALSE(find_replay_rules("aten::mul_.Tensor").overwrites);
}

TEST(ReplayRules, ReplayNothingThatIsNotTorchsOwn) {
  EXPECT_FALSE(find_replay_rules("mylib::scale").never.empty());
  EXPECT_TRUE(find_replay_rules("torchvision::nms").never.empty());
  EXPECT_FALSE(find_replay_rules("aten::resize_").never.empty());
  EXPECT_TRUE(find_replay_rules("aten::relu").never.empty());
}

TEST(ReplayRules, NeverReplayWhatDrawsFromAHiddenState) {
  for (const auto* name : {"aten::_cudnn_rnn", "aten::miopen_rnn",
                           "aten::_cudnn_init_dropout_state"}) {
    EXPECT_EQ(find_replay_rules(name).never,
              "draws dropout from a hidden state")
        << name;
  }
  EXPECT_TRUE(find_replay_rules("aten::lstm").never.empty());
}

const char* why_not(std::string_view name, const ReplayTarget& target,
                    bool transposed = false) {
  return why_not_on(target, find_replay_rules(name), transposed);
}

TEST(ReplayRules, KeepWhatHasNoOrderOnCuda) {
  for (const auto* name :
       {"aten::index_add_", "aten::cumsum", "aten::cumsum_", "aten::cumprod",
        "aten::logcumsumexp", "aten::kthvalue", "aten::median.dim",
        "aten::nanmedian.dim", "aten::max_unpool2d", "aten::max_unpool3d",
        "aten::scatter_reduce.two", "aten::slow_conv_transpose2d",
        "aten::slow_conv_transpose3d", "aten::cudnn_convolution_transpose"}) {
    EXPECT_STREQ(why_not(name, {.on_cuda = true}), kUnordered) << name;
    EXPECT_EQ(why_not(name, {}), nullptr) << name;
  }
  EXPECT_EQ(why_not("aten::gather", {.on_cuda = true}), nullptr);
}

TEST(ReplayRules, KeepRepeatedWritesToOnePlaceEverywhere) {
  for (const auto* name : {"aten::index_put_", "aten::_unsafe_index_put",
                           "aten::put_", "aten::index_copy"}) {
    EXPECT_STREQ(why_not(name, {}), kUnordered) << name;
  }
}

TEST(ReplayRules, KeepTransposedConvolutionsOnCuda) {
  EXPECT_STREQ(why_not("aten::convolution", {.on_cuda = true}, true),
               kUnordered);
  EXPECT_EQ(why_not("aten::convolution", {.on_cuda = true}, false), nullptr);
  EXPECT_EQ(why_not("aten::convolution", {}, true), nullptr);
}

TEST(ReplayRules, KeepConvolutionsWhereCudnnBenchmarks) {
  const ReplayTarget target{.on_cuda = true, .benchmarks = true};
  for (const auto* name : {"aten::convolution", "aten::cudnn_convolution",
                           "aten::cudnn_convolution_relu"}) {
    EXPECT_STREQ(why_not(name, target), kBenchmarked) << name;
    EXPECT_EQ(why_not(name, {.benchmarks = true}), nullptr) << name;
  }
  EXPECT_EQ(why_not("aten::mm", target), nullptr);
}

TEST(KeepSet, FindsItsOutputs) {
  const KeepSet keep_set{{"aten::mm", "aten::relu"}, {{0, 0}, {1, 1}}};
  keep_set.check();
  EXPECT_TRUE(keep_set.keeps(0, 0));
  EXPECT_FALSE(keep_set.keeps(1, 0));
  EXPECT_TRUE(keep_set.keeps(1, 1));
}

TEST(KeepSet, FindsOpsBehindViewsOnly) {
  const KeepSet set{{"aten::view", "aten::mm", "aten::t", "aten::relu_"}, {}};
  EXPECT_EQ(set.find("aten::mm", 0), 1u);
  EXPECT_EQ(set.find("aten::relu", 2), 3u);
  EXPECT_EQ(set.find("aten::t", 0), set.ops.size());     // behind mm
  EXPECT_EQ(set.find("aten::relu", 0), set.ops.size());  // behind mm
  EXPECT_EQ(set.find("aten::mm", 2), set.ops.size());
  EXPECT_EQ(set.find("aten::mm", 4), set.ops.size());
}

TEST(KeepSet, RefusesIndicesOutOfRangeOrOrder) {
  EXPECT_THROW((KeepSet{{"aten::mm"}, {{1, 0}}}.check()), PlanError);
  EXPECT_THROW((KeepSet{{"aten::mm"}, {{0, 1}, {0, 0}}}.check()), PlanError);
  EXPECT_THROW((KeepSet{{"aten::mm"}, {{0, 0}, {0, 0}}}.check()), PlanError);
}

}  // namespace
TEST(IsSameOp, InPlaceOrNot) {
  EXPECT_TRUE(is_same_op("aten::add.Tensor", "aten::add.Tensor"));
  EXPECT_TRUE(is_same_op("aten::add_.Tensor", "aten::add.Tensor"));
  EXPECT_TRUE(is_same_op("aten::relu", "aten::relu_"));
  EXPECT_FALSE(is_same_op("aten::add_.Scalar", "aten::add.Tensor"));
  EXPECT_FALSE(is_same_op("aten::add.Tensor", "aten::sub.Tensor"));
  EXPECT_FALSE(is_same_op("aten::add", "aten::addmm"));
  EXPECT_FALSE(is_same_op("", "_"));
  EXPECT_FALSE(is_same_op("aten::view", "aten::_reshape_alias"));
}

}  // namespace memscale
