#include "memscale/core/cuts/min_cut.h"

#include <algorithm>

namespace memscale {
namespace {

constexpr std::uint32_t kUnreached = ~std::uint32_t{0};

}  // namespace

MinCut::MinCut(std::size_t num_nodes)
    : first_(num_nodes, kNone), level_(num_nodes) {}

void MinCut::add_edge(std::size_t from, std::size_t to, Wide capacity) {
  const auto add = [&](std::size_t a, std::size_t b, Wide left) {
    arcs_.push_back({static_cast<std::uint32_t>(b), first_[a], left});
    first_[a] = static_cast<Edge>(arcs_.size() - 1);
  };
  add(from, to, capacity);
  add(to, from, 0);
}

// Distances from the source, over what is left. False: the sink is cut off.
bool MinCut::find_levels(std::size_t source, std::size_t sink) {
  std::ranges::fill(level_, kUnreached);
  queue_.assign(1, static_cast<std::uint32_t>(source));
  level_[source] = 0;
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    const std::uint32_t node = queue_[i];
    for (Edge e = first_[node]; e != kNone; e = arcs_[e].next) {
      const std::uint32_t to = arcs_[e].to;
      if (arcs_[e].capacity == 0 || level_[to] != kUnreached) continue;
      level_[to] = level_[node] + 1;
      queue_.push_back(to);
    }
  }
  return level_[sink] != kUnreached;
}

// One more path along increasing levels; false if there is none.
bool MinCut::push_path(std::size_t source, std::size_t sink) {
  path_.clear();
  std::size_t node = source;
  while (node != sink) {
    Edge& e = current_[node];
    while (e != kNone && (arcs_[e].capacity == 0 ||
                          level_[arcs_[e].to] != level_[node] + 1)) {
      e = arcs_[e].next;
    }
    if (e != kNone) {
      path_.push_back(e);
      node = arcs_[e].to;
      continue;
    }
    if (path_.empty()) return false;
    // A dead end: back, and past the edge that led here.
    const Edge back = path_.back();
    path_.pop_back();
    node = arcs_[back ^ 1U].to;
    current_[node] = arcs_[back].next;
  }
  Wide amount = kInfinite;
  for (const Edge e : path_) amount = std::min(amount, arcs_[e].capacity);
  for (const Edge e : path_) {
    arcs_[e].capacity -= amount;
    arcs_[e ^ 1U].capacity += amount;
  }
  return true;
}

std::vector<bool> MinCut::source_side(std::size_t source, std::size_t sink) {
  while (find_levels(source, sink)) {
    current_ = first_;
    while (push_path(source, sink)) {
    }
  }
  std::vector<bool> side(level_.size());
  for (std::size_t i = 0; i < side.size(); ++i) {
    side[i] = level_[i] != kUnreached;
  }
  return side;
}

}  // namespace memscale
