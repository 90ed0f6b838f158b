#include "memscale/core/ops/workspace/formulas.h"

// Upsampling, pooling and other ops on images, but convolutions.

namespace memscale::scratch {
namespace {

// Sources (int64) and weights of each row and column of the result.
Int upsample_weights(const Call& call, Int sources) {
  const Tensor& out = call.out.at(0);
  Int rows = 0;
  for (Int d = 2; d < out.dim(); ++d) rows += out.size(d);
  return rows * sources * (8 + out.element());
}

// Small results are computed in NHWC (_use_vectorized_kernel_cond_2d).
Int upsample_2d(const Call& call, Int sources) {
  const Tensor& in = call.in.at(0);
  const Tensor& out = call.out.at(0);
  const bool small = out.size(-2) + out.size(-1) <= 128;
  if (in.channels_last() && (small || in.size(1) > 3)) return 0;
  return small ? in.bytes() + out.bytes() : upsample_weights(call, sources);
}

}  // namespace

Result im2col(const Call& call) {
  const Tensor& in = call.in.at(0);
  return in.bytes() + in.contiguous_copy();
}

Result upsample_nearest(const Call& call) { return upsample_weights(call, 1); }
Result upsample_linear(const Call& call) { return upsample_weights(call, 2); }
Result upsample_cubic(const Call& call) { return upsample_weights(call, 4); }
Result upsample_nearest_2d(const Call& call) { return upsample_2d(call, 1); }
Result upsample_linear_2d(const Call& call) { return upsample_2d(call, 2); }

// First along rows, then along columns.
Result upsample_antialias(const Call& call) {
  constexpr Int kPerRow = 64;
  const Tensor& in = call.in.at(0);
  const Tensor& out = call.out.at(0);
  const Int halfway = in.size(0) * in.size(1) * in.size(2) * out.size(3);
  return halfway * in.element() + (out.size(2) + out.size(3)) * kPerRow +
         in.dense_copy();
}

Result upsample_antialias_backward(const Call& call) {
  const Tensor& in = call.in.at(0);
  return in.contiguous() ? 0 : in.bytes() + call.out.at(0).bytes();
}

Result affine_grid(const Call& call) { return call.out.at(0).bytes() * 3 / 2; }

// Where the gradient is not laid out as the input.
Result max_pool_backward(const Call& call) {
  const Tensor& grad = call.in.at(0);
  const Tensor& in = call.in.at(1);
  const Tensor& indices = call.in.at(2);
  if (in.contiguous() || !in.channels_last()) {
    return grad.contiguous_copy() + indices.contiguous_copy();
  }
  return grad.channels_last() ? 0 : call.out.at(0).bytes() + indices.bytes();
}

}  // namespace memscale::scratch
