#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "memscale/kernels/adam.h"
#include "memscale/kernels/blockwise.h"
#include "memscale/kernels/device.h"
#include "memscale/kernels/floats.h"

// What is done to one element, without branches, so that loops over it
// vectorise; shared by the CPU levels and CUDA. Anonymous: see codec.h.

namespace memscale::kernels {
namespace {

constexpr std::uint32_t kInfinityBits = 0x7F800000U;
constexpr std::uint32_t kNanBits = 0x7FC00000U;
constexpr std::uint32_t kHalfBits = 0x3F000000U;
constexpr std::uint32_t kSmallestNormalBits = 0x00800000U;

MEMSCALE_DEVICE inline std::uint32_t bits_of(float x) {
  return std::bit_cast<std::uint32_t>(x);
}
MEMSCALE_DEVICE inline std::uint32_t magnitude_bits(float x) {
  return bits_of(x) & 0x7FFFFFFFU;
}
MEMSCALE_DEVICE inline float float_of(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}

MEMSCALE_DEVICE inline float load(float value) { return value; }

MEMSCALE_DEVICE inline float load(Bf16 value) {
  return float_of(std::uint32_t{value.bits} << 16U);
}

MEMSCALE_DEVICE inline float load(Fp16 value) {
  const std::uint32_t magnitude = value.bits & 0x7FFFU;
  const std::uint32_t sign = std::uint32_t{value.bits & 0x8000U} << 16U;
  // The exponent's bias moves from 15 to 127 by an exact multiplication, which
  // takes the denormals along.
  const std::uint32_t finite = bits_of(float_of(magnitude << 13U) * 0x1p112F);
  const std::uint32_t bits =
      magnitude < 0x7C00U ? finite : magnitude << 13U | kInfinityBits;
  return float_of(bits | sign);
}

MEMSCALE_DEVICE inline void store(float value, float& place) { place = value; }

MEMSCALE_DEVICE inline void store(float value, Bf16& place) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = bits + 0x7FFFU + (bits >> 16U & 1U);
  const bool is_nan = (bits & 0x7FFFFFFFU) > kInfinityBits;
  place.bits = static_cast<std::uint16_t>((is_nan ? kNanBits : rounded) >> 16U);
}

MEMSCALE_DEVICE inline void store(float value, Fp16& place) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  // Normal results: rebias, round to even at bit 13.
  const std::uint32_t normal =
      (magnitude - (112U << 23U) + 0xFFFU + (magnitude >> 13U & 1U)) >> 13U;
  // Denormal ones: 0.5 has its last bit where theirs is, so the addition
  // rounds. Not of large numbers, whose sums mean nothing.
  const std::uint32_t small =
      magnitude < 0x38800000U ? magnitude : 0;  // below 2^-14
  const std::uint32_t denormal = bits_of(float_of(small) + 0.5F) - kHalfBits;
  std::uint32_t half = magnitude < 0x38800000U ? denormal : normal;
  half = magnitude >= 0x477FF000U ? 0x7C00U : half;  // from 65520
  half |= bits >> 16U & 0x8000U;
  half = magnitude > kInfinityBits ? 0x7E00U : half;
  place.bits = static_cast<std::uint16_t>(half);
}

// The bits of a stored magnitude, and from which on they are not finite.
MEMSCALE_DEVICE inline std::uint32_t stored_magnitude(float x) {
  return magnitude_bits(x);
}
MEMSCALE_DEVICE inline std::uint32_t stored_magnitude(Bf16 x) {
  return x.bits & 0x7FFFU;
}
MEMSCALE_DEVICE inline std::uint32_t stored_magnitude(Fp16 x) {
  return x.bits & 0x7FFFU;
}
MEMSCALE_DEVICE constexpr std::uint32_t stored_infinity(float) {
  return kInfinityBits;
}
MEMSCALE_DEVICE constexpr std::uint32_t stored_infinity(Bf16) {
  return 0x7F80U;
}
MEMSCALE_DEVICE constexpr std::uint32_t stored_infinity(Fp16) {
  return 0x7C00U;
}

// Note [stochastic rounding]: a hash of (seed, element) gives 16 bits; they are
// added below the 16 bits that stay, and the sum is cut. So a value goes up
// with a probability equal to its distance from below. The hash is of 64 bits
// for each block's key and of 32 for each element, which vectorises.
MEMSCALE_DEVICE inline std::uint32_t block_key(std::uint64_t seed,
                                               std::uint64_t block) {
  std::uint64_t x = seed + (block + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ x >> 30U) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ x >> 27U) * 0x94D049BB133111EBULL;
  return static_cast<std::uint32_t>(x >> 32U);
}

// `offset` is the element's place in its block.
MEMSCALE_DEVICE inline std::uint32_t draw(std::uint32_t key,
                                          std::uint32_t offset) {
  std::uint32_t x = key + offset * 0x9E3779B9U;
  x = (x ^ x >> 16U) * 0x7FEB352DU;
  x = (x ^ x >> 15U) * 0x846CA68BU;
  return x >> 16U;
}

MEMSCALE_DEVICE inline void store_stochastic(float value, Bf16& place,
                                             std::uint32_t random) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  std::uint32_t rounded = magnitude < kInfinityBits ? bits + random : bits;
  rounded = magnitude > kInfinityBits ? kNanBits : rounded;
  place.bits = static_cast<std::uint16_t>(rounded >> 16U);
}

// The formula of adam.h: m and v are replaced, the new parameter is returned.
MEMSCALE_DEVICE inline float update(const AdamStep& s, float param, float grad,
                                    float& m, float& v) {
  const float g = grad * s.grad_multiplier + s.l2 * param;
  m = s.beta1 * m + s.one_minus_beta1 * g;
  v = s.beta2 * v + s.one_minus_beta2 * g * g;
  const float denom = std::sqrt(v) * s.inverse_bias_correction2_sqrt + s.eps;
  return param * s.decay - s.step_size * m / denom;
}

// From the largest magnitude in a block, as bits: the absmax to keep and what
// its elements are multiplied by (0 where all become 0). See blockwise.h.
struct BlockScale {
  float absmax;
  float inverse;
};

MEMSCALE_DEVICE inline BlockScale block_scale(std::uint32_t largest) {
  if (largest >= kInfinityBits) return {float_of(kNanBits), 0};
  if (largest < kSmallestNormalBits) return {0, 0};
  return {float_of(largest), 1 / float_of(largest)};
}

}  // namespace
}  // namespace memscale::kernels
