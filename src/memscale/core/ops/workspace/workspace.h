#pragma once

#include <optional>

#include "memscale/base/bytes.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

// The scratch memory that the CPU's kernel of `op` takes and gives back while
// it runs, beyond its outputs: what torch 2.13 and its oneDNN allocate with
// `num_threads` (> 0) intra-op threads on a processor with AVX-512. Exact or a
// little above for most ops; scratch below 4 KiB is left out. The simulated
// device runs the same kernels; its own ones are known by their names.
//
// Zero: the op is known to take none. Nothing: nobody knows (a custom kernel,
// an op whose row has no formula, an op whose arguments do not fit its schema).
//
// Ops carry no scalar arguments: strides of convolutions, reduced dimensions
// and the like are read off the shapes. `op` must belong to `trace`.
std::optional<Bytes> workspace(const Trace& trace, const Op& op,
                               int num_threads);

// The bytes that an op keeps from forward to backward in its last output,
// which fake tensors report as empty. Not scratch, so no part of workspace().
// Only oneDNN's LSTM (aten::mkldnn_rnn_layer) has such bytes. Nothing: another
// op, an LSTM without gradients (no 4th output), or one that is not in float32.
// `op` must belong to `trace`.
std::optional<Bytes> reserved_bytes(const Trace& trace, const Op& op);

}  // namespace memscale
