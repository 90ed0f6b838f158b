#include <algorithm>

#include "memscale/core/ops/workspace/formulas.h"

// Convolutions of one and two dimensions.

namespace memscale::scratch {
namespace {

// Note [Convolutions on the CPU]
// oneDNN computes in its own layouts: channels in blocks of 16 (padded). So
// input, weight and result each exist twice for a while: reordered into blocks
// before, and back after. Tensors in channels_last are taken as they are, but
// weights. If the result comes out as NHWC where NCHW is asked for (strided
// gradients of inputs), it is copied once more. A gradient of weights that
// threads compute from different images is reduced from one copy for each.
struct Convolution {
  Int batch, in_channels, out_channels, groups, kernel, in_space, out_space;
  Int element, threads;
  bool large_kernel = true;  // every side > 3
  bool wide_kernel = false;  // some side > 3
  bool patches = false;      // some side > 14
  Int out_rows = 1;
  Int border = 0;  // elements around an image that the kernel reaches beyond
  bool strided = false;
  bool transposed = false;
  bool channels_last = false;
  bool bias = false;

  // Nothing if the shapes are not those of a convolution.
  static std::optional<Convolution> of(const Call& call, const Tensor& in,
                                       const Tensor& weight,
                                       const Tensor& out) {
    // One or two dimensions; those of three take other kernels.
    const bool image = (in.dim() == 3 || in.dim() == 4) &&
                       weight.dim() == in.dim() && out.dim() == in.dim();
    if (!image || in.numel() == 0 || weight.numel() == 0) return {};
    Convolution c{};
    c.batch = in.size(0);
    c.in_channels = in.size(1);
    c.out_channels = out.size(1);
    c.kernel = weight.product(2);
    c.in_space = in.product(2);
    c.out_space = out.product(2);
    c.element = in.element();
    c.threads = call.threads;
    c.large_kernel = weight.dim() == 4;
    if (weight.dim() == 4) c.out_rows = out.size(2);
    bool grows = false;
    for (Int d = 2; d < weight.dim(); ++d) {
      const Int side = weight.size(d);
      const Int longer = std::max(in.size(d), out.size(d));
      const Int shorter = std::min(in.size(d), out.size(d));
      if (side <= 3) c.large_kernel = false;
      if (side > 3) c.wide_kernel = true;
      if (side > 14) c.patches = true;
      if (shorter * side != longer) c.border += (shorter + 2) * (side - 1);
      // With a stride of 1, the result is at most a kernel smaller.
      const bool strided =
          shorter < longer - (side - 1) && shorter * 2 <= longer + side;
      if (strided) c.strided = true;
      if (out.size(d) > in.size(d) + (strided ? 0 : side + 1)) grows = true;
    }
    const bool plain =
        weight.size(0) == c.out_channels && c.in_channels % weight.size(1) == 0;
    const bool swapped =
        weight.size(0) == c.in_channels && c.out_channels % weight.size(1) == 0;
    if (!plain && !swapped) return {};
    c.transposed = swapped && (!plain || grows);
    c.groups = (c.transposed ? c.out_channels : c.in_channels) / weight.size(1);
    if (c.groups == 0) return {};
    c.channels_last = (in.channels_last() && !in.contiguous()) ||
                      (weight.channels_last() && !weight.contiguous());
    return c;
  }

  // Channels as blocks hold them.
  static Int blocked(Int channels) { return up(channels, 16); }
  bool depthwise() const {
    return groups > 1 && groups == in_channels && groups == out_channels;
  }

  Int in_bytes() const { return batch * in_channels * in_space * element; }
  Int out_bytes() const { return batch * out_channels * out_space * element; }
  Int weight_bytes() const {
    return in_channels * out_channels / groups * kernel * element;
  }
  Int in_blocked() const {
    return batch * blocked(in_channels) * in_space * element;
  }
  Int out_blocked() const {
    return batch * blocked(out_channels) * out_space * element;
  }
  Int weight_blocked() const {
    if (depthwise()) return blocked(groups) * kernel * element;
    if (groups > 1) return weight_bytes();
    return blocked(in_channels) * blocked(out_channels) * kernel * element;
  }
  // Half precision goes in pairs.
  Int weight_channels() const {
    return element == 2 ? up(in_channels, 2) : in_channels;
  }
  // brgemm's batches and buffers.
  Int small_buffers() const { return threads * 6144 + 48; }

  // ConvParams::use_mkldnn
  bool slow() const {
    if (element == 8) return true;
    if (element == 2) return false;
    if (kernel == 1 && !strided && batch < 16 && threads == 1) return true;
    return batch == 1 && groups == 1 && !large_kernel &&
           in_channels * in_space <= 20480;
  }
  // Image patches as columns of a matrix; groups are put together at the end.
  Int columns() const {
    const Int parts = groups > 1 ? out_bytes() : 0;
    if (transposed) {
      return batch * out_channels / groups * kernel * in_space * element +
             parts;
    }
    if (kernel == 1 && !strided) return parts;
    return batch * in_channels / groups * kernel * out_space * element + parts;
  }
  // A strided 1x1 kernel first drops what it skips (rtus), in each thread.
  Int unit_stride() const {
    if (kernel != 1 || !strided) return 0;
    return threads * std::min(in_space, out_space) * blocked(in_channels) *
               element +
           320;
  }
  // A strided gradient copies an image of its source with a border, in each
  // thread (brgconv_strided). For a transposed convolution, that is forward.
  Int strided_buffers() const {
    const Int sources = transposed ? in_channels : out_channels;
    const Int targets = transposed ? out_channels : in_channels;
    const Int space = transposed ? in_space : out_space;
    const Int fixed = 30720 + 18432 * std::min<Int>(4, div_up(targets, 16));
    return threads * (fixed + (space + border) * sources * element);
  }
  // A 1x1 kernel in half precision sums an image in float32, in each thread.
  Int half_sums(Int channels, Int space) const {
    if (element != 2 || kernel != 1) return 0;
    return threads * blocked(channels) * space * kFloat + 8192;
  }

  Int forward() const {
    if (slow()) return columns();
    if (transposed) return transposed_forward();
    if (channels_last) {
      if (depthwise()) return blocked(groups) * kernel * element;
      // Many or uneven channels come in blocks of 48.
      const bool wide =
          out_channels >= 512 || (out_channels > 64 && out_channels % 32 != 0);
      const Int channels = wide ? up(out_channels, 48) : blocked(out_channels);
      return channels * weight_channels() / groups * kernel * element +
             small_buffers() + half_sums(out_channels, out_space) +
             (element == 2 ? unit_stride() : 0);
    }
    // The first layer's few channels are read as they are.
    const bool first = in_channels < 16 && kernel > 1 && groups == 1;
    const Int input = first ? 0 : in_blocked();
    const Int weight =
        first ? blocked(out_channels) * weight_channels() * kernel * element
              : weight_blocked();
    const Int computing = input + weight + out_blocked() - out_bytes() +
                          unit_stride() + half_sums(out_channels, out_space) +
                          (bias && out_channels % 16 != 0 ? 256 : 0);
    return std::max(computing, out_blocked());
  }

  Int transposed_forward() const {
    // A bias is added to a second copy of the result.
    const Int sums = bias ? out_blocked() + 128 : 0;
    if (channels_last) {
      return weight_blocked() +
             (strided ? strided_buffers() + sums : small_buffers() + 128);
    }
    if (strided) {
      const Int nhwc = in_bytes() + weight_blocked() + strided_buffers();
      return std::max(nhwc + sums, 2 * out_bytes());
    }
    const Int computing =
        in_blocked() + weight_blocked() + out_blocked() + sums - out_bytes();
    return std::max(computing, out_blocked());
  }

  // How many threads share one gradient of the weight: oneDNN's balance of
  // threads over images and channels (balance() of jit_avx512_core backward by
  // weights). Each has a copy, so that a guess would be off by whole weights.
  Int sharing() const {
    const Int in_blocks = div_up(in_channels, 16);
    const Int out_blocks = div_up(out_channels, 16);
    // Rows of images are shared out; a 1x1 kernel's pixels.
    const Int pieces = std::max<Int>(1, kernel == 1 ? out_space : out_rows);
    const Int shares = batch * pieces;
    const Int in_piece = (kernel == 1 ? out_space : in_space) / pieces /
                         (strided && kernel > 1 ? 4 : 1);
    const Int out_piece = out_space / pieces;
    struct Split {
      Int images, outs, ins;
    };
    const auto memory = [&](Split s) {
      const Int share = div_up(shares, s.images);
      const Int outs = div_up(out_blocks, s.outs);
      const Int ins = div_up(in_blocks, s.ins);
      return share * 16 * (ins * in_piece + outs * out_piece) +
             (kernel == 1 ? 12 : 8) * outs * ins * kernel * 256;
    };
    const auto work = [&](Split s) {
      return div_up(shares, s.images) * div_up(out_blocks, s.outs) *
             div_up(in_blocks, s.ins);
    };
    const auto each_split = [&](auto&& visit) {
      for (Int images = 1; images <= std::min(threads, shares); ++images) {
        const Int rest = threads / images;
        for (Int outs = 1; outs <= std::min(rest, out_blocks); ++outs) {
          visit(Split{images, outs, std::min(rest / outs, in_blocks)});
        }
      }
    };
    Split best{1, 1, 1};
    each_split([&](Split s) {
      if (memory(s) <= memory(best)) best = s;
    });
    // Less work is worth a tenth more memory; much less work, any.
    const Int least = memory(best);
    each_split([&](Split s) {
      if ((work(s) <= work(best) && 10 * memory(s) < 11 * least) ||
          4 * work(s) <= 3 * work(best)) {
        best = s;
      }
    });
    return best.images;
  }

  // `outputs`: the bytes of the gradients, which are no scratch.
  Int backward(bool needs_input, Int outputs) const {
    if (slow()) return columns();
    const Int grad_input = needs_input ? in_bytes() : 0;
    const Int peak =
        std::max(needs_input ? by_input() : 0, grad_input + by_weight());
    return std::max<Int>(0, peak - outputs);
  }

  // The peak while the gradient of the input is computed, that included.
  Int by_input() const {
    const Int weight = weight_blocked() + half_sums(in_channels, in_space);
    const bool nhwc = strided && !transposed && groups == 1;
    if (channels_last) {
      return in_bytes() + weight + (nhwc ? strided_buffers() : small_buffers());
    }
    const Int in_blocks =
        std::max(out_blocked() + weight + in_blocked() + unit_stride(),
                 in_blocked() + in_bytes());
    if (!nhwc) return in_blocks;
    // Both exist for 1x1 kernels.
    return std::max({kernel == 1 ? in_blocks : 0, 3 * in_bytes(),
                     out_bytes() + in_bytes() + weight + strided_buffers()});
  }

  // The peak while that of the weight is, without that of the input.
  Int by_weight() const {
    Int input = in_blocked(), output = out_blocked();
    Int weight = weight_blocked();
    const bool first =
        in_channels < 16 && kernel > 1 && groups == 1 && !transposed;
    if (first) {
      // The first layer: channels as they are, or in blocks of 8.
      const bool as_is = in_channels <= 3;
      const Int channels = as_is ? in_channels : up(in_channels, 8);
      input = as_is ? 0 : batch * channels * in_space * element;
      weight = blocked(out_channels) * channels * kernel * element;
    } else if (depthwise() && channels_last) {
      weight = groups * 16 * 16 * kernel * element;
    } else if (depthwise() && wide_kernel) {
      // A product of matrices, from columns; nothing is reordered.
      const Int columns = kernel * out_space * element;
      return weight_bytes() + threads * (4 * weight_bytes() + columns) + 256;
    }
    const Int copies_of_weight = groups > 1 ? 1 : sharing();
    Int reduction =
        (bias && out_channels % 16 != 0 ? 21504 : 0) + unit_stride();
    if (first) reduction += threads * 6144;
    if (element == 2) {
      // In float32, from transposed images; an upper bound.
      reduction += threads * (patches ? 4 : 2) * weight + 16384 +
                   threads * (in_blocked() + out_blocked()) /
                       std::max<Int>(batch, 1) * 9 / 8;
    } else if (first && patches) {
      // A product of matrices, from columns; nothing is reordered.
      input = output = 0;
      weight = weight_bytes();
      const Int columns = in_channels * kernel * out_space * element;
      reduction +=
          std::min(threads, batch) *
          (4 * weight_bytes() + (channels_last ? 2 : 1) * columns + 256);
    } else if (copies_of_weight > 1) {
      reduction +=
          (copies_of_weight - (kernel == 1 ? 0 : 1)) * weight + threads * 4352;
    }
    const Int plain = weight_bytes() + (bias ? 2 * out_channels * element : 0);
    if (channels_last) {
      return weight + std::max(reduction, plain + weight_bytes());
    }
    return weight + std::max(input + output + reduction, plain);
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
  auto c = Convolution::of(call, in, call.in.at(1), call.out.at(0));
  if (!c) return {};
  c->bias = call.in.size() > 2;
  return c->forward() + layout_copy(in, c->channels_last);
}

Result convolution_backward(const Call& call) {
  const Tensor& grad = call.in.at(0);
  const Tensor& in = call.in.at(1);
  const Tensor& weight = call.in.at(2);
  auto c = Convolution::of(call, in, weight, grad);
  if (!c) return {};
  // Groups of few channels take other kernels.
  const bool whole_blocks = c->in_channels / c->groups % 16 == 0 &&
                            c->out_channels / c->groups % 16 == 0;
  if (c->groups > 1 && !c->depthwise() && !whole_blocks) return {};
  Int outputs = 0;
  for (const Tensor& out : call.out) {
    outputs += out.bytes();
    if (out.dim() == 1) c->bias = true;
  }
  // Which gradients were asked for is seen from the outputs' shapes.
  const bool needs_input =
      !call.out.empty() &&
      std::ranges::equal(call.out[0].sizes(), in.sizes()) &&
      !(call.out.size() == 1 && std::ranges::equal(in.sizes(), weight.sizes()));
  return c->backward(needs_input, outputs) +
         layout_copy(grad, c->channels_last) +
         layout_copy(in, c->channels_last);
}

}  // namespace memscale::scratch
