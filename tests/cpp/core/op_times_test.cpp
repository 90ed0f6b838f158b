#include "memscale/core/time/op_times.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace memscale {
namespace {

// Layers a and b, each aten::mul then aten::exp; backward has one op.
Trace two_layers() {
  Trace trace;
  trace.layers = {{""}, {"a"}, {"b"}};
  const auto add = [&](std::string name, std::size_t layer, Phase phase) {
    Op& op = trace.ops.emplace_back();
    op.name = std::move(name);
    op.layer = LayerId(layer);
    op.phase = phase;
    op.moved = Bytes(12'000'000);
  };
  for (const std::size_t layer : {1, 2}) {
    add("aten::mul", layer, Phase::Forward);
    add("aten::exp", layer, Phase::Forward);
  }
  trace.ops[3].moved = Bytes(24'000'000);  // b's exp does more than a's
  add("aten::tanh_backward", 1, Phase::Backward);
  return trace;
}

const std::vector<std::string> kLayers = {"", "a", "b"};
const CostModel kCost = CostModel::of_cpu();

std::vector<std::int64_t> times_of(const Trace& trace) {
  std::vector<std::int64_t> times;
  for (const Op& op : trace.ops) times.push_back(op.nanoseconds);
  return times;
}

TEST(OpTimes, NothingMeasuredChangesNothing) {
  EXPECT_EQ(OpTimes().applied_to(two_layers(), kCost, kLayers), two_layers());
}

TEST(OpTimes, TheShortestOfEqualWorkAndTheRestScaled) {
  OpTimes times;
  times.add_call(std::vector<TimedOp>{{1, "aten::mul", 500'000},
                                      {1, "aten::exp", 900'000},
                                      {2, "aten::mul", 700'000},
                                      {2, "aten::exp", 3'000'000}});
  times.add_call(std::vector<TimedOp>{{1, "aten::mul", 600'000},
                                      {1, "aten::exp", 800'000},
                                      {2, "aten::mul", 400'000},
                                      {2, "aten::exp", 2'000'000}});
  const Trace trace = two_layers();
  const Trace timed = times.applied_to(trace, kCost, kLayers);
  // Modelled 1,001,500 three times and 2,001,500: 5,006,000; measured 3.7 ms.
  EXPECT_EQ(times_of(timed),
            (std::vector<std::int64_t>{400'000, 800'000, 400'000, 2'000'000,
                                       740'222}));
  EXPECT_EQ(kCost.nanoseconds(timed),
            400'000 + 800'000 + 400'000 + 2'000'000 + 740'222);
}

TEST(OpTimes, LayersThatRanOtherOpsAreNotMeasured) {
  OpTimes times;
  times.add_call(std::vector<TimedOp>{{1, "aten::mul", 1'001'500},
                                      {2, "aten::mul", 7}});  // b's exp is not
  const Trace timed = times.applied_to(two_layers(), kCost, kLayers);
  EXPECT_EQ(timed, two_layers());  // nor is a's: nothing is known

  OpTimes varying;
  varying.add_call(
      std::vector<TimedOp>{{1, "aten::mul", 5}, {1, "aten::exp", 5}});
  varying.add_call(
      std::vector<TimedOp>{{1, "aten::exp", 5}, {1, "aten::mul", 5}});
  EXPECT_EQ(varying.applied_to(two_layers(), kCost, kLayers), two_layers());
}

}  // namespace
}  // namespace memscale
