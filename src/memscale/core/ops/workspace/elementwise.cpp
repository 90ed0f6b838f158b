#include <algorithm>

#include "memscale/core/ops/workspace/formulas.h"

// Elementwise ops and copies: TensorIterator casts operands to one dtype.

namespace memscale::scratch {
namespace {

// As torch promotes: bool < integer < floating < complex.
Dtype promoted(Dtype a, Dtype b) {
  if (kind_of(a) != kind_of(b)) return kind_of(a) > kind_of(b) ? a : b;
  if (itemsize_of(a) != itemsize_of(b)) {
    return itemsize_of(a) > itemsize_of(b) ? a : b;
  }
  // bfloat16 with float16
  return a != b && kind_of(a) == DtypeKind::Floating ? Dtype::Float32 : a;
}

// The dtype that torch computes in: tensors before 0-dim tensors.
Dtype common_dtype(std::span<const Tensor> tensors) {
  std::optional<Dtype> best;
  for (const Tensor& t : tensors) {
    if (t.dim() > 0) best = best ? promoted(*best, t.dtype()) : t.dtype();
  }
  for (const Tensor& t : tensors) {
    if (t.dim() == 0 && (!best || t.kind() > kind_of(*best))) {
      best = t.dtype();
    }
  }
  return best.value_or(Dtype::Float32);
}

Int cast(const Tensor& t, Dtype to) {
  return t.dtype() == to ? 0 : t.numel() * itemsize_of(to);
}

Int casts(std::span<const Tensor> tensors, Dtype to) {
  Int total = 0;
  for (const Tensor& t : tensors) total += cast(t, to);
  return total;
}

Int elementwise_bytes(const Call& call, std::span<const Tensor> operands) {
  if (operands.empty() || call.out.empty()) return 0;
  const Tensor& out = call.out[0];
  const Dtype inputs = common_dtype(operands);
  // In place, the result is computed in a copy of the target and then cast.
  if (call.mutates) return casts(operands, inputs) + cast(out, inputs);
  // A scalar may have promoted the result; a comparison's result is bool.
  const bool compares = out.kind() == DtypeKind::Bool;
  return casts(operands, compares ? inputs : out.dtype());
}

// A transposing copy of a matrix goes through a tile of 60 x 60 elements
// (copy_same_type_transpose_).
Int transposing_tile(const Tensor& from) {
  constexpr Int kTile = 3600;
  const bool transposes = from.dim() == 2 && from.numel() >= kTile &&
                          from.stride(0) == 1 && from.stride(1) > 1;
  return transposes ? kTile * from.element() : 0;
}

}  // namespace

Result elementwise(const Call& call) {
  return elementwise_bytes(call, call.in);
}

// One of the operands is a mask, which is not cast.
Result elementwise_masked(const Call& call) {
  std::vector<Tensor> operands;
  for (const Tensor& t : call.in) {
    if (t.kind() != DtypeKind::Bool) operands.push_back(t);
  }
  return elementwise_bytes(call, operands);
}

// With the value as a tensor, the functional op casts nothing.
Result masked_fill(const Call& call) {
  if (call.overload == "Tensor" && !call.mutates) return 0;
  return elementwise_masked(call);
}

// Tensor by tensor; the largest cast counts.
Result foreach_cast(const Call& call) {
  const Dtype common = common_dtype(call.in);
  Int largest = 0;
  for (const Tensor& t : call.in) largest = std::max(largest, cast(t, common));
  return largest;
}

// A number that is added, multiplied and so on becomes a tensor, which is cast
// to the type of the others: two blocks of an accelerator's allocator, 512
// bytes each, however small they are. (On the CPU they take 12 bytes.)
Result foreach_number(const Call& call) {
  constexpr Int kTwoBlocks = 513;
  const Result casts = foreach_cast(call);
  if (!casts || !call.overload.starts_with("Scalar")) return casts;
  return std::max(*casts, kTwoBlocks);
}

Result complex_magnitude(const Call& call) {
  const Tensor& in = call.in.at(0);
  return in.kind() == DtypeKind::Complex ? in.bytes() : 0;
}

Result copy(const Call& call) {
  const Tensor& to = call.out.at(0);
  const Tensor& from = call.in.at(call.in.size() - 1);
  const bool plain = to.contiguous() && to.dtype() == from.dtype();
  return plain ? transposing_tile(from) : 0;
}

Result select_backward(const Call& call) {
  return transposing_tile(call.in.at(0));
}

}  // namespace memscale::scratch
