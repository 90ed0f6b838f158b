#pragma once

#include <optional>
#include <vector>

#include "memscale/core/ops/workspace/formulas.h"

namespace memscale::scratch {

// One dimension of the space that a kernel slides over.
struct Slide {
  Int image;   // elements of the larger side
  Int result;  // elements of the smaller side, one for each place of the kernel
  Int kernel;
  Int stride;
  Int padding;  // before the first element

  // How many places of the kernel reach beyond the result where a gradient of
  // the image is gathered.
  Int overhang() const;
};

// Note [One convolution in both directions]
// A transposed convolution is the gradient by the image of a plain one: its
// forward runs that one's backward kernel, and its gradient by the input runs
// that one's forward kernel. So all shapes here are those of the plain
// convolution: the kernel slides over an `image` and makes a `result`. Of a
// transposed one, the input is the result and the output is the image.
//
// Ops carry no scalars. Stride and padding are the smallest stride, and the
// largest padding with it, that give these sizes, without a rest if that can
// be; a dilation is not seen.
struct ConvolutionShape {
  Int batch = 1, groups = 1;
  Int image_channels = 0, result_channels = 0;
  Int element = 4, threads = 1;
  std::vector<Slide> slides;  // one, two or three
  bool transposed = false;
  bool channels_last = false;
  bool bias = false;

  // Nothing if the shapes are not those of a convolution of one to three
  // dimensions. `in` and `out` are those of the op's forward.
  static std::optional<ConvolutionShape> of(const Call& call, const Tensor& in,
                                            const Tensor& weight,
                                            const Tensor& out);

  // Channels as oneDNN's blocks of 16 hold them.
  static Int blocked(Int channels) { return up(channels, 16); }

  Int dim() const { return static_cast<Int>(slides.size()); }
  Int kernel() const;
  Int image_space() const;
  Int result_space() const;
  bool strided() const;
  bool depthwise() const {
    return groups > 1 && groups == image_channels && groups == result_channels;
  }
  // The first layer of a network: its few channels are read as they are.
  bool few_channels() const {
    return image_channels < 16 && kernel() > 1 && groups == 1;
  }
  // Whether channels of a group fill blocks of 8; depthwise ones have kernels
  // of their own.
  bool groups_fill_blocks() const {
    return groups == 1 || depthwise() ||
           (image_channels / groups % 8 == 0 &&
            result_channels / groups % 8 == 0);
  }
  bool any_side_above(Int sides) const;

  // Bytes.
  Int image() const { return batch * image_channels * image_space() * element; }
  Int result() const {
    return batch * result_channels * result_space() * element;
  }
  Int weight() const {
    return image_channels * result_channels / groups * kernel() * element;
  }
  Int image_blocked() const {
    return batch * blocked(image_channels) * image_space() * element;
  }
  Int result_blocked() const {
    return batch * blocked(result_channels) * result_space() * element;
  }
  Int weight_blocked() const;
  // Patches of one image of one group, as a matrix; of a volume, those of one
  // slice.
  Int columns() const;

  // How many threads share one gradient of the weight: oneDNN's balance of
  // threads over images and channels (balance() of jit_avx512_core backward by
  // weights). Each has a copy, so that a guess would be off by whole weights.
  Int sharing() const;

  // Whether torch computes it itself, from columns (ConvParams::use_mkldnn).
  bool is_torchs() const;
};

}  // namespace memscale::scratch
