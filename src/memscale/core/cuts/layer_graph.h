#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/base/ids.h"
#include "memscale/core/trace/trace.h"

// One call of one layer's forward as replay sees it: states of storages, and
// the ops that make them. See Note [States of storages] in core/tape/tape.h.

namespace memscale {

// The bytes of a storage between two writes.
struct LineageState {
  Bytes bytes{};
  // That holding it until backward costs: nothing if somebody else does anyway,
  // less than all if it is held in fewer bits.
  Bytes cost{};
  // The op that can make it again. None: if it is needed, it is held. It comes
  // from outside, is small, or cannot be made a second time.
  std::optional<std::size_t> maker{};
  // Which output of which op it was, for a KeepSet. None: comes from outside.
  std::optional<std::pair<std::size_t, std::size_t>> place{};
  bool is_saved = false;  // backward needs it
  // False: a write in place follows, and who keeps the old bytes keeps the new
  // ones too. Then it is made again, if it is needed.
  bool can_keep = true;

  bool operator==(const LineageState&) const = default;
};

struct LineageOp {
  std::string name;
  std::int64_t nanoseconds = 0;      // that calling it again takes
  Bytes packed{};                    // that calling it again needs to be held
  std::vector<std::size_t> reads{};  // states; distinct

  bool operator==(const LineageOp&) const = default;
};

struct LayerGraph {
  std::vector<LineageState> states;
  std::vector<LineageOp> ops;

  // Throws PlanError if an index points nowhere, a state is made from itself or
  // a later one, or sizes and times are negative or of more than 50 bits.
  void check() const;

  bool operator==(const LayerGraph&) const = default;
};

struct GraphRules {
  Bytes min_bytes{};        // results smaller than this are always kept
  bool on_cpu = false;      // dropout's draws, pooling's indices are packed
  bool on_cuda = false;     // some sums have no order there
  bool benchmarks = false;  // as ReplayTarget has it
  Bytes granularity = Bytes(1);  // of the allocator
  // Storages that others hold until this layer's backward, beyond those that
  // the trace shows. A state that is also saved by the layer that made it is
  // not among these by itself: that layer may drop it.
  std::span<const StorageId> held_elsewhere{};
};

// `run`: the forward ops of one call, in order; `nanoseconds`: of each. Throws
// PlanError if the two differ in length, TraceError if an id points nowhere.
//
// What can be called again is decided as a tape decides it
// (core/tape/op_use.h). Where a trace does not tell (memory that is not torch's
// own), ops are taken for repeatable, which is right almost always and correct
// in any case: the tape keeps what it cannot replay.
LayerGraph layer_graph(const Trace& trace, std::span<const OpId> run,
                       std::span<const std::int64_t> nanoseconds,
                       const GraphRules& rules);

}  // namespace memscale
