#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "memscale/kernels/adam.h"
#include "memscale/kernels/blockwise.h"
#include "memscale/kernels/floats.h"

// The kernels of this machine: one table of functions, picked once.
//
//   const KernelTable& k = kernels();
//   k.adam8_f32(step, params, grads, state, count, first);
//
// Functions are pure: pointers and counts, no threads, no allocation, at most
// three blocks (3 KiB) on the stack. Callers split ranges at multiples of
// kBlock. All implementations give the same bits, NaN payloads apart, if
// denormals are not flushed.

namespace memscale::kernels {

// grads[i] *= multiplier; true if a result is NaN or infinite. One pass.
template <typename G>
using Unscale = bool(G* grads, std::size_t count, float multiplier);

struct KernelTable {
  std::string_view name;

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

// The fastest table this CPU can run. Thread-safe; static storage.
const KernelTable& kernels();

// Every table this CPU can run, slowest first: for tests and benchmarks.
std::span<const KernelTable* const> all_kernels();

// The obvious scalar version, which the others are held to.
const KernelTable& reference_kernels();

}  // namespace memscale::kernels
