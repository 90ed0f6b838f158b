#include "memscale/core/cuts/cuts.h"

#include <gtest/gtest.h>

#include <random>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/cuts/min_cut.h"

namespace memscale {
namespace {

using Kept = std::vector<std::pair<std::size_t, std::size_t>>;

// Adds an op that reads these states and makes one of so many bytes, which is
// then the last state.
std::size_t add(LayerGraph& graph, std::string name, std::int64_t nanoseconds,
                std::vector<std::size_t> reads, Bytes bytes,
                bool is_saved = true) {
  const std::size_t op = graph.ops.size();
  graph.ops.push_back({.name = std::move(name),
                       .nanoseconds = nanoseconds,
                       .reads = std::move(reads)});
  graph.states.push_back({.bytes = bytes,
                          .cost = bytes,
                          .maker = op,
                          .place = std::pair(op, std::size_t{0}),
                          .is_saved = is_saved});
  return graph.states.size() - 1;
}

std::size_t add_input(LayerGraph& graph, Bytes bytes) {
  graph.states.push_back({.bytes = bytes, .cost = bytes});
  return graph.states.size() - 1;
}

// norm, matmul, gelu, matmul: all results saved but the last one's.
LayerGraph feed_forward() {
  LayerGraph graph;
  const std::size_t x = add_input(graph, 10_B);
  const std::size_t norm = add(graph, "aten::native_layer_norm", 2, {x}, 10_B);
  const std::size_t up = add(graph, "aten::mm", 100, {norm}, 40_B);
  const std::size_t gelu = add(graph, "aten::gelu", 4, {up}, 40_B);
  add(graph, "aten::mm", 100, {gelu}, 10_B, false);
  graph.states[x].is_saved = true;
  return graph;
}

TEST(Cuts, OfAFeedForward) {
  const std::vector<Cut> cuts = pareto_cuts(feed_forward());
  ASSERT_EQ(cuts.size(), 4u);
  // Nothing but the input; the last matmul is not called again.
  EXPECT_EQ(cuts[0].held, 10_B);
  EXPECT_EQ(cuts[0].nanoseconds, 106);
  EXPECT_EQ(cuts[0].replayed, 90_B);
  EXPECT_EQ(cuts[0].keep_set.kept, Kept{});
  // Its first matmul.
  EXPECT_EQ(cuts[1].held, 50_B);
  EXPECT_EQ(cuts[1].nanoseconds, 6);
  EXPECT_EQ(cuts[1].keep_set.kept, (Kept{{1, 0}}));
  EXPECT_EQ(cuts[1].replayed, 50_B);
  // The norm is dearer by the byte than gelu.
  EXPECT_EQ(cuts[2].keep_set.kept, (Kept{{0, 0}, {1, 0}}));
  EXPECT_EQ(cuts[3].held, 100_B);
  EXPECT_EQ(cuts[3].nanoseconds, 0);
  EXPECT_EQ(cuts[3].replayed, 0_B);
  EXPECT_EQ(cuts[3].keep_set.ops,
            (std::vector<std::string>{"aten::native_layer_norm", "aten::mm",
                                      "aten::gelu", "aten::mm"}));
}

TEST(Cuts, KeepingAllAndNothing) {
  const LayerGraph graph = feed_forward();
  const Cut all = keep_everything(graph);
  EXPECT_EQ(all.held, 100_B);
  EXPECT_EQ(all.nanoseconds, 0);
  const Cut nothing = keep_nothing(graph);
  EXPECT_EQ(nothing.held, 10_B);
  EXPECT_EQ(nothing.nanoseconds, 106);
}

TEST(Cuts, AnInputThatNobodyNeedsIsNotHeld) {
  LayerGraph graph;
  const std::size_t x = add_input(graph, 100_B);
  const std::size_t small = add(graph, "aten::mm", 10, {x}, 5_B, false);
  add(graph, "aten::exp", 1, {small}, 5_B);
  const std::vector<Cut> cuts = pareto_cuts(graph);
  ASSERT_EQ(cuts.size(), 1u);  // what is made from x is smaller than x
  EXPECT_EQ(cuts[0].held, 5_B);
  EXPECT_EQ(cuts[0].nanoseconds, 0);
  EXPECT_EQ(cuts[0].keep_set.kept, (Kept{{1, 0}}));
}

TEST(Cuts, KeepsASmallOneFromWhichLargeOnesAreMade) {
  LayerGraph graph;
  const std::size_t x = add_input(graph, 100_B);
  const std::size_t small = add(graph, "aten::mm", 10, {x}, 5_B, false);
  add(graph, "aten::expand_copy", 1, {small}, 50_B);
  add(graph, "aten::exp", 1, {small}, 50_B);
  const std::vector<Cut> cuts = pareto_cuts(graph);
  ASSERT_EQ(cuts.size(), 2u);
  EXPECT_EQ(cuts[0].held, 5_B);
  EXPECT_EQ(cuts[0].keep_set.kept, (Kept{{0, 0}}));
}

TEST(Cuts, AStateThatIsWrittenOverIsMadeAgain) {
  LayerGraph graph;
  const std::size_t x = add_input(graph, 10_B);
  const std::size_t old = add(graph, "aten::mm", 100, {x}, 10_B, false);
  graph.states[old].can_keep = false;
  const std::size_t result = add(graph, "aten::relu_", 1, {old}, 10_B);
  graph.states[x].is_saved = true;
  const std::vector<Cut> cuts = pareto_cuts(graph);
  ASSERT_EQ(cuts.size(), 2u);
  EXPECT_EQ(cuts[0].nanoseconds, 101);
  EXPECT_EQ(cuts[1].keep_set.kept, (Kept{{1, 0}}));
  // Even for the sake of others.
  graph.states[result].is_saved = false;
  add(graph, "aten::exp", 1, {old}, 40_B);
  EXPECT_EQ(keep_nothing(graph).nanoseconds, 101);
}

TEST(Cuts, PackedBytesAreHeldInsteadOfTheirResults) {
  LayerGraph graph;
  add(graph, "aten::bernoulli_.float", 3, {}, 320_B);
  graph.ops[0].packed = 10_B;
  const std::vector<Cut> cuts = pareto_cuts(graph);
  ASSERT_EQ(cuts.size(), 2u);
  EXPECT_EQ(cuts[0].held, 10_B);
  EXPECT_EQ(cuts[0].nanoseconds, 3);
  EXPECT_EQ(cuts[1].held, 320_B);
}

TEST(Cuts, OfNothing) {
  const std::vector<Cut> cuts = pareto_cuts({});
  ASSERT_EQ(cuts.size(), 1u);
  EXPECT_EQ(cuts[0].held, 0_B);
}

TEST(Cuts, RefuseWhatIsNotAGraph) {
  const auto broken = [](auto change) {
    LayerGraph graph = feed_forward();
    change(graph);
    return graph;
  };
  using G = LayerGraph&;
  for (const LayerGraph& graph :
       {broken([](G g) { g.states[1].maker = 9; }),
        broken([](G g) { g.states[1].place->first = 9; }),
        broken([](G g) { g.ops[0].reads = {1}; }),
        broken([](G g) { g.ops[0].reads = {9}; }),
        broken([](G g) { g.states[0].cost = Bytes(-1); }),
        broken([](G g) { g.ops[0].nanoseconds = -1; }),
        broken([](G g) { g.ops[0].nanoseconds = 1LL << 51; })}) {
    EXPECT_THROW(pareto_cuts(graph), PlanError);
    EXPECT_THROW(keep_everything(graph), PlanError);
    EXPECT_THROW(keep_nothing(graph), PlanError);
  }
}

// Not the same layer twice, so that nothing is to be gained from repetition.
TEST(Cuts, OfVeryManyOps) {
  std::mt19937 random(7);
  const auto draw = [&](std::size_t below) {
    return static_cast<std::size_t>(random()) % below;
  };
  LayerGraph graph;
  add_input(graph, 1_MiB);
  for (std::size_t i = 0; i < 800; ++i) {
    const std::size_t last = graph.states.size() - 1;
    std::vector<std::size_t> reads = {last};
    const std::size_t other = last - draw(std::min<std::size_t>(last + 1, 30));
    if (draw(3) == 0 && other != last) reads.push_back(other);
    add(graph, "aten::add.Tensor", static_cast<std::int64_t>(draw(1'000'000)),
        std::move(reads), Bytes(static_cast<std::int64_t>(draw(1 << 24))),
        draw(2) == 0);
  }
  const std::vector<Cut> cuts = pareto_cuts(graph);
  EXPECT_GT(cuts.size(), 50u);
  EXPECT_EQ(cuts.back().nanoseconds, 0);
}

TEST(MinCut, TakesTheFewestNodesOfSeveralSmallestCuts) {
  MinCut cut(4);  // a chain of equals: cut at the source
  cut.add_edge(0, 1, 5);
  cut.add_edge(1, 2, 5);
  cut.add_edge(2, 3, 5);
  EXPECT_EQ(cut.source_side(0, 3),
            (std::vector<bool>{true, false, false, false}));
}

TEST(MinCut, PushesBack) {
  MinCut cut(4);  // the short way through the middle must be undone
  cut.add_edge(0, 1, 1);
  cut.add_edge(0, 2, 1);
  cut.add_edge(1, 2, MinCut::kInfinite);
  cut.add_edge(1, 3, 1);
  cut.add_edge(2, 3, 3);
  EXPECT_EQ(cut.source_side(0, 3),
            (std::vector<bool>{true, false, false, false}));
}

}  // namespace
}  // namespace memscale
