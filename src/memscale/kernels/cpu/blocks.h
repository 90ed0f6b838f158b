#pragma once

// decode() and encode() of blocks: codec_tables.h or codec_vectors.h.
#include MEMSCALE_CODEC_LOOPS

// Blocks to and from codes, on the CPU. Anonymous: see codec.h.

namespace memscale::kernels {
namespace {

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

// Codes of a block from its values and scale.
template <Map map>
inline void encode_block(const float* __restrict values,
                         const BlockScale& scale, std::size_t size,
                         std::uint8_t* __restrict codes, float* absmax) {
  *absmax = scale.absmax;
  if (scale.inverse != 0) {
    encode<map>(values, scale.inverse, size, codes);
  } else {
    const std::uint8_t zero = map == Map::Signed ? kSignedZero : kUnsignedZero;
    for (std::size_t i = 0; i < size; ++i) codes[i] = zero;
  }
}

template <Map map>
inline void quantise_block(const float* __restrict values, std::size_t size,
                           std::uint8_t* __restrict codes, float* absmax) {
  const BlockScale scale = block_scale(largest_magnitude(values, size));
  encode_block<map>(values, scale, size, codes, absmax);
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
  for (; count >= kBlock; count -= kBlock) {
    decode<map>(codes, *absmax++, kBlock, values);
    codes += kBlock;
    values += kBlock;
  }
  if (count > 0) decode<map>(codes, *absmax, count, values);
}

}  // namespace
}  // namespace memscale::kernels
