#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <vector>

#include "memscale/base/wide.h"
#include "memscale/core/cuts/cuts.h"

namespace memscale {
namespace {

// From all of the range, in the first test as in the last.
template <typename T>
T any_in(T from, T below) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange(from, below));
}

// Up to twelve states: some from outside, then ops with one to three results
// each, which read any of the states before them.
LayerGraph any_graph() {
  LayerGraph graph;
  const auto below = *rc::gen::element<std::int64_t>(3, 10, 1'000'000'000);
  const auto any = [&] { return any_in<std::int64_t>(0, below); };
  const auto chance = [](int percent) { return any_in(0, 100) < percent; };
  const auto num_outside = any_in<std::size_t>(1, 4);
  for (std::size_t i = 0; i < num_outside; ++i) {
    const Bytes bytes(any());
    graph.states.push_back({.bytes = bytes,
                            .cost = chance(30) ? Bytes() : bytes,
                            .is_saved = chance(30)});
  }
  while (graph.states.size() < 12 && !chance(5)) {
    const std::size_t op = graph.ops.size();
    LineageOp& lineage = graph.ops.emplace_back();
    lineage.name = "aten::relu";
    lineage.nanoseconds = any();
    lineage.packed = chance(10) ? Bytes(any()) : Bytes();
    for (std::size_t v = 0; v < graph.states.size(); ++v) {
      if (chance(25)) lineage.reads.push_back(v);
    }
    const auto num_results = *rc::gen::element<std::size_t>(1, 1, 1, 2, 3);
    for (std::size_t k = 0; k < num_results; ++k) {
      LineageState state{.bytes = Bytes(any())};
      state.cost = chance(10) ? Bytes() : state.bytes;
      if (!chance(15)) state.maker = op;
      state.place.emplace(op, k);
      state.is_saved = chance(40);
      state.can_keep = state.is_saved || !chance(10);
      graph.states.push_back(state);
    }
  }
  return graph;
}

struct Cost {
  Wide held = 0;
  Wide nanoseconds = 0;
};

// What it costs if these states stay, as replay goes about it.
Cost cost_of(const LayerGraph& graph, const std::vector<bool>& stays) {
  std::vector<bool> is_needed(graph.states.size());
  std::vector<bool> is_called(graph.ops.size());
  // States are made from those before them.
  for (std::size_t v = graph.states.size(); v-- > 0;) {
    const LineageState& state = graph.states[v];
    if (state.is_saved) is_needed[v] = true;
    if (!is_needed[v] || !state.maker || (stays[v] && state.can_keep)) continue;
    is_called[*state.maker] = true;
    for (const std::size_t read : graph.ops[*state.maker].reads) {
      is_needed[read] = true;
    }
  }
  Cost cost;
  for (std::size_t v = 0; v < graph.states.size(); ++v) {
    const LineageState& state = graph.states[v];
    const bool is_made = state.maker && is_called[*state.maker];
    if (is_needed[v] && !is_made) cost.held += state.cost.count();
  }
  for (std::size_t i = 0; i < graph.ops.size(); ++i) {
    if (!is_called[i]) continue;
    cost.held += graph.ops[i].packed.count();
    cost.nanoseconds += graph.ops[i].nanoseconds;
  }
  return cost;
}

std::vector<bool> stays_under(const LayerGraph& graph, const KeepSet& set) {
  std::vector<bool> stays(graph.states.size());
  for (std::size_t v = 0; v < stays.size(); ++v) {
    const auto& place = graph.states[v].place;
    stays[v] = place && set.keeps(place->first, place->second);
  }
  return stays;
}

std::vector<Cost> all_costs(const LayerGraph& graph) {
  const std::size_t n = graph.states.size();
  std::vector<Cost> costs;
  for (std::size_t set = 0; set < std::size_t{1} << n; ++set) {
    std::vector<bool> stays(n);
    bool is_new = true;
    for (std::size_t v = 0; v < n; ++v) {
      stays[v] = (set >> v & 1) != 0;
      is_new &= graph.states[v].maker || !stays[v];
    }
    if (is_new) costs.push_back(cost_of(graph, stays));
  }
  return costs;
}

// Whether c lies below the line through a and b.
Wide height(const Cost& a, const Cost& b, const Cost& c) {
  return (b.held - a.held) * (c.nanoseconds - a.nanoseconds) -
         (b.nanoseconds - a.nanoseconds) * (c.held - a.held);
}

TEST(CutsProperty, AreTheHullOfAllKeepSets) {
  ASSERT_TRUE(rc::check("hull", [] {
    const LayerGraph graph = any_graph();
    const std::vector<Cut> cuts = pareto_cuts(graph);
    RC_ASSERT(!cuts.empty());
    std::vector<Cost> points;
    for (const Cut& cut : cuts) {
      cut.keep_set.check();
      const Cost cost = cost_of(graph, stays_under(graph, cut.keep_set));
      RC_ASSERT(cost.held == cut.held.count());
      RC_ASSERT(cost.nanoseconds == cut.nanoseconds);
      points.push_back(cost);
    }
    for (std::size_t i = 1; i < points.size(); ++i) {
      RC_ASSERT(points[i - 1].held < points[i].held);
      RC_ASSERT(points[i - 1].nanoseconds > points[i].nanoseconds);
      if (i > 1) RC_ASSERT(height(points[i - 2], points[i - 1], points[i]) > 0);
    }
    for (const Cost& other : all_costs(graph)) {
      RC_ASSERT(other.held >= points.front().held);
      RC_ASSERT(other.held > points.front().held ||
                other.nanoseconds >= points.front().nanoseconds);
      RC_ASSERT(other.nanoseconds >= points.back().nanoseconds);
      RC_ASSERT(other.nanoseconds > points.back().nanoseconds ||
                other.held >= points.back().held);
      for (std::size_t i = 1; i < points.size(); ++i) {
        RC_ASSERT(height(points[i - 1], points[i], other) >= 0);
      }
    }
  }));
}

TEST(CutsProperty, EndsAreNoWorseThanKeepingAllOrNothing) {
  ASSERT_TRUE(rc::check("ends", [] {
    const LayerGraph graph = any_graph();
    const std::vector<Cut> cuts = pareto_cuts(graph);
    const Cut all = keep_everything(graph);
    RC_ASSERT(cuts.back().nanoseconds <= all.nanoseconds);
    RC_ASSERT(cuts.back().nanoseconds < all.nanoseconds ||
              cuts.back().held <= all.held);
    RC_ASSERT(cuts.front().held <= keep_nothing(graph).held);
  }));
}

}  // namespace
}  // namespace memscale
