#pragma once

#include <cstddef>
#include <cstdint>

#include "memscale/kernels/adam.h"
#include "memscale/kernels/blockwise.h"
#include "memscale/kernels/floats.h"

// The kernels of kernel_table.h on CUDA devices, to the same bits. Pointers are
// to memory of the current device; calls are enqueued on `stream` (a
// cudaStream_t; null is the default stream) and return at once. A call that
// cannot be enqueued throws std::runtime_error with CUDA's reason.
//
// Built from no_cuda.cpp instead when CUDA is off: then available() is false
// and the calls throw.

namespace memscale::kernels::cuda {

// Whether there is a device to run on.
bool available();

void quantise(Map map, const float* values, std::size_t count,
              std::uint8_t* codes, float* absmax, void* stream);
void dequantise(Map map, const std::uint8_t* codes, const float* absmax,
                std::size_t count, float* values, void* stream);

// P is float, Bf16 or Fp16.
template <typename P>
void adam8(const AdamStep& step, P* params, const P* grads, const State8& state,
           std::size_t count, std::uint64_t first, void* stream);

// P, S is float, float; Bf16, float; Bf16, Bf16; or Fp16, float.
template <typename P, typename S>
void adam(const AdamStep& step, P* params, const P* grads,
          const State<S>& state, std::size_t count, std::uint64_t first,
          void* stream);

// grads[i] *= multiplier; *found, of the device, becomes 1 if a result is NaN
// or infinite and is left alone otherwise.
template <typename G>
void unscale(G* grads, std::size_t count, float multiplier, float* found,
             void* stream);

}  // namespace memscale::kernels::cuda
