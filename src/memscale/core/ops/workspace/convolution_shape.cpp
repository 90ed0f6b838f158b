#include "memscale/core/ops/workspace/convolution_shape.h"

#include <algorithm>

namespace memscale::scratch {
namespace {

// The smallest stride, and the largest padding with it, for which a kernel
// makes `result` of `image`; first those that leave no rest. See
// Note [One convolution in both directions].
Slide slide_of(Int image, Int result, Int kernel) {
  // One place only, as where images were cut into patches of their own size.
  if (image == kernel && result == 1) return {image, 1, kernel, kernel, 0};
  for (const bool rest_allowed : {false, true}) {
    for (Int stride = 1; stride <= image; ++stride) {
      for (Int padding = kernel / 2; padding >= 0; --padding) {
        const Int room = image + 2 * padding - kernel;
        if (room >= 0 && room / stride + 1 == result &&
            (rest_allowed || room % stride == 0)) {
          return {image, result, kernel, stride, padding};
        }
      }
    }
  }
  // Uneven padding, or a dilation.
  const Int stride = std::max<Int>(1, image / std::max<Int>(result, 1));
  return {image, result, kernel, stride, kernel / 2};
}

}  // namespace

Int Slide::overhang() const {
  const Int before = std::max<Int>(0, kernel - 1 - padding) / stride;
  const Int end =
      std::max<Int>(0, (result - 1) * stride + kernel - image - padding);
  return before + std::max<Int>(0, kernel - 1 - end) / stride;
}

std::optional<ConvolutionShape> ConvolutionShape::of(const Call& call,
                                                     const Tensor& in,
                                                     const Tensor& weight,
                                                     const Tensor& out) {
  const bool fits = in.dim() >= 3 && in.dim() <= 5 &&
                    weight.dim() == in.dim() && out.dim() == in.dim();
  if (!fits || in.numel() == 0 || weight.numel() == 0) return {};
  const bool plain =
      weight.size(0) == out.size(1) && in.size(1) % weight.size(1) == 0;
  const bool swapped =
      weight.size(0) == in.size(1) && out.size(1) % weight.size(1) == 0;
  if (!plain && !swapped) return {};
  ConvolutionShape c;
  c.transposed = swapped && (!plain || call.transposed);
  const Tensor& image = c.transposed ? out : in;
  const Tensor& result = c.transposed ? in : out;
  c.batch = in.size(0);
  c.image_channels = image.size(1);
  c.result_channels = result.size(1);
  c.groups = c.image_channels / weight.size(1);
  if (c.groups == 0) return {};
  for (Int d = 2; d < weight.dim(); ++d) {
    c.slides.push_back(slide_of(image.size(d), result.size(d), weight.size(d)));
  }
  c.element = in.element();
  c.threads = call.threads;
  c.channels_last =
      in.suggests_channels_last() || weight.suggests_channels_last();
  return c;
}

Int ConvolutionShape::kernel() const {
  Int product = 1;
  for (const Slide& slide : slides) product *= slide.kernel;
  return product;
}

Int ConvolutionShape::image_space() const {
  Int product = 1;
  for (const Slide& slide : slides) product *= slide.image;
  return product;
}

Int ConvolutionShape::result_space() const {
  Int product = 1;
  for (const Slide& slide : slides) product *= slide.result;
  return product;
}

bool ConvolutionShape::strided() const {
  return std::ranges::any_of(slides,
                             [](const Slide& s) { return s.stride > 1; });
}

bool ConvolutionShape::any_side_above(Int sides) const {
  return std::ranges::any_of(slides,
                             [&](const Slide& s) { return s.kernel > sides; });
}

Int ConvolutionShape::weight_blocked() const {
  if (depthwise()) return blocked(groups) * kernel() * element;
  if (groups > 1) return weight();
  return blocked(image_channels) * blocked(result_channels) * kernel() *
         element;
}

Int ConvolutionShape::columns() const {
  const Int slice =
      dim() == 3 ? slides[1].result * slides[2].result : result_space();
  return image_channels / groups * kernel() * slice * element;
}

Int ConvolutionShape::sharing() const {
  const Int kernel = this->kernel();
  const Int in_blocks = div_up(image_channels, 16);
  const Int out_blocks = div_up(result_channels, 16);
  // Rows of images are shared out (of volumes, slices); a 1x1 kernel's pixels.
  const Int rows = dim() > 1 ? slides[0].result : 1;
  const Int pieces = std::max<Int>(1, kernel == 1 ? result_space() : rows);
  const Int shares = batch * pieces;
  const Int in_piece = (kernel == 1 ? result_space() : image_space()) / pieces /
                       (strided() && kernel > 1 ? 4 : 1);
  const Int out_piece = result_space() / pieces;
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

bool ConvolutionShape::is_torchs() const {
  if (element == 8) return true;
  if (element == 2) return false;
  // A kernel of one dimension is one of two with a side of 1.
  const Int last = slides.back().kernel;
  const Int before = dim() > 1 ? slides[slides.size() - 2].kernel : 1;
  if (last == 1 && before == 1 && !strided() && batch < 16 && threads == 1) {
    return true;
  }
  // The sizes of the input's first four dimensions are asked for, its batch
  // of 1 among them.
  Int first_four = transposed ? result_channels : image_channels;
  for (std::size_t d = 0; d < std::min<std::size_t>(slides.size(), 2); ++d) {
    first_four *= transposed ? slides[d].result : slides[d].image;
  }
  return batch == 1 && groups == 1 && !(last > 3 && before > 3) &&
         first_four <= 20480;
}

}  // namespace memscale::scratch
