#include "memscale/core/ops/workspace/formulas.h"

#include <algorithm>

#include "memscale/core/ops/op_name.h"

namespace memscale::scratch {

Int Tensor::product(Int first) const {
  Int result = 1;
  for (Int d = first; d < dim(); ++d) result *= size(d);
  return result;
}

bool Tensor::contiguous() const {
  Int expected = 1;
  for (Int d = dim(); d-- > 0;) {
    if (size(d) == 0) return true;
    if (size(d) != 1 && stride(d) != expected) return false;
    expected *= size(d);
  }
  return true;
}

bool Tensor::channels_last() const {
  if (dim() != 4 && dim() != 5) return false;
  Int expected = 1;
  const auto fits = [&](Int d) {
    if (size(d) != 1 && stride(d) != expected) return false;
    expected *= size(d);
    return true;
  };
  if (!fits(1)) return false;
  for (Int d = dim() - 1; d >= 2; --d) {
    if (!fits(d)) return false;
  }
  return fits(0);
}

bool Tensor::suggests_channels_last() const {
  if (dim() != 4 && dim() != 5) return false;
  Int least = 0;
  if (stride(1) == 0) return false;
  const auto fits = [&](Int d) {
    if (size(d) == 0 || stride(d) < least) return false;
    if (d == 0 && least == stride(1)) return false;
    least = stride(d) * std::max<Int>(size(d), 1);
    return true;
  };
  if (!fits(1)) return false;
  for (Int d = dim() - 1; d >= 2; --d) {
    if (!fits(d)) return false;
  }
  return fits(0);
}

std::optional<Call> call_of(const Trace& trace, const Op& op, int num_threads) {
  Call call;
  call.overload = OpName::of(op.name).overload;
  call.mutates = op.mutates;
  call.transposed = op.transposed;
  call.threads = num_threads;
  for (const ValueId id : op.inputs) call.in.emplace_back(trace.at(id));
  for (const ValueId id : op.outputs) call.out.emplace_back(trace.at(id));
  const bool known = std::ranges::all_of(call.in, &Tensor::known) &&
                     std::ranges::all_of(call.out, &Tensor::known);
  return known ? std::optional(std::move(call)) : std::nullopt;
}

}  // namespace memscale::scratch
