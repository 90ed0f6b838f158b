#pragma once

#include <cstddef>
#include <cstdint>

// Tensors held in fewer bits, to the bit: zeros and ones (dropout's draws) at
// one bit per element, indices at half their bytes.
//
// Elements are read as unsigned integers of their own width (2, 4 or 8 bytes).
// Element i is bit i % 8 of byte i / 8. No threads: callers split the work at
// multiples of 8 elements.

namespace memscale::kernels {

// bits[i] = elements[i] != 0. Writes (count + 7) / 8 bytes.
template <typename T>
void pack_bits(const T* elements, std::size_t count, std::uint8_t* bits);

// elements[i] = bits[i] ? one : 0.
template <typename T>
void unpack_bits(const std::uint8_t* bits, std::size_t count, T one,
                 T* elements);

// Integers that fit, at half their bytes and back.
void narrow(const std::int64_t* elements, std::size_t count,
            std::int32_t* narrowed);
void widen(const std::int32_t* narrowed, std::size_t count,
           std::int64_t* elements);

}  // namespace memscale::kernels
