#pragma once

#include "memscale/kernels/cpu/codec_tables.h"
#include "memscale/kernels/cpu/vectors.h"

// Whole blocks to and from codes without look-ups in memory: a map is linear in
// each of its decades, and the decades' coefficients, at most eight, are kept
// in a vector register and picked by a permutation. Two to three times quicker
// than tables, whose look-ups do not vectorise.
//
// Note [rounding near a border]: arithmetic finds a value's place between two
// borders up to a rounding error. Where that error could decide, the tables do,
// for the block; so the codes are the tables', always.
//
// Anonymous: see codec.h.

namespace memscale::kernels {
namespace {

// A magnitude is (18 * place + offset) * part, where place = n + j, and offset
// and part depend on the decade. Its number, mod 8, is that of the exponent of
// place. One number is left for what is no decade: 0 and 1 of the unsigned map
// (places 1 and 256), 1 of the signed (128).
struct Decoding {
  Octet offset;
  Octet part;
};

template <Map map>
consteval Decoding make_decoding() {
  Decoding result{};
  const unsigned first = map == Map::Signed ? 0 : 1;
  for (unsigned e = first; e < first + 7; ++e) {
    const unsigned n = 1U << e;
    result.offset.x[(127 + e) % 8] = 9 - 16 * static_cast<float>(n);
    result.part.x[(127 + e) % 8] = decade_part(map, n);
  }
  if (map == Map::Signed) {
    result.offset.x[(127 + 7) % 8] = 1 - 18 * 128;
    result.part.x[(127 + 7) % 8] = 1;
  } else {
    result.offset.x[127 % 8] = -18;
    result.part.x[127 % 8] = 1.0F / (18 * 255);
  }
  return result;
}

static_assert(1.0F / (18 * 255) * (18 * 255) == 1.0F);

template <Map map>
inline void decode(const std::uint8_t* __restrict codes, float absmax,
                   std::size_t size, float* __restrict values) {
  if (size != kBlock) {
    decode_by_tables<map>(codes, absmax, size, values);
    return;
  }
  constexpr Decoding kDecoding = make_decoding<map>();
  const Floats offset = spread(kDecoding.offset);
  const Floats part = spread(kDecoding.part);
  // Widening bytes is left to the vectorizer.
  for (std::size_t i = 0; i < kBlock; ++i) {
    values[i] =
        static_cast<float>(codes[i] - (map == Map::Signed ? kSignedZero : -1));
  }
  for (std::size_t i = 0; i < kBlock; i += kLanes) {
    const Floats place = load<Floats>(values + i);
    const Ints sign = bits_of_floats(place) & INT32_MIN;
    const Floats x = map == Map::Signed
                         ? floats_of_bits(bits_of_floats(place) ^ sign)
                         : place;
    const Ints decade = bits_of_floats(x) >> 23;
    Ints value =
        bits_of_floats((x * 18.0F + pick(offset, decade)) * pick(part, decade));
    if (map == Map::Signed) value = (value | sign) & (x != 0.0F);
    put(floats_of_bits(value) * absmax, values + i);
  }
}

// Steps of a magnitude x: the number of its decade is found from its logarithm,
// of which the bits are a rough one, and a comparison with the decade's exact
// border; in the decade, steps are the whole part of x * slope + start, at most
// `last`. Numbers are 0 below all decades and 8 at the value 1, which share
// coefficients, being taken mod 8.
struct Encoding {
  Octet border;  // of decade number i + 1
  Octet slope;
  Octet start;
  Octet last;
};

template <Map map>
consteval Encoding make_encoding() {
  constexpr bool is_signed = map == Map::Signed;
  const Codec& codec = codec_of<map>();
  const unsigned first = is_signed ? 1 : 2;  // n of the first decade
  const unsigned top = is_signed ? 128 : 255;
  Encoding result{};
  for (unsigned number = 1; number <= 8; ++number) {
    // Steps of this decade's first value.
    const unsigned begin =
        number == 8 ? top : (first << (number - 1)) - (is_signed ? 0 : 1);
    // The unsigned map's first is any between kTiny and its value: encode()
    // leaves nothing else there.
    result.border.x[number - 1] =
        !is_signed && number == 1
            ? magnitude(map, 1) / 2
            : std::bit_cast<float>(codec.borders[begin - 1]);
    if (number == 8) break;
    const double n = first << (number - 1);
    const double part = decade_part(map, first << (number - 1));
    result.slope.x[number] = static_cast<float>(1 / (18 * part));
    result.start.x[number] =
        static_cast<float>(n * 8 / 9 - (is_signed ? 0 : 1));
    result.last.x[number] = static_cast<float>(begin + n) - 0.5F;
  }
  // 0.5 at 0; from the border of 1 on, between `top` and the next.
  result.slope.x[0] = static_cast<float>(top) + 0.2F;
  result.start.x[0] = 0.5F;
  result.last.x[0] = static_cast<float>(top) + 0.5F;
  return result;
}

// The rough number of a decade: floor(bits * kPerBit + kAtZero), which is the
// true one or one less. From kTiny on, below all decades, it is not negative.
constexpr float kPerBit = 0.32F / (1 << 23);
constexpr float kAtZero = -33.0F;
constexpr float kTiny = 0x1p-23F;

template <Map map>
consteval bool is_rough_number_good() {
  const Encoding e = make_encoding<map>();
  for (unsigned number = 1; number <= 8; ++number) {
    const float rough = static_cast<float>(std::bit_cast<std::uint32_t>(
                            e.border.x[number - 1])) *
                            kPerBit +
                        kAtZero;
    if (rough < static_cast<float>(number) - 0.99F) return false;
    if (rough > static_cast<float>(number) - 0.01F) return false;
  }
  return true;
}
static_assert(is_rough_number_good<Map::Signed>());
static_assert(is_rough_number_good<Map::Unsigned>());

// More than x * slope + start, below 256, errs by.
constexpr float kDoubt = 0x1p-14F;

template <Map map>
inline void encode(const float* __restrict values, float inverse,
                   std::size_t size, std::uint8_t* __restrict codes) {
  if (size != kBlock) {
    encode_by_tables<map>(values, inverse, size, codes);
    return;
  }
  constexpr Encoding kEncoding = make_encoding<map>();
  constexpr float kSmallest = magnitude(map, 1);  // but 0
  const Floats border = spread(kEncoding.border);
  const Floats slope = spread(kEncoding.slope);
  const Floats start = spread(kEncoding.start);
  const Floats last = spread(kEncoding.last);
  alignas(64) float magnitudes[kBlock];
  alignas(64) std::int32_t steps[kBlock];  // first the decades' numbers
  // Two loops: the operations on one value form a chain, and a shorter chain
  // lets a CPU work on more of them at a time.
  for (std::size_t i = 0; i < kBlock; i += kLanes) {
    Floats x = load<Floats>(values + i) * inverse;
    Floats least = Floats{} + kTiny;
    if (map == Map::Signed) {
      x = floats_of_bits(bits_of_floats(x) & INT32_MAX);
    } else {
      // See Note [positive stays positive].
      least = x > 0.0F ? Floats{} + kSmallest : least;
    }
    x = x > least ? x : least;
    const Floats rough = to_floats(bits_of_floats(x)) * kPerBit + kAtZero;
    const Ints guess = to_ints(rough);
    put(guess - (x >= pick(border, guess)), steps + i);
    put(x, magnitudes + i);
  }
  Ints doubtful{};
  for (std::size_t i = 0; i < kBlock; i += kLanes) {
    const Floats x = load<Floats>(magnitudes + i);
    const Ints number = load<Ints>(steps + i);
    const Floats limit = pick(last, number);
    Floats place = x * pick(slope, number) + pick(start, number);
    place = place < limit ? place : limit;
    const Ints found = to_ints(place - kDoubt);
    doubtful |= found ^ to_ints(place + kDoubt);
    put(found, steps + i);
  }
  std::int32_t any = 0;
  for (std::size_t i = 0; i < kLanes; ++i) any |= doubtful[i];
  if (any != 0) {
    encode_by_tables<map>(values, inverse, size, codes);
    return;
  }
  for (std::size_t i = 0; i < kBlock; ++i) {
    codes[i] =
        map == Map::Signed
            ? signed_code(static_cast<std::uint32_t>(steps[i]), values[i] < 0)
            : static_cast<std::uint8_t>(steps[i]);
  }
}

}  // namespace
}  // namespace memscale::kernels
