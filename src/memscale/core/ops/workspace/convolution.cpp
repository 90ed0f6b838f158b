#include <algorithm>

#include "memscale/core/ops/workspace/convolution_shape.h"
#include "memscale/core/ops/workspace/formulas.h"

// Convolutions of one, two and three dimensions.

namespace memscale::scratch {
namespace {

// Note [Convolutions on the CPU]
// oneDNN computes in its own layouts. Its usual kernels have channels in
// blocks of 16 (padded), so that image, weight and result each exist twice for
// a while: reordered into blocks before, and back after. Its kernels for
// strided gradients of images (brgconv_strided) and for depthwise volumes have
// channels last: what they make is copied twice. Where neither fits, a product
// of matrices reads tensors as they are (gemm), from patches as columns.
// Tensors in channels_last are taken as they are, but weights. A gradient of
// weights that threads compute from different images is reduced from one copy
// for each.
//
// The functions below take and give bytes in the order in which torch's and
// oneDNN's allocations were seen.
class Held final {
 public:
  void take(Int bytes) {
    now_ += bytes;
    most_ = std::max(most_, now_);
  }
  void give(Int bytes) { now_ -= bytes; }
  // For the duration of a moment.
  void touch(Int bytes) { most_ = std::max(most_, now_ + bytes); }
  Int most() const { return most_; }

 private:
  Int now_ = 0, most_ = 0;
};

class Convolution final : ConvolutionShape {
 public:
  explicit Convolution(ConvolutionShape shape)
      : ConvolutionShape(std::move(shape)) {}

  Int forward() const {
    if (is_torchs()) return torchs_forward();
    Held held;
    if (transposed) {
      image_from_result(held, /*forward=*/true);
      return held.most() - image();
    }
    result_from_image(held, /*forward=*/true);
    return held.most() - result();
  }

  // `outputs`: the bytes of the gradients, which are no scratch.
  Int backward(bool needs_input, bool needs_weight, Int outputs) const {
    Held held;
    if (needs_input) {
      if (is_torchs()) {
        torchs_input_gradient(held);
      } else if (transposed) {
        result_from_image(held, /*forward=*/false);
      } else {
        image_from_result(held, /*forward=*/false);
      }
    }
    if (needs_weight) {
      if (is_torchs()) {
        held.touch(weight() + torchs_weight_columns());
      } else {
        weight_from_both(held);
      }
    }
    return std::max<Int>(0, held.most() - outputs);
  }

 private:
  // ---- torch's own, from columns ----

  // Image patches as columns of a matrix.
  Int all_columns() const {
    return batch * image_channels / groups * kernel() * result_space() *
           element;
  }
  // Groups are put together at the end.
  Int parts(Int whole) const { return groups > 1 ? whole : 0; }
  bool pointwise() const { return kernel() == 1 && !strided(); }
  Int torchs_forward() const {
    if (transposed) {
      const Int ones = bias ? image_space() * element : 0;
      return all_columns() + ones + parts(image());
    }
    return (pointwise() ? 0 : all_columns()) + parts(result());
  }
  // Leaves the gradient.
  void torchs_input_gradient(Held& held) const {
    held.take(transposed ? result() : image());
    if (dim() == 3 || transposed) held.touch(all_columns());
  }
  Int torchs_weight_columns() const {
    return pointwise() && !transposed ? 0 : all_columns();
  }

  // ---- oneDNN's ----

  // Half precision goes in pairs.
  Int paired(Int channels) const {
    return element == 2 ? up(channels, 2) : channels;
  }
  // brgemm's list of products, in each thread.
  static constexpr Int kProduct = 40;  // sizeof(brgemm_batch_element_t)
  Int product_list() const {
    return threads * up(up(kernel() * kProduct, kPage), kProduct);
  }
  Int small_buffers() const { return kPage + product_list(); }
  // A bias whose blocks are padded.
  Int padded_bias() const {
    const Int channels = transposed ? image_channels : result_channels;
    if (!bias || transposed || channels % 16 == 0) return 0;
    return blocked(channels) * kFloat + 128;
  }
  // A strided 1x1 kernel first drops what it skips (rtus), in each thread.
  Int unit_stride() const {
    if (kernel() != 1 || !strided() || dim() == 3) return 0;
    return threads * std::min(image_space(), result_space()) *
               blocked(image_channels) * element +
           128;
  }
  // A 1x1 kernel in half precision sums an image in float32, in each thread.
  Int half_sums(Int channels, Int space) const {
    if (element != 2 || kernel() != 1) return 0;
    return threads * blocked(channels) * space * kFloat + 8192;
  }
  // brgconv_strided copies the result with what its kernel overhangs, in each
  // thread, beside a list of products and a mask; each in whole pages
  // (init_scratchpad of brgemm_convolution_bwd_utils).
  Int strided_buffers() const {
    Int space = 1;
    for (const Slide& slide : slides) space *= slide.result + slide.overhang();
    const Int copy = up(space * result_channels, kPage) * element;
    return 3 * kPage + product_list() + threads * (copy + kPage);
  }
  // A copy with channels last; the same bytes where there is but one channel,
  // or one pixel.
  static Int to_channels_last(Int bytes, Int channels, Int space) {
    return channels == 1 || space == 1 ? 0 : bytes;
  }
  // What came out with channels last, as `bytes` that are held, becomes dense
  // in torch's order.
  static void from_channels_last(Held& held, Int size, Int channels,
                                 Int space) {
    const bool same = to_channels_last(size, channels, space) == 0;
    held.touch(same ? size : 2 * size);
  }
  Int gemm_columns() const { return threads * columns() + 128; }

  // oneDNN's forward: of a convolution, or of a transposed one's gradient.
  // Leaves the result.
  void result_from_image(Held& held, bool forward) const {
    if (channels_last) {
      held.touch(result() + result_channels_last(forward));
    } else if (!groups_fill_blocks()) {
      held.touch(gemm_columns() + result());
      held.touch(2 * result());
    } else if (depthwise() && dim() == 3) {
      held.touch(image() + weight() + result());
      held.touch(3 * result());
    } else {
      const Int channels = paired(image_channels);
      const Int read = few_channels() ? 0 : image_blocked();
      const Int kernels = few_channels() ? blocked(result_channels) * channels *
                                               kernel() * element
                                         : weight_blocked();
      held.touch(read + kernels + result_blocked() + unit_stride() +
                 half_sums(result_channels, result_space()) +
                 (forward ? padded_bias() : 0));
      held.touch(result_blocked() + result());
    }
    held.take(result());
  }

  // What it takes beside the result.
  Int result_channels_last(bool forward) const {
    if (!forward) return weight_blocked() + small_buffers();
    if (depthwise()) return blocked(groups) * kernel() * element;
    // Many or uneven channels come in blocks of 48.
    const bool wide = result_channels >= 512 ||
                      (result_channels > 64 && result_channels % 32 != 0);
    const Int channels =
        wide ? up(result_channels, 48) : blocked(result_channels);
    return channels * paired(image_channels) / groups * kernel() * element +
           small_buffers() + half_sums(result_channels, result_space()) +
           (element == 2 ? unit_stride() : 0);
  }

  // oneDNN's gradient by the image: of a convolution, or a transposed one's
  // forward. Leaves the image.
  void image_from_result(Held& held, bool forward) const {
    const bool by_stride = strided() && groups == 1;
    // A bias is added to a second copy of the image.
    const Int sums = forward && bias ? image_blocked() + 128 : 0;
    if (channels_last) {
      const Int weights =
          weight_blocked() +
          (forward ? 0 : half_sums(image_channels, image_space()));
      held.touch(image() + weights + (forward ? 128 : 0) +
                 (by_stride ? strided_buffers() : small_buffers()));
    } else if (!groups_fill_blocks() || (depthwise() && dim() == 3)) {
      held.touch(image() + gemm_columns());
      held.touch(2 * image());
    } else if (by_stride || (forward && strided() && !depthwise())) {
      const Int weights = blocked(image_channels) * paired(result_channels) /
                          groups * kernel() * element;
      held.touch(to_channels_last(result(), result_channels, result_space()) +
                 weights + image() + strided_buffers() + (forward ? 128 : 0));
      held.take(image());
      from_channels_last(held, image(), image_channels, image_space());
      return;
    } else {
      held.touch(result_blocked() + weight_blocked() + image_blocked() + sums +
                 half_sums(image_channels, image_space()) + unit_stride());
      held.touch(image_blocked() + image());
    }
    held.take(image());
  }

  // The kernels that read images of 4 to 15 channels, or groups of 8, are for
  // one and two dimensions, and volumes must be deeper than what pads them.
  bool weight_by_gemm() const {
    if (!groups_fill_blocks()) return true;
    if (depthwise()) return any_side_above(3) || dim() == 3;
    if (slides.back().kernel > 14) return true;
    if (dim() < 3) return false;
    const Slide& depth = slides[0];
    if (depth.padding > 0 && depth.kernel >= depth.image + depth.padding) {
      return true;
    }
    return (few_channels() && image_channels > 3) ||
           (groups > 1 && (image_channels / groups % 16 != 0 ||
                           result_channels / groups % 16 != 0));
  }

  // oneDNN's gradient by the weight. Leaves it, and the bias's.
  void weight_from_both(Held& held) const {
    const Int plain = weight() + (bias ? 2 * result_channels * element : 0);
    if (weight_by_gemm() && !(channels_last && depthwise()) && element != 2) {
      // A product of matrices, from columns; nothing is reordered.
      const Int copies = std::min(threads, batch * groups) *
                         (4 * weight() + (channels_last ? 2 : 1) * columns());
      held.touch(weight() + copies + 384 +
                 (bias ? result_channels * element : 0));
      held.touch(weight() + plain);
      return;
    }
    Int read = image_blocked(), made = result_blocked();
    Int weights = weight_blocked();
    if (few_channels()) {
      // Channels as they are, or in blocks of 8.
      const bool as_is = image_channels <= 3;
      const Int channels = as_is ? image_channels : up(image_channels, 8);
      read = as_is ? 0 : batch * channels * image_space() * element;
      weights = blocked(result_channels) * channels * kernel() * element;
    } else if (depthwise() && channels_last && any_side_above(3)) {
      weights = groups * 16 * 16 * kernel() * element;
    }
    const Int copies_of_weight = groups > 1 ? 1 : sharing();
    Int reduction = padded_bias() + unit_stride();
    if (element == 2) {
      // In float32, from transposed images; an upper bound.
      reduction += threads * (any_side_above(14) ? 4 : 2) * weights + 16384 +
                   threads * (image_blocked() + result_blocked()) /
                       std::max<Int>(batch, 1) * 9 / 8;
    } else if (copies_of_weight > 1) {
      reduction += (copies_of_weight - (kernel() == 1 ? 0 : 1)) * weights +
                   threads * 4352;
    }
    if (channels_last) {
      held.touch(weights + std::max(reduction, plain + weight()));
    } else {
      held.touch(weights + read + made + reduction);
      held.touch(weights + plain);
    }
  }
};

// Dense as NCHW or NHWC, whichever the call works in.
Int layout_copy(const Tensor& t, bool channels_last) {
  if (channels_last ? t.channels_last() : t.contiguous()) return 0;
  return t.bytes();
}

}  // namespace

Result convolution(const Call& call) {
  const Tensor& in = call.in.at(0);
  auto shape = ConvolutionShape::of(call, in, call.in.at(1), call.out.at(0));
  if (!shape) return {};
  shape->bias = call.in.size() > 2;
  return Convolution(*shape).forward() + layout_copy(in, shape->channels_last) +
         layout_copy(call.in.at(1), shape->channels_last);
}

Result convolution_backward(const Call& call) {
  const Tensor& grad = call.in.at(0);
  const Tensor& in = call.in.at(1);
  const Tensor& weight = call.in.at(2);
  auto shape = ConvolutionShape::of(call, in, weight, grad);
  if (!shape) return {};
  // Which gradients were asked for is seen from the outputs' shapes.
  Int outputs = 0, large = 0;
  for (const Tensor& out : call.out) {
    outputs += out.bytes();
    if (out.dim() == 1) {
      shape->bias = true;
    } else {
      ++large;
    }
  }
  const bool needs_input =
      large == 2 ||
      (large == 1 && std::ranges::equal(call.out[0].sizes(), in.sizes()) &&
       !std::ranges::equal(in.sizes(), weight.sizes()));
  const bool needs_weight = large == 2 || (large == 1 && !needs_input);
  return Convolution(*shape).backward(needs_input, needs_weight, outputs) +
         layout_copy(grad, shape->channels_last) +
         layout_copy(in, shape->channels_last) +
         layout_copy(weight, shape->channels_last);
}

}  // namespace memscale::scratch
