#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "memscale/kernels/blockwise.h"
#include "memscale/kernels/device.h"

// The maps of blockwise.h as tables, made by the compiler, and the way from a
// float to its code: the float's top 16 bits (sign, exponent and seven bits of
// fraction) name a bucket so narrow that at most one border between two codes
// lies in it; the bucket's first code and one comparison with that border give
// the code. No search.
//
// Codes of the signed map are found as magnitudes: 0 to 128 steps from zero.
//
// Everything is in an anonymous namespace: each CPU level has its own copy, as
// it must (see cmake/CpuLevels.cmake).

namespace memscale::kernels {
namespace {

// Below 2^-23 no map has a value, so buckets begin there; the first has all
// that is smaller, too. The last is 1's.
constexpr std::uint32_t kFirstBucket = (127U - 23U) << 7U;
constexpr std::uint32_t kLastBucket = 127U << 7U;
constexpr std::size_t kNumBuckets = kLastBucket - kFirstBucket + 1;

struct Codec {
  float values[256];           // of each code
  std::uint32_t borders[257];  // bits of the first float of code k + 1
  std::uint8_t codes[kNumBuckets];
};

// 1 / (20 n 10^(E - e)) of blockwise.h, for n = 2^e.
consteval float decade_part(Map map, unsigned n) {
  double divisor = 20.0 * n;
  for (; n < (map == Map::Signed ? 64U : 128U); n *= 2) divisor *= 10;
  return static_cast<float>(1 / divisor);
}

// Value number k of the map's magnitudes, k = 0 being 0. The unsigned map is
// the signed one with a bit more for each decade and without its first.
consteval float magnitude(Map map, unsigned k) {
  const bool is_signed = map == Map::Signed;
  if (k == 0) return 0;
  if (k == (is_signed ? 128 : 255)) return 1;
  const unsigned place = is_signed ? k : k + 1;  // n + j
  const unsigned n = std::bit_floor(place);
  return static_cast<float>(18 * place - 16 * n + 9) * decade_part(map, n);
}

consteval Codec make_codec(Map map) {
  const unsigned num_steps = map == Map::Signed ? 128 : 255;
  Codec codec{};
  for (unsigned k = 0; k <= num_steps; ++k) {
    if (map == Map::Signed) {
      codec.values[127 + k] = magnitude(map, k);
      if (k < 128) codec.values[127 - k] = k == 0 ? 0.0F : -magnitude(map, k);
    } else {
      codec.values[k] = magnitude(map, k);
    }
  }
  for (unsigned k = 0; k < 257; ++k) {
    codec.borders[k] = 0x7FFFFFFFU;
    if (k >= num_steps) continue;
    const double middle =
        (double{magnitude(map, k)} + magnitude(map, k + 1)) / 2;
    const auto nearest = static_cast<float>(middle);
    const auto bits = std::bit_cast<std::uint32_t>(nearest);
    // A tie stays with the lower magnitude.
    codec.borders[k] = nearest > middle ? bits : bits + 1;
  }
  // See Note [positive stays positive].
  if (map == Map::Unsigned) codec.borders[0] = 1;
  unsigned code = 0;
  for (std::uint32_t i = 0; i < kNumBuckets; ++i) {
    const std::uint32_t first = i == 0 ? 0 : (kFirstBucket + i) << 16U;
    while (codec.borders[code] <= first) ++code;
    codec.codes[i] = static_cast<std::uint8_t>(code);
  }
  return codec;
}

// Whether one comparison is enough: no bucket has two borders.
consteval bool is_narrow_enough(const Codec& codec) {
  for (std::uint32_t i = 0; i < kNumBuckets; ++i) {
    const std::uint32_t last = (kFirstBucket + i) << 16U | 0xFFFFU;
    if (codec.borders[codec.codes[i] + 1U] <= last) return false;
  }
  return true;
}

constexpr Codec kSignedCodec = make_codec(Map::Signed);
constexpr Codec kUnsignedCodec = make_codec(Map::Unsigned);
static_assert(is_narrow_enough(kSignedCodec));
static_assert(is_narrow_enough(kUnsignedCodec));

// The bucket of a magnitude, from its bits; magnitudes are at most 1, or a
// rounding above it.
MEMSCALE_DEVICE inline std::uint32_t bucket_of(std::uint32_t bits) {
  const std::uint32_t top = bits >> 16U;
  return (top < kFirstBucket ? kFirstBucket : top) - kFirstBucket;
}

// How many steps from zero the magnitude with these bits is coded.
MEMSCALE_DEVICE inline std::uint32_t steps_of(const Codec& codec,
                                              std::uint32_t bucket,
                                              std::uint32_t bits) {
  const std::uint32_t code = codec.codes[bucket];
  return code + (bits >= codec.borders[code] ? 1U : 0U);
}

// The code of the signed map: down from zero if `is_negative`, where the last
// step is missing.
MEMSCALE_DEVICE inline std::uint8_t signed_code(std::uint32_t steps,
                                                bool is_negative) {
  const std::uint32_t down = steps < 127 ? steps : 127;
  return static_cast<std::uint8_t>(is_negative ? kSignedZero - down
                                               : kSignedZero + steps);
}

}  // namespace
}  // namespace memscale::kernels
