#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

// GCC's vectors of MEMSCALE_LANES floats (8 or 16), for the one thing that its
// vectorizer does not find by itself: tables inside a register. Anonymous: see
// codec.h.

namespace memscale::kernels {
namespace {

constexpr std::size_t kLanes = MEMSCALE_LANES;
static_assert(kLanes == 8 || kLanes == 16);
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = std::int32_t __attribute__((vector_size(4 * kLanes)));

// Eight floats, picked by the last three bits of an index.
struct Octet {
  float x[8];
};

inline Floats spread(const Octet& octet) {
  Floats result;
  for (std::size_t i = 0; i < kLanes; ++i) result[i] = octet.x[i % 8];
  return result;
}

inline Floats pick(Floats octet, Ints index) {
  return __builtin_shuffle(octet, index);
}

template <typename Vector, typename T>
inline Vector load(const T* place) {
  Vector result;
  __builtin_memcpy(&result, place, sizeof result);
  return result;
}

template <typename Vector, typename T>
inline void put(Vector vector, T* place) {
  __builtin_memcpy(place, &vector, sizeof vector);
}

inline Ints to_ints(Floats x) { return __builtin_convertvector(x, Ints); }
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Ints bits_of_floats(Floats x) { return std::bit_cast<Ints>(x); }
inline Floats floats_of_bits(Ints x) { return std::bit_cast<Floats>(x); }

}  // namespace
}  // namespace memscale::kernels
