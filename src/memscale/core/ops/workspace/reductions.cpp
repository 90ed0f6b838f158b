#include <algorithm>
#include <functional>

#include "memscale/core/ops/workspace/formulas.h"

// Reductions, losses and normalisation: half precision is summed in float32.

namespace memscale::scratch {
namespace {

// Input and result in another dtype: bool is summed as int64.
Int reduction_cast(const Call& call) {
  const Tensor& in = call.in.at(0);
  const Tensor& out = call.out.at(0);
  return in.dtype() == out.dtype() ? 0 : in.numel() * out.element();
}

// Both in half precision.
bool halves(const Call& call) {
  return call.in.at(0).half() && call.out.at(0).half();
}

// The float32 copies of input and result.
Int half_as_float(const Call& call) {
  return (call.in.at(0).numel() + call.out.at(0).numel()) * kFloat;
}

// Without keepdim, the reduced dimensions are guessed from what is missing.
// Nothing: what is left is no part of the input's shape.
std::optional<std::vector<Int>> reduced_dims(const Tensor& in,
                                             const Tensor& out) {
  std::vector<Int> reduced;
  const bool keeps = out.dim() == in.dim();
  Int next = 0;
  for (Int d = 0; d < in.dim(); ++d) {
    const bool kept = next < out.dim() && in.size(d) == out.size(next);
    if (kept || keeps) ++next;
    if (!kept && in.size(d) != 1) reduced.push_back(d);
  }
  if (next != out.dim()) return std::nullopt;
  return reduced;
}

// Whether at least two dimensions are summed that cannot be walked as one.
bool reduces_apart(const Tensor& in, const Tensor& out) {
  auto reduced = reduced_dims(in, out);
  if (!reduced) return true;
  std::ranges::sort(*reduced, std::greater{},
                    [&](Int d) { return in.stride(d); });
  return std::ranges::adjacent_find(*reduced, [&](Int outer, Int inner) {
           return in.stride(outer) != in.stride(inner) * in.size(inner);
         }) != reduced->end();
}

// Of a loss: the float32 copy of each element's, for their mean.
Int loss_as_float(const Tensor& in) {
  return in.half() ? in.numel() * kFloat : 0;
}

bool is_reduced(const Call& call) { return call.out.at(0).dim() == 0; }

}  // namespace

Result accumulation(const Call& call) { return reduction_cast(call); }

// should_use_acc_buffer
Result sum(const Call& call) {
  const bool buffered =
      halves(call) && reduces_apart(call.in.at(0), call.out.at(0));
  return buffered ? half_as_float(call) : reduction_cast(call);
}

Result mean(const Call& call) {
  return halves(call) ? half_as_float(call) : reduction_cast(call);
}

Result norm(const Call& call) {
  return call.in.at(0).half() ? reduction_cast(call) : 0;
}

// Only the extremum of a whole tensor needs it contiguous, not that along a
// dimension or of two tensors.
Result extremum(const Call& call) {
  if (call.overload == "dim" || call.overload == "other") return 0;
  return call.in.at(0).contiguous_copy();
}

// Known along a dimension only.
Result median(const Call& call) {
  if (call.overload != "dim") return {};
  return call.in.at(0).bytes();
}

// Values and int64 positions.
Result kthvalue(const Call& call) {
  return call.in.at(0).numel() * (call.in.at(0).element() + 8);
}

// The rows that it masks: all true where a row is all -inf.
Result safe_softmax(const Call& call) {
  const Tensor& in = call.in.at(0);
  return in.contiguous_copy() + in.numel() +
         in.numel() / std::max<Int>(in.size(-1), 1) + 8;
}

// The loss of each element, then its mean.
Result elementwise_loss(const Call& call) {
  const Tensor& in = call.in.at(0);
  return is_reduced(call) ? in.bytes() + loss_as_float(in) : 0;
}

// The loss of each element is made in place of the result.
Result resized_loss(const Call& call) {
  return is_reduced(call) ? loss_as_float(call.in.at(0)) : 0;
}

Result bce_with_logits(const Call& call) {
  const Tensor& in = call.in.at(0);
  if (!is_reduced(call)) return in.bytes() + in.contiguous_copy();
  return 2 * in.bytes() + std::max(in.contiguous_copy(), loss_as_float(in));
}

Result layer_norm_backward(const Call& call) {
  const Int columns = call.in.size() > 4 ? call.in[4].bytes() : 0;
  return call.in.at(0).contiguous_copy() + call.in.at(1).contiguous_copy() +
         call.threads * 2 * columns;
}

Result batch_norm(const Call& call) {
  const Tensor& in = call.in.at(0);
  const Int moments = 2 * in.size(1) * in.element();
  return moments + (in.half() ? 2 * in.dense_copy() : 0);
}

Result batch_norm_backward(const Call& call) {
  const Tensor& grad = call.in.at(0);
  const Tensor& in = call.in.at(1);
  if (grad.dense() && in.dense()) return in.bytes();
  return in.half() ? in.numel() * kFloat : 0;
}

}  // namespace memscale::scratch
