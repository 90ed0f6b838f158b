#include "memscale/core/cuts/cuts.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/base/wide.h"
#include "memscale/core/cuts/min_cut.h"

// Note [Keep sets as cuts]
// A state v is needed in backward (A_v), an op o is called again (R_o):
//   saved v                 A_v
//   A_v, not R_maker(v)     v is held: its bytes
//   R_o                     its time, its packed bytes, and A_u for all u read
// Each term has two variables and is submodular, so the cheapest assignment at
// one price is a smallest cut with "true" on the source's side. Only R_o's own
// terms depend on the price of time, all in one direction: as it rises, the
// true ones become fewer, and each solution contains those at higher prices.
// So between two known solutions only what they differ in is open, and the
// graphs shrink as the prices are bisected.

namespace memscale {
namespace {

// What is minimised: bytes * held + time * nanoseconds.
struct Price {
  Wide bytes;
  Wide time;
};

class Lineage {
 public:
  using Assignment = std::vector<bool>;  // states, then ops

  explicit Lineage(const LayerGraph& graph)
      : graph_(graph), num_states_(graph.states.size()) {}

  std::size_t num_nodes() const { return num_states_ + graph_.ops.size(); }
  std::size_t op(std::size_t i) const { return num_states_ + i; }

  Assignment all(bool value) const { return Assignment(num_nodes(), value); }

  // The cheapest of those that `most` contains and that contain `least`.
  Assignment cheapest(const Price& price, const Assignment& least,
                      const Assignment& most) const {
    constexpr std::size_t kSource = 0;
    constexpr std::size_t kSink = 1;
    std::vector<std::size_t> node(num_nodes());
    std::size_t num_open = 2;
    for (std::size_t i = 0; i < node.size(); ++i) {
      node[i] = least[i] ? kSource : most[i] ? num_open++ : kSink;
    }
    MinCut cut(num_open);
    const auto add = [&](std::size_t from, std::size_t to, Wide capacity) {
      if (from == to || from == kSink || to == kSource || capacity == 0) return;
      if (from == kSource && to == kSink) return;  // the same in all of them
      cut.add_edge(from, to, capacity);
    };
    for (std::size_t v = 0; v < num_states_; ++v) {
      const LineageState& state = graph_.states[v];
      if (state.is_saved) add(kSource, node[v], MinCut::kInfinite);
      const std::size_t maker = state.maker ? node[op(*state.maker)] : kSink;
      const bool must_be_made = state.maker && !state.can_keep;
      add(node[v], maker,
          must_be_made ? MinCut::kInfinite : price.bytes * state.cost.count());
    }
    for (std::size_t i = 0; i < graph_.ops.size(); ++i) {
      const LineageOp& lineage = graph_.ops[i];
      add(node[op(i)], kSink,
          price.time * lineage.nanoseconds +
              price.bytes * lineage.packed.count());
      for (const std::size_t read : lineage.reads) {
        add(node[op(i)], node[read], MinCut::kInfinite);
      }
    }
    const std::vector<bool> side = cut.source_side(kSource, kSink);
    Assignment result = least;
    for (std::size_t i = 0; i < result.size(); ++i) {
      if (node[i] > kSink) result[i] = side[node[i]];
    }
    return result;
  }

  // What follows from calling again all that can be (or nothing that need not).
  Assignment closure(bool replays) const {
    Assignment result = all(false);
    std::vector<std::size_t> path;
    for (std::size_t v = 0; v < num_states_; ++v) {
      if (graph_.states[v].is_saved) path.push_back(v);
    }
    while (!path.empty()) {
      const std::size_t v = path.back();
      path.pop_back();
      if (result[v]) continue;
      result[v] = true;
      const LineageState& state = graph_.states[v];
      if (!state.maker || (!replays && state.can_keep)) continue;
      result[op(*state.maker)] = true;
      const auto& reads = graph_.ops[*state.maker].reads;
      path.insert(path.end(), reads.begin(), reads.end());
    }
    return result;
  }

  bool is_held(const Assignment& assignment, std::size_t v) const {
    const auto& maker = graph_.states[v].maker;
    return assignment[v] && !(maker && assignment[op(*maker)]);
  }

  Bytes held(const Assignment& assignment) const {
    Bytes sum;
    for (std::size_t v = 0; v < num_states_; ++v) {
      if (is_held(assignment, v)) sum += graph_.states[v].cost;
    }
    for (std::size_t i = 0; i < graph_.ops.size(); ++i) {
      if (assignment[op(i)]) sum += graph_.ops[i].packed;
    }
    return sum;
  }

  std::int64_t nanoseconds(const Assignment& assignment) const {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < graph_.ops.size(); ++i) {
      if (assignment[op(i)]) sum += graph_.ops[i].nanoseconds;
    }
    return sum;
  }

  Cut cut(const Assignment& assignment) const {
    Cut cut{.held = held(assignment),
            .nanoseconds = nanoseconds(assignment),
            .replayed = {},
            .keep_set = {}};
    for (const LineageOp& lineage : graph_.ops) {
      cut.keep_set.ops.push_back(lineage.name);
    }
    auto& kept = cut.keep_set.kept;
    for (std::size_t v = 0; v < num_states_; ++v) {
      const LineageState& state = graph_.states[v];
      if (is_held(assignment, v)) {
        if (state.place) kept.push_back(*state.place);
      } else if (state.maker && assignment[op(*state.maker)]) {
        cut.replayed += state.bytes;
      }
    }
    std::ranges::sort(kept);
    kept.erase(std::ranges::unique(kept).begin(), kept.end());
    return cut;
  }

 private:
  const LayerGraph& graph_;
  const std::size_t num_states_;
};

struct Point {
  Lineage::Assignment assignment;
  Wide held;
  Wide nanoseconds;

  Wide cost(const Price& price) const {
    return price.bytes * held + price.time * nanoseconds;
  }
};

Point point(const Lineage& lineage, Lineage::Assignment assignment) {
  const Wide held = lineage.held(assignment).count();
  const Wide nanoseconds = lineage.nanoseconds(assignment);
  return {std::move(assignment), held, nanoseconds};
}

Wide greatest_common_divisor(Wide a, Wide b) {
  while (b != 0) a = std::exchange(b, a % b);
  return a;
}

// All corners of the hull between two of them, the one with fewer bytes first;
// both ends are left out. By bytes.
std::vector<Point> corners_between(const Lineage& lineage, const Point& first,
                                   const Point& last) {
  std::vector<Point> found;
  std::vector<std::pair<Point, Point>> open;
  open.emplace_back(first, last);
  while (!open.empty()) {
    auto [few, fast] = std::move(open.back());
    open.pop_back();
    if (few.held >= fast.held || few.nanoseconds <= fast.nanoseconds) continue;
    // The price at which both cost the same. If nothing costs less, there is
    // no corner between them.
    Price price{few.nanoseconds - fast.nanoseconds, fast.held - few.held};
    const Wide divisor = greatest_common_divisor(price.bytes, price.time);
    price.bytes /= divisor;
    price.time /= divisor;
    Point middle = point(
        lineage, lineage.cheapest(price, fast.assignment, few.assignment));
    if (middle.cost(price) >= few.cost(price)) continue;
    found.push_back(middle);
    open.emplace_back(std::move(few), middle);
    open.emplace_back(std::move(middle), std::move(fast));
  }
  std::ranges::sort(found, {}, &Point::held);
  return found;
}

}  // namespace

Cut keep_everything(const LayerGraph& graph) {
  graph.check();
  const Lineage lineage(graph);
  return lineage.cut(lineage.closure(false));
}

Cut keep_nothing(const LayerGraph& graph) {
  graph.check();
  const Lineage lineage(graph);
  return lineage.cut(lineage.closure(true));
}

std::vector<Cut> pareto_cuts(const LayerGraph& graph) {
  graph.check();
  const Lineage lineage(graph);
  const Lineage::Assignment none = lineage.all(false);
  const Lineage::Assignment all = lineage.all(true);
  // Fewest bytes, and of these the least time; and the other way round. Both
  // sums are below 2^51, see LayerGraph::check().
  constexpr Wide kAboveAll = power_of_two(52);
  const Point fewest =
      point(lineage, lineage.cheapest({kAboveAll, 1}, none, all));
  const Point fastest =
      point(lineage, lineage.cheapest({1, kAboveAll}, none, fewest.assignment));

  std::vector<Cut> cuts = {lineage.cut(fewest.assignment)};
  for (const Point& corner : corners_between(lineage, fewest, fastest)) {
    cuts.push_back(lineage.cut(corner.assignment));
  }
  if (fastest.nanoseconds < fewest.nanoseconds) {
    cuts.push_back(lineage.cut(fastest.assignment));
  }
  return cuts;
}

}  // namespace memscale
