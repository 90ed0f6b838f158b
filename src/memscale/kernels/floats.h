#pragma once

#include <cstdint>

// The two 16-bit floats as their bits. Of the same size and alignment as
// torch's, whose memory they are used to read and write.

namespace memscale::kernels {

struct Bf16 {
  std::uint16_t bits;
};

struct Fp16 {
  std::uint16_t bits;
};

}  // namespace memscale::kernels
