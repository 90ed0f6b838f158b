#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memscale/base/wide.h"

namespace memscale {

// A directed graph with capacities, and its smallest cut between two nodes
// (Dinic's algorithm, without recursion). Not thread-safe.
class MinCut final {
 public:
  // More than any finite cut; finite capacities must sum to less.
  static constexpr Wide kInfinite = power_of_two(125);

  explicit MinCut(std::size_t num_nodes);

  // Cut if `from` is on the source's side and `to` is not. capacity >= 0.
  void add_edge(std::size_t from, std::size_t to, Wide capacity);

  // Who is on the source's side of the smallest cut; of all such cuts, the one
  // with the fewest nodes there, which is unique: the result depends on the
  // graph alone, not on the order of its edges. Once.
  std::vector<bool> source_side(std::size_t source, std::size_t sink);

 private:
  using Edge = std::uint32_t;  // edge e ^ 1 is its reverse
  static constexpr Edge kNone = ~Edge{0};

  bool find_levels(std::size_t source, std::size_t sink);
  bool push_path(std::size_t source, std::size_t sink);

  struct Arc {
    std::uint32_t to;
    Edge next;
    Wide capacity;  // that is left
  };
  std::vector<Arc> arcs_;
  std::vector<Edge> first_;           // by node
  std::vector<Edge> current_;         // by node: those before it are of no use
  std::vector<std::uint32_t> level_;  // by node
  std::vector<std::uint32_t> queue_;
  std::vector<Edge> path_;
};

}  // namespace memscale
