#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/core/tape/tape_rules.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

// What replay costs and gains in one layer.
struct LayerReplay {
  std::size_t ops = 0;     // called again
  std::int64_t flops = 0;  // of those
  Bytes moved;             // by those, at least
  // What its forward made and backward finds held: plain, and under replay.
  Bytes held_plain;
  Bytes held;
};

struct ReplayedStep {
  Trace trace;
  std::vector<LayerReplay> layers;  // by LayerId
  std::size_t num_replayed = 0;     // ops called again
};

// The step as it will be under replay: the same ops, with what is dropped freed
// as soon as the program lets go of it, and the ops that backward calls again
// where the first backward op that needs them stands. Those are of the backward
// phase, their `forward` is the op that they repeat, and what they make is of
// Category::Recompute. Saves that are dropped are not among the trace's.
//
// `layers`: by LayerId, as many as the trace has. `on_cpu`: the step's device
// is the CPU, where two kinds of results are kept in fewer bits; `target`: what
// else of it decides what is replayed. The tapes that decide are those that
// train the model: core/tape.
// Throws TraceError if the trace does not pass its check(), has no saves known,
// or has another number of layers.
ReplayedStep replayed_step(const Trace& plain,
                           std::span<const TapeRules> layers, bool on_cpu,
                           const ReplayTarget& target = {});

}  // namespace memscale
