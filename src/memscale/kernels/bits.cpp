#include "memscale/kernels/bits.h"

#include <bit>
#include <cstring>

namespace memscale::kernels {
namespace {

constexpr std::size_t kBlock = 64;  // elements; 8 bytes of bits

// Bytes of 0 or 1 to the bits of one byte. Each product moves byte i's bit to
// bit 56 + i; none of the others carries into those.
std::uint8_t gather(std::uint64_t bytes) {
  return static_cast<std::uint8_t>((bytes * 0x0102040810204080ULL) >> 56U);
}

}  // namespace

static_assert(std::endian::native == std::endian::little);

template <typename T>
void pack_bits(const T* elements, std::size_t count, std::uint8_t* bits) {
  const std::size_t whole = count / kBlock * kBlock;
  for (std::size_t i = 0; i < whole; i += kBlock) {
    std::uint8_t flags[kBlock];
    for (std::size_t j = 0; j < kBlock; ++j) flags[j] = elements[i + j] != 0;
    for (std::size_t j = 0; j < kBlock; j += 8) {
      std::uint64_t eight = 0;
      std::memcpy(&eight, flags + j, sizeof eight);
      bits[(i + j) / 8] = gather(eight);
    }
  }
  for (std::size_t i = whole; i < count; ++i) {
    if (i % 8 == 0) bits[i / 8] = 0;
    bits[i / 8] |= static_cast<std::uint8_t>((elements[i] != 0) << (i % 8));
  }
}

template <typename T>
void unpack_bits(const std::uint8_t* bits, std::size_t count, T one,
                 T* elements) {
  const std::size_t whole = count / 8 * 8;
  for (std::size_t i = 0; i < whole; i += 8) {
    const std::uint32_t byte = bits[i / 8];
    for (std::size_t j = 0; j < 8; ++j) {
      elements[i + j] = (byte >> j & 1U) != 0 ? one : T{0};
    }
  }
  for (std::size_t i = whole; i < count; ++i) {
    elements[i] = (bits[i / 8] >> (i % 8) & 1) != 0 ? one : T{0};
  }
}

void narrow(const std::int64_t* elements, std::size_t count,
            std::int32_t* narrowed) {
  for (std::size_t i = 0; i < count; ++i) {
    narrowed[i] = static_cast<std::int32_t>(elements[i]);
  }
}

void widen(const std::int32_t* narrowed, std::size_t count,
           std::int64_t* elements) {
  for (std::size_t i = 0; i < count; ++i) elements[i] = narrowed[i];
}

template void pack_bits(const std::uint16_t*, std::size_t, std::uint8_t*);
template void pack_bits(const std::uint32_t*, std::size_t, std::uint8_t*);
template void pack_bits(const std::uint64_t*, std::size_t, std::uint8_t*);
template void unpack_bits(const std::uint8_t*, std::size_t, std::uint16_t,
                          std::uint16_t*);
template void unpack_bits(const std::uint8_t*, std::size_t, std::uint32_t,
                          std::uint32_t*);
template void unpack_bits(const std::uint8_t*, std::size_t, std::uint64_t,
                          std::uint64_t*);

}  // namespace memscale::kernels
