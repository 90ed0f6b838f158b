#pragma once

#include <cstddef>
#include <cstdint>

// Floats held as one byte each and one float for every 256 of them: a block's
// largest magnitude, and for each element the nearest of 256 values of a map
// that is dense near zero ("dynamic" quantisation; Dettmers et al., 8-bit
// Optimizers via Block-wise Quantization). One exception to the nearest: Note
// [positive stays positive].
//
// The maps, by formula. Decade e has n = 2^e values, the middles of n equal
// parts of [0.1, 1] times a power of ten:
//
//   (2n + 18j + 9) * (1 / (20 n 10^(E - e))),  j = 0 .. n - 1
//
// - signed: E = 6, e = 0 .. 6, both signs; with 0 and 1 that is 256 values.
// - unsigned: E = 7, e = 1 .. 7; with 0 and 1 that is 256 values.
//
// The second factor and the product are each rounded to float. Codes count the
// values upwards: 0 is code 127 of the signed map and code 0 of the unsigned.
// bitsandbytes builds the same maps in other float steps: its values are these
// within 2 units in the last place.
//
// Note [blocks]: a block is 256 elements from the start of a tensor; the last
// may be shorter. Callers that split the work split at multiples of kBlock, and
// then get the same bits as from one call.
//
// - An element x is coded as the value nearest to x * (1 / absmax); of two
//   equally near, the one nearer to zero.
// - A block whose magnitudes all are below 2^-126 (the denormals) is zeros:
//   absmax 0, codes of 0.
// - A block that holds a NaN or an infinity has absmax NaN and codes of 0, and
//   comes back as NaN throughout: never as healthy values.
//
// Note [positive stays positive]: in the unsigned map an element for which
// x * (1 / absmax) > 0 has at least code 1, however small it is. Adam divides
// by the root of these values. By the nearest, a second moment below 1.6e-7 of
// its block's largest would be 0 while its first moment, the size of its root,
// is kept: the next step would be up to 31 times too large, and with a gradient
// of 0 it would be m / eps. Kept too large, it makes the step smaller. 0 stays
// what is below 2^-150 of the block's largest, or in a block of denormals.

namespace memscale::kernels {

inline constexpr std::size_t kBlock = 256;  // elements

// How many absmax floats `count` elements need.
constexpr std::size_t num_blocks(std::size_t count) {
  return (count + kBlock - 1) / kBlock;
}

enum class Map { Signed, Unsigned };

inline constexpr std::uint8_t kSignedZero = 127;  // the code of 0
inline constexpr std::uint8_t kUnsignedZero = 0;

// The 256 values of a map, upwards. Static storage.
const float* map_values(Map map);

// Writes `count` codes and num_blocks(count) absmax. The unsigned map takes
// negative elements as 0 (their magnitudes count in absmax).
using Quantise = void(const float* values, std::size_t count,
                      std::uint8_t* codes, float* absmax);

// values[i] = map_values[codes[i]] * absmax[i / kBlock].
using Dequantise = void(const std::uint8_t* codes, const float* absmax,
                        std::size_t count, float* values);

}  // namespace memscale::kernels
