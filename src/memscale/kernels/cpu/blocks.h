#pragma once

#include "memscale/kernels/codec.h"
#include "memscale/kernels/element.h"

// Blocks to and from codes, on the CPU. Arithmetic and look-ups are loops of
// their own: the former vectorise, the latter are quickest as plain byte loads
// (gathers were measured slower). Anonymous: see codec.h.

namespace memscale::kernels {
namespace {

// values[i] is the code's value, not yet multiplied by absmax.
inline void look_up(const Codec& codec, const std::uint8_t* __restrict codes,
                    std::size_t size, float* __restrict values) {
  for (std::size_t i = 0; i < size; ++i) values[i] = codec.values[codes[i]];
}

inline std::uint32_t largest_magnitude(const float* __restrict values,
                                       std::size_t size) {
  // As integers: magnitudes order as their bits do, and NaN is the largest.
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const std::uint32_t bits = magnitude_bits(values[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Codes of values[i] * inverse.
template <Map map>
inline void encode(const float* __restrict values, float inverse,
                   std::size_t size, std::uint8_t* __restrict codes) {
  if (inverse == 0) {
    const std::uint8_t zero = map == Map::Signed ? kSignedZero : kUnsignedZero;
    for (std::size_t i = 0; i < size; ++i) codes[i] = zero;
    return;
  }
  const Codec& codec = map == Map::Signed ? kSignedCodec : kUnsignedCodec;
  alignas(64) std::uint32_t bits[kBlock];
  alignas(64) std::uint16_t buckets[kBlock];
  alignas(64) std::uint8_t steps[kBlock];
  for (std::size_t i = 0; i < size; ++i) {
    const float x = values[i] * inverse;
    bits[i] = map == Map::Signed ? magnitude_bits(x) : (x > 0 ? bits_of(x) : 0);
    buckets[i] = static_cast<std::uint16_t>(bucket_of(bits[i]));
  }
  for (std::size_t i = 0; i < size; ++i) {
    steps[i] = static_cast<std::uint8_t>(steps_of(codec, buckets[i], bits[i]));
  }
  for (std::size_t i = 0; i < size; ++i) {
    codes[i] =
        map == Map::Signed ? signed_code(steps[i], values[i] < 0) : steps[i];
  }
}

template <Map map>
inline void quantise_block(const float* __restrict values, std::size_t size,
                           std::uint8_t* __restrict codes, float* absmax) {
  const BlockScale scale = block_scale(largest_magnitude(values, size));
  *absmax = scale.absmax;
  encode<map>(values, scale.inverse, size, codes);
}

template <Map map>
void quantise(const float* values, std::size_t count, std::uint8_t* codes,
              float* absmax) {
  std::size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    quantise_block<map>(values + i, kBlock, codes + i, absmax++);
  }
  if (i < count) quantise_block<map>(values + i, count - i, codes + i, absmax);
}

template <Map map>
void dequantise(const std::uint8_t* codes, const float* absmax,
                std::size_t count, float* values) {
  const Codec& codec = map == Map::Signed ? kSignedCodec : kUnsignedCodec;
  for (std::size_t i = 0; i < count; i += kBlock) {
    const std::size_t size = count - i < kBlock ? count - i : kBlock;
    const float scale = *absmax++;
    look_up(codec, codes + i, size, values + i);
    for (std::size_t j = 0; j < size; ++j) values[i + j] *= scale;
  }
}

}  // namespace
}  // namespace memscale::kernels
