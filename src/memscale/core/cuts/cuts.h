#pragma once

#include <cstdint>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/core/cuts/layer_graph.h"
#include "memscale/core/tape/tape_rules.h"

namespace memscale {

// One way to run a layer: what it keeps, and what that costs.
struct Cut {
  Bytes held;  // from its forward to its backward, its inputs included
  std::int64_t nanoseconds = 0;  // of ops called again
  Bytes replayed;  // made again: what backward holds of it at most, beside held
  KeepSet keep_set;
};

// All that backward needs is kept; nothing but inputs, and what cannot be made
// again, is kept.
Cut keep_everything(const LayerGraph& graph);
Cut keep_nothing(const LayerGraph& graph);

// The cuts on the lower convex hull of (held, nanoseconds): for every price of
// a byte in nanoseconds, one of them is the cheapest way of all. Fewest bytes
// first; time falls strictly; the last takes none, or as little as it can. The
// same on every host. Throws PlanError if the graph does not pass check().
std::vector<Cut> pareto_cuts(const LayerGraph& graph);

}  // namespace memscale
