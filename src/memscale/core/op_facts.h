#pragma once

#include "memscale/core/trace.h"

namespace memscale {

// Fills in what follows from names and shapes alone: whether an op is a view,
// its flops and bytes moved, its kernel's workspace on the CPU (and so on the
// simulated device) with `num_threads` threads, and the bytes that oneDNN's
// LSTM keeps for backward, which fake tensors do not show.
void add_op_facts(Trace& trace, int num_threads);

}  // namespace memscale
