#include <algorithm>

#include "memscale/core/ops/workspace/formulas.h"

// Products of matrices: BLAS takes none, oneDNN sums half precision in float32.

namespace memscale::scratch {
namespace {

constexpr Int kAlignment = 512;  // oneDNN's padding of a scratchpad, at most

// BLAS takes a matrix if one of its strides is 1 and the other is not less
// than the number of elements along it.
bool for_blas(const Tensor& t) {
  const Int rows = t.size(-2), columns = t.size(-1);
  return (t.stride(-1) == 1 && t.stride(-2) >= std::max<Int>(1, columns)) ||
         (t.stride(-2) == 1 && t.stride(-1) >= std::max<Int>(1, rows)) ||
         rows == 1 || columns == 1;
}

// oneDNN takes dense matrices, of a batch only.
bool for_onednn(const Tensor& t) {
  return t.contiguous() ||
         (t.stride(-2) == 1 && t.stride(-1) == t.size(-2) &&
          (t.dim() == 2 || t.stride(0) == t.size(1) * t.size(2)));
}

// Half precision goes to oneDNN above so many multiplications; it sums into a
// float32 copy of the result, for each thread that works on a matrix
// (mkldnn_matmul).
constexpr Int kMinHalfProduct = 4096;

// `first`: where the operands are.
Int matrix_product(const Call& call, std::size_t first) {
  const Tensor& a = call.in.at(first);
  const Tensor& b = call.in.at(first + 1);
  const Int batch = a.dim() == 3 ? a.size(0) : 1;
  const Int rows = a.size(-2), inner = a.size(-1), columns = b.size(-1);
  const bool sums_half =
      a.half() && batch * rows * inner * columns > kMinHalfProduct;
  Int total = 0;
  for (const Tensor* t : {&a, &b}) {
    if (sums_half && t->dim() == 3) {
      total += for_onednn(*t) ? 0 : t->bytes();
    } else if (!for_blas(*t)) {
      // Matrices of a batch are copied one after the other.
      total += t->bytes() / std::max<Int>(batch, 1);
    }
  }
  if (sums_half) {
    total += std::min(batch, call.threads) * rows * columns * kFloat;
    total += kAlignment;
  }
  return total;
}

}  // namespace

Result mm(const Call& call) { return matrix_product(call, 0); }
Result addmm(const Call& call) { return matrix_product(call, 1); }

// ||a||^2 - 2ab + ||b||^2 as one product of matrices with two more columns.
Result euclidean_distance(const Call& call) {
  const Tensor& a = call.in.at(0);
  const Tensor& b = call.in.at(1);
  const auto widened = [](const Tensor& t) {
    return t.bytes() + 2 * t.bytes() / std::max<Int>(t.size(-1), 1);
  };
  const Int products = call.threads * a.size(-2) * b.size(-2);
  const Int sums = a.half() ? products * kFloat + kAlignment : 0;
  return widened(a) + widened(b) + sums;
}

}  // namespace memscale::scratch
