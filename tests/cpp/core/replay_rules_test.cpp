#include "memscale/core/replay_rules.h"

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

TEST(KeepSet, FindsItsOutputs) {
  const KeepSet keep_set{{"aten::mm", "aten::relu"}, {{0, 0}, {1, 1}}};
  keep_set.check();
  EXPECT_TRUE(keep_set.keeps(0, 0));
  EXPECT_FALSE(keep_set.keeps(1, 0));
  EXPECT_TRUE(keep_set.keeps(1, 1));
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
}

}  // namespace memscale
