#pragma once

#include <cstddef>

#include "memscale/kernels/adam.h"
#include "memscale/kernels/blockwise.h"
#include "memscale/kernels/floats.h"

// What every implementation offers. Apart from kernels.h because the CPU levels
// include nothing that could leave a function in their objects.

namespace memscale::kernels {

// grads[i] *= multiplier; true if a result is NaN or infinite. One pass.
template <typename G>
using Unscale = bool(G* grads, std::size_t count, float multiplier);

struct KernelTable {
  const char* name;

  Quantise* quantise_signed;
  Quantise* quantise_unsigned;
  Dequantise* dequantise_signed;
  Dequantise* dequantise_unsigned;

  Adam8<float>* adam8_f32;
  Adam8<Bf16>* adam8_bf16;
  Adam8<Fp16>* adam8_f16;

  Adam<float, float>* adam_f32;
  Adam<Bf16, float>* adam_bf16_state_f32;
  Adam<Bf16, Bf16>* adam_bf16_state_bf16;
  Adam<Fp16, float>* adam_f16_state_f32;

  Unscale<float>* unscale_f32;
  Unscale<Bf16>* unscale_bf16;
  Unscale<Fp16>* unscale_f16;
};

}  // namespace memscale::kernels
