#include "memscale/core/ops/workspace/formulas.h"

// Ops that pick elements by an index or a mask.

namespace memscale::scratch {
namespace {

constexpr Int kPosition = 8;  // bytes: an int64

// A mask becomes the positions of its true elements, one a dimension.
Int mask_positions(const Call& call, const Tensor& rows) {
  Int total = 0;
  for (std::size_t i = 1; i < call.in.size(); ++i) {
    const Tensor& index = call.in[i];
    if (index.kind() == DtypeKind::Bool && rows.dim() > 0) {
      total += rows.size(0) * index.dim() * kPosition;
    }
  }
  return total;
}

}  // namespace

Result index(const Call& call) { return mask_positions(call, call.out.at(0)); }

Result index_put(const Call& call) {
  return mask_positions(call, call.in.at(call.in.size() - 1));
}

// Through a float32 copy of the result.
Result gather_scatter(const Call& call) {
  const Tensor& out = call.out.at(0);
  return out.half() ? out.numel() * kFloat : 0;
}

// With a number for its source, the functional op needs no copy.
Result scatter(const Call& call) {
  if (call.overload == "value" && !call.mutates) return 0;
  return gather_scatter(call);
}

// What "mean" takes: counts, and which of them are zero.
Result scatter_reduce(const Call& call) {
  const Tensor& out = call.out.at(0);
  return out.half() ? 2 * out.numel() * kFloat : 2 * out.bytes() + out.numel();
}

// The mask as int64 and its running sum.
Result masked_select(const Call& call) {
  return 2 * kPosition * call.in.at(1).numel() + call.out.at(0).bytes();
}

Result embedding_bag_backward(const Call& call) {
  return 4 * call.in.at(1).bytes() + 64;
}

}  // namespace memscale::scratch
