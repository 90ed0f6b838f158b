#pragma once

#include "memscale/kernels/cpu/codec_tables.h"

namespace memscale::kernels {
namespace {

template <Map map>
inline void decode(const std::uint8_t* __restrict codes, float absmax,
                   std::size_t size, float* __restrict values) {
  decode_by_tables<map>(codes, absmax, size, values);
}

template <Map map>
inline void encode(const float* __restrict values, float inverse,
                   std::size_t size, std::uint8_t* __restrict codes) {
  encode_by_tables<map>(values, inverse, size, codes);
}

}  // namespace
}  // namespace memscale::kernels
