#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

struct OpCost {
  std::int64_t flops = 0;  // multiply and add are two
  Bytes moved;             // all inputs read and all outputs written, once each

  bool operator==(const OpCost&) const = default;
};

// What a call of the op costs, from the sizes of its tensors alone; `op` need
// not be in the trace, only its values. A view costs nothing.
//
// Counted exactly: matrix products, convolutions, attention, recurrent layers,
// forward and backward; biases, softmax and masks are left out, and attention
// counts every pair (whether it was causal, a trace does not say). Any other op
// is one flop for each element of its largest output. Numbers beyond int64 are
// held at its maximum.
//
// Note [Transposed convolutions]
// Whether a convolution is transposed is an argument that a trace lacks. Its
// weight tells: (out, in / groups, ...) of a plain one, (in, out / groups, ...)
// of a transposed one. Where both readings fit, in = out channels, the one that
// enlarges is taken for transposed. Where the sizes are equal as well, both
// cost the same. So only a plain convolution with more padding than its kernel
// needs, or a transposed one that shrinks, can be mistaken.
OpCost op_cost(const Trace& trace, const Op& op);

// The names of ops that cost far more than one flop for each element, and of
// which nobody knows how much: each once, sorted. They are products of
// matrices, convolutions, attention and recurrence by their row or name, ops
// with much work by their row, and ops that are not torch's and move at least
// 1 MiB. None of them has a formula in the table, or their shapes do not fit
// it; op_cost() counts them as any other op.
std::vector<std::string> uncounted_ops(const Trace& trace);

// Whether a forward convolution (aten::convolution) is transposed, as far as
// its shapes tell. False for other ops.
bool is_transposed_convolution(const Trace& trace, const Op& op);

}  // namespace memscale
