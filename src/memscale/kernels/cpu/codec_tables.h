#pragma once

#include "memscale/kernels/codec.h"
#include "memscale/kernels/element.h"

// Blocks to and from codes by tables: on CPUs without quick look-ups inside
// vectors, and for what is not a whole block. Arithmetic and look-ups are loops
// of their own, as only the former vectorise. Anonymous: see codec.h.

namespace memscale::kernels {
namespace {

template <Map map>
constexpr const Codec& codec_of() {
  return map == Map::Signed ? kSignedCodec : kUnsignedCodec;
}

// values[i] = the value of codes[i] times absmax.
template <Map map>
inline void decode_by_tables(const std::uint8_t* __restrict codes, float absmax,
                             std::size_t size, float* __restrict values) {
  for (std::size_t i = 0; i < size; ++i) {
    values[i] = codec_of<map>().values[codes[i]];
  }
  for (std::size_t i = 0; i < size; ++i) values[i] *= absmax;
}

// codes[i] = the code of values[i] * inverse. All values are finite.
template <Map map>
inline void encode_by_tables(const float* __restrict values, float inverse,
                             std::size_t size, std::uint8_t* __restrict codes) {
  alignas(64) std::uint32_t bits[kBlock];
  alignas(64) std::uint16_t buckets[kBlock];
  alignas(64) std::uint8_t steps[kBlock];
  for (std::size_t i = 0; i < size; ++i) {
    const float x = values[i] * inverse;
    bits[i] = map == Map::Signed ? magnitude_bits(x) : (x > 0 ? bits_of(x) : 0);
    buckets[i] = static_cast<std::uint16_t>(bucket_of(bits[i]));
  }
  for (std::size_t i = 0; i < size; ++i) {
    steps[i] = static_cast<std::uint8_t>(
        steps_of(codec_of<map>(), buckets[i], bits[i]));
  }
  for (std::size_t i = 0; i < size; ++i) {
    codes[i] =
        map == Map::Signed ? signed_code(steps[i], values[i] < 0) : steps[i];
  }
}

}  // namespace
}  // namespace memscale::kernels
