#pragma once

#include "memscale/core/trace/trace.h"

namespace memscale {

// Fills in what follows from names and shapes alone: whether an op is a view,
// its flops and bytes moved, its kernel's workspace on the CPU (and so on the
// simulated device) with `num_threads` threads, and the bytes that oneDNN's
// LSTM keeps for backward, which fake tensors do not show. `on_cpu`: the step
// runs on the CPU itself, where optimizers of ours have kernels of their own.
void add_op_facts(Trace& trace, int num_threads, bool on_cpu = true);

}  // namespace memscale
