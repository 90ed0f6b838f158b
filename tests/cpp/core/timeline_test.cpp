#include "memscale/core/trace/timeline.h"

#include <gtest/gtest.h>

#include "memscale/base/error.h"

namespace memscale {
namespace {

// Forward 0, 1; backward 2, 3; optimizer 4.
//
//   bytes    category     layer  held while
//   1000     parameters   0      0 1 2 3 4
//   600      inputs       -      0 1 2 3 4
//   100      activations  0      0 1 2 3
//   2000     transients   1        1
//   1        gradients    0            3 4
//   2 x 150  optimizer    -              4
//   4096     transients   1        1 2      on the host
// and op 2, of layer 1, has a workspace of 10.
Trace step() {
  Trace trace;
  trace.layers = {{.name = "a"}, {.name = "b"}};
  trace.ops.resize(5);
  trace.ops[2].phase = trace.ops[3].phase = Phase::Backward;
  trace.ops[4].phase = Phase::Optimizer;
  trace.ops[2].layer = LayerId(1);
  trace.ops[2].workspace = 10_B;
  trace.ops[2].workspace_known = true;
  const LayerId a(0), b(1), none;
  const Place device = Place::Device;
  trace.storages = {
      {1000_B, 1, device, Category::Parameter, a, {}, {}},
      {600_B, 1, device, Category::Input, none, {}, {}},
      {100_B, 1, device, Category::Activation, a, OpId(0), OpId(3)},
      {2000_B, 1, device, Category::Transient, b, OpId(1), OpId(1)},
      {1_B, 1, device, Category::Gradient, a, OpId(3), {}},
      {150_B, 2, device, Category::OptimizerState, none, OpId(4), {}},
      {4096_B, 1, Place::Host, Category::Transient, b, OpId(1), OpId(2)},
  };
  return trace;
}

std::vector<std::int64_t> totals(const Timeline& timeline) {
  std::vector<std::int64_t> result;
  for (const Instant& instant : timeline.instants()) {
    result.push_back(instant.bytes.count());
  }
  return result;
}

Bytes of(const BytesByCategory& by_category, Category category) {
  return by_category[static_cast<std::size_t>(category)];
}

using Totals = std::vector<std::int64_t>;

TEST(Timeline, CountsEachOp) {
  const Trace trace = step();
  const Timeline timeline(trace, Place::Device, 1_B);
  EXPECT_EQ(totals(timeline), (Totals{1700, 3700, 1710, 1701, 1901}));
  const Instant& fourth = timeline.instants()[3];
  EXPECT_EQ(fourth.op, OpId(3));
  EXPECT_EQ(of(fourth.by_category, Category::Parameter), 1000_B);
  EXPECT_EQ(of(fourth.by_category, Category::Input), 600_B);
  EXPECT_EQ(of(fourth.by_category, Category::Activation), 100_B);
  EXPECT_EQ(of(fourth.by_category, Category::Gradient), 1_B);
  EXPECT_EQ(of(fourth.by_category, Category::Transient), 0_B);
  // The workspace is a transient of one instant.
  EXPECT_EQ(of(timeline.instants()[2].by_category, Category::Transient), 10_B);
}

TEST(Timeline, RoundsEachBlock) {
  const Trace trace = step();
  const Timeline timeline(trace, Place::Device, 512_B);
  EXPECT_EQ(timeline.rounded(1_B), 512_B);
  EXPECT_EQ(timeline.rounded(512_B), 512_B);
  EXPECT_EQ(timeline.rounded(0_B), 0_B);
  EXPECT_EQ(totals(timeline), (Totals{2560, 4608, 3072, 3072, 3584}));
}

TEST(Timeline, TheHostIsCountedApart) {
  const Trace trace = step();
  const Timeline timeline(trace, Place::Host, 1_B);
  EXPECT_EQ(totals(timeline), (Totals{0, 4096, 4096, 0, 0}));
  EXPECT_EQ(timeline.resident(), 0_B);
  EXPECT_EQ(timeline.held(OpId(2)), std::vector{StorageId(6)});
  EXPECT_TRUE(timeline.by_layer(OpId(0)).empty());
}

TEST(Timeline, PeakIsTheFirstOfTheLargest) {
  Trace trace = step();
  const Timeline timeline(trace, Place::Device, 512_B);
  EXPECT_EQ(timeline.peak()->op, OpId(1));
  EXPECT_EQ(timeline.peak()->bytes, 4608_B);
  EXPECT_EQ(timeline.peak(Phase::Forward)->op, OpId(1));
  EXPECT_EQ(timeline.peak(Phase::Backward)->op, OpId(2));  // ties with op 3
  EXPECT_EQ(timeline.peak(Phase::Optimizer)->op, OpId(4));
  trace.ops[4].phase = Phase::Backward;
  EXPECT_FALSE(timeline.peak(Phase::Optimizer));
}

TEST(Timeline, ResidentIsWhatStaysBetweenSteps) {
  Trace trace = step();
  EXPECT_EQ(Timeline(trace, Place::Device, 1_B).resident(), 1900_B);
  EXPECT_EQ(Timeline(trace, Place::Device, 512_B).resident(), 3072_B);
  trace.storages[1].freed = OpId(0);  // an input that the model drops
  EXPECT_EQ(Timeline(trace, Place::Device, 1_B).resident(), 1300_B);
  trace.storages[0].category = Category::Buffer;
  EXPECT_EQ(Timeline(trace, Place::Device, 1_B).resident(), 1300_B);
  trace.storages[0].category = Category::Activation;  // a kept output
  EXPECT_EQ(Timeline(trace, Place::Device, 1_B).resident(), 300_B);
}

TEST(Timeline, ByLayerListsHoldersLargestFirst) {
  const Trace trace = step();
  const Timeline timeline(trace, Place::Device, 1_B);
  const auto shares = timeline.by_layer(OpId(1));
  ASSERT_EQ(shares.size(), 3u);
  EXPECT_EQ(shares[0].layer, LayerId(1));
  EXPECT_EQ(shares[0].bytes, 2000_B);
  EXPECT_EQ(shares[1].layer, LayerId(0));
  EXPECT_EQ(shares[1].bytes, 1100_B);
  EXPECT_EQ(of(shares[1].by_category, Category::Parameter), 1000_B);
  EXPECT_EQ(of(shares[1].by_category, Category::Activation), 100_B);
  EXPECT_FALSE(shares[2].layer.valid());
  EXPECT_EQ(shares[2].bytes, 600_B);
}

TEST(Timeline, ByLayerGivesTheWorkspaceToTheOpsLayer) {
  const Trace trace = step();
  const auto shares = Timeline(trace, Place::Device, 1_B).by_layer(OpId(2));
  ASSERT_EQ(shares.size(), 3u);
  EXPECT_EQ(shares[2].layer, LayerId(1));
  EXPECT_EQ(of(shares[2].by_category, Category::Transient), 10_B);
}

TEST(Timeline, ByLayerBreaksTiesByLayerOutsideLast) {
  Trace trace = step();
  trace.storages[3].bytes = 1600_B;
  trace.storages[0].bytes = 1500_B;
  trace.storages[1].bytes = 1600_B;
  const auto shares = Timeline(trace, Place::Device, 1_B).by_layer(OpId(1));
  ASSERT_EQ(shares.size(), 3u);
  EXPECT_EQ(shares[0].layer, LayerId(0));
  EXPECT_EQ(shares[1].layer, LayerId(1));
  EXPECT_EQ(shares[2].layer, LayerId());
}

TEST(Timeline, HeldIsSortedBySizeThenId) {
  Trace trace = step();
  trace.storages[2].bytes = 600_B;
  const Timeline timeline(trace, Place::Device, 512_B);
  EXPECT_EQ(timeline.held(OpId(1)), (std::vector{StorageId(3), StorageId(0),
                                                 StorageId(1), StorageId(2)}));
  EXPECT_EQ(timeline.held(OpId(4)), (std::vector{StorageId(0), StorageId(1),
                                                 StorageId(5), StorageId(4)}));
}

TEST(Timeline, WithoutOpsOnlyTheResidentIsKnown) {
  Trace trace = step();
  trace.ops.clear();
  trace.storages.resize(2);
  const Timeline timeline(trace, Place::Device, 512_B);
  EXPECT_TRUE(timeline.instants().empty());
  EXPECT_FALSE(timeline.peak());
  EXPECT_FALSE(timeline.peak(Phase::Forward));
  EXPECT_EQ(timeline.resident(), 2048_B);
  EXPECT_THROW(timeline.by_layer(OpId(0)), std::out_of_range);
  EXPECT_THROW(timeline.held(OpId(0)), std::out_of_range);
  const Trace empty;
  EXPECT_EQ(Timeline(empty, Place::Device, 1_B).resident(), 0_B);
}

TEST(Timeline, RefusesABrokenTraceAndGranularity) {
  Trace trace = step();
  EXPECT_THROW(Timeline(trace, Place::Device, 0_B), TraceError);
  EXPECT_THROW(Timeline(trace, Place::Device, Bytes(-512)), TraceError);
  EXPECT_THROW(Timeline(trace, Place::Device, 2_GiB), TraceError);
  trace.storages[2].freed = OpId(5);
  EXPECT_THROW(Timeline(trace, Place::Device, 1_B), TraceError);
}

}  // namespace
}  // namespace memscale
