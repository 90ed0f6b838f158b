#include "memscale/core/ops/op_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace memscale {
namespace {

TEST(OpName, IsCutInOneWay) {
  const OpName name = OpName::of("aten::add_.Tensor");
  EXPECT_EQ(name.space, "aten");
  EXPECT_EQ(name.base, "add");
  EXPECT_EQ(name.overload, "Tensor");
  EXPECT_TRUE(name.in_place);
  EXPECT_FALSE(name.has_out());

  EXPECT_FALSE(OpName::of("aten::add.Tensor").in_place);
  EXPECT_EQ(OpName::of("aten::_index_put_impl_").base, "_index_put_impl");
  EXPECT_EQ(OpName::of("aten::tanh_backward").base, "tanh_backward");
  EXPECT_TRUE(OpName::of("aten::normal.float_Tensor_out").has_out());
}

TEST(OpName, DoubleUnderscoresBelongToTheName) {
  EXPECT_EQ(OpName::of("aten::__and__.Tensor").base, "__and__");
  EXPECT_FALSE(OpName::of("aten::__and__.Tensor").in_place);
}

TEST(OpName, PartsMayBeMissing) {
  EXPECT_EQ(OpName::of("").base, "");
  EXPECT_EQ(OpName::of("_").base, "_");
  EXPECT_FALSE(OpName::of("_").in_place);
  EXPECT_EQ(OpName::of("add").space, "");
  EXPECT_EQ(OpName::of("aten::add").overload, "");
}

TEST(OpTable, IsSortedAndNamesEachOpOnce) {
  const auto rows = op_rows();
  EXPECT_GT(rows.size(), 400u);
  EXPECT_EQ(std::ranges::adjacent_find(rows, std::ranges::greater_equal{},
                                       &OpRow::name),
            rows.end());
  for (const OpRow& row : rows) {
    const std::string name = "aten::" + std::string(row.name);
    EXPECT_EQ(&find_op_row(name), &row) << "not a base name: " << name;
    EXPECT_NE(describe(row), name.substr(6) + ": nothing");
  }
}

TEST(OpTable, AllVariantsOfAnOpShareARow) {
  const OpRow& row = find_op_row("aten::index_put");
  EXPECT_EQ(&find_op_row("aten::index_put_"), &row);
  EXPECT_EQ(&find_op_row("aten::index_put.out"), &row);
  EXPECT_NE(&find_op_row("aten::tanh_backward"), &find_op_row("aten::tanh"));
}

TEST(OpTable, SaysAllThatIsKnown) {
  EXPECT_EQ(describe(find_op_row("aten::tanh")),
            "tanh: 2600 ps an element on a CPU, kept there, no workspace");
  EXPECT_EQ(describe(find_op_row("aten::addmm")),
            "addmm: matmul by argument 1, BLAS, flops, workspace");
  EXPECT_EQ(describe(find_op_row("aten::index_put")),
            "index_put: unordered, fills new zeros, workspace");
  EXPECT_EQ(describe(find_op_row("aten::native_dropout")),
            "native_dropout: 7000 ps an element on a CPU, random, "
            "no workspace");
}

TEST(OpTable, KeepsSlowResultsButNotRandomOnes) {
  for (const auto* name :
       {"aten::tanh", "aten::tanh_", "aten::atan",
        "aten::max_pool2d_with_indices", "aten::avg_pool2d"}) {
    EXPECT_TRUE(find_op_row(name).is_slow_on_cpu()) << name;
  }
  for (const auto* name :
       {"aten::bernoulli_.float", "aten::native_dropout", "aten::erf",
        "aten::atanh", "aten::native_batch_norm", "aten::add.Tensor"}) {
    EXPECT_FALSE(find_op_row(name).is_slow_on_cpu()) << name;
  }
}

TEST(OpTable, FamiliesHaveARowForOpsWithoutOne) {
  EXPECT_EQ(find_op_row("aten::linalg_qr").work, Work::Much);
  EXPECT_NE(find_op_row("aten::_foreach_mul_.Scalar").workspace, nullptr);
  EXPECT_NE(find_op_row("aten::_fused_adam_").workspace, nullptr);
  EXPECT_EQ(find_op_row("aten::unheard_of").workspace, nullptr);
}

TEST(OpTable, KnowsNothingOfOtherNamespaces) {
  EXPECT_EQ(find_op_row("mylib::tanh").never, "not one of torch's own ops");
  EXPECT_EQ(find_op_row("mylib::tanh").cpu_picoseconds, 0);
  EXPECT_TRUE(find_op_row("torchvision::nms").never.empty());
}

}  // namespace
}  // namespace memscale
