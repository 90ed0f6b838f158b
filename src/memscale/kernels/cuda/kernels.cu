// Launches of bodies.cuh: a thread for each element, 256 threads for a block.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "memscale/kernels/cuda/bodies.cuh"
#include "memscale/kernels/cuda/kernels.h"

namespace memscale::kernels {
namespace {

__device__ const Codec device_signed_codec = kSignedCodec;
__device__ const Codec device_unsigned_codec = kUnsignedCodec;

// See bodies.cuh. One thread's part in a group of kBlock threads.
class Threads {
 public:
  template <typename F>
  __device__ void each(std::size_t size, const F& f) {
    if (threadIdx.x < size) f(threadIdx.x);
  }

  template <typename F>
  __device__ std::uint32_t largest(std::size_t size, const F& f) {
    constexpr unsigned kWarp = 32;
    __shared__ std::uint32_t of_warps[kBlock / kWarp];
    std::uint32_t mine = threadIdx.x < size ? f(threadIdx.x) : 0;
    for (unsigned step = kWarp / 2; step > 0; step /= 2) {
      mine = max(mine, __shfl_xor_sync(0xFFFFFFFFU, mine, step));
    }
    __syncthreads();  // of_warps may still be read from the call before
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = mine;
    __syncthreads();
    for (const std::uint32_t other : of_warps) mine = max(mine, other);
    return mine;
  }

  __device__ float& first(std::size_t) { return first_; }
  __device__ float& second(std::size_t) { return second_; }

 private:
  float first_ = 0;
  float second_ = 0;
};

__device__ std::size_t block_begin() {
  return static_cast<std::size_t>(blockIdx.x) * kBlock;
}

__device__ std::size_t block_size(std::size_t count) {
  return min(count - block_begin(), kBlock);
}

template <Map map>
__global__ void quantise_kernel(const float* values, std::size_t count,
                                std::uint8_t* codes, float* absmax) {
  const std::size_t begin = block_begin();
  Threads threads;
  quantise_block<map>(
      threads, map == Map::Signed ? device_signed_codec : device_unsigned_codec,
      values + begin, block_size(count), codes + begin, absmax + blockIdx.x);
}

template <Map map>
__global__ void dequantise_kernel(const std::uint8_t* codes,
                                  const float* absmax, std::size_t count,
                                  float* values) {
  const std::size_t i = block_begin() + threadIdx.x;
  if (i >= count) return;
  const Codec& codec =
      map == Map::Signed ? device_signed_codec : device_unsigned_codec;
  values[i] = codec.values[codes[i]] * absmax[blockIdx.x];
}

template <typename P>
__global__ void adam8_kernel(AdamStep step, P* params, const P* grads,
                             State8 state, std::size_t count,
                             std::uint64_t first) {
  const std::size_t begin = block_begin();
  Threads threads;
  adam8_block(threads, Codecs{device_signed_codec, device_unsigned_codec}, step,
              params + begin, grads + begin,
              State8{state.m + begin, state.v + begin,
                     state.m_absmax + blockIdx.x, state.v_absmax + blockIdx.x},
              block_size(count), first + begin);
}

template <typename P, typename S>
__global__ void adam_kernel(AdamStep step, P* params, const P* grads,
                            State<S> state, std::size_t count,
                            std::uint64_t first) {
  const std::size_t i = block_begin() + threadIdx.x;
  if (i >= count) return;
  adam_element(step, params[i], grads[i], state.m[i], state.v[i], first + i);
}

template <typename G>
__global__ void unscale_kernel(G* grads, std::size_t count, float multiplier,
                               float* found) {
  const std::size_t i = block_begin() + threadIdx.x;
  if (i < count && unscale_element(grads[i], multiplier)) *found = 1;
}

// Launches a group for each block of `count` elements.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), std::size_t count, void* stream,
            const Arguments&... arguments) {
  if (count == 0) return;
  kernel<<<static_cast<unsigned>(num_blocks(count)), kBlock, 0,
           static_cast<cudaStream_t>(stream)>>>(arguments...);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("CUDA kernel not launched: ") +
                             cudaGetErrorString(error));
  }
}

}  // namespace

namespace cuda {

bool available() {
  int num_devices = 0;
  return cudaGetDeviceCount(&num_devices) == cudaSuccess && num_devices > 0;
}

void quantise(Map map, const float* values, std::size_t count,
              std::uint8_t* codes, float* absmax, void* stream) {
  launch(map == Map::Signed ? quantise_kernel<Map::Signed>
                            : quantise_kernel<Map::Unsigned>,
         count, stream, values, count, codes, absmax);
}

void dequantise(Map map, const std::uint8_t* codes, const float* absmax,
                std::size_t count, float* values, void* stream) {
  launch(map == Map::Signed ? dequantise_kernel<Map::Signed>
                            : dequantise_kernel<Map::Unsigned>,
         count, stream, codes, absmax, count, values);
}

template <typename P>
void adam8(const AdamStep& step, P* params, const P* grads, const State8& state,
           std::size_t count, std::uint64_t first, void* stream) {
  launch(adam8_kernel<P>, count, stream, step, params, grads, state, count,
         first);
}

template <typename P, typename S>
void adam(const AdamStep& step, P* params, const P* grads,
          const State<S>& state, std::size_t count, std::uint64_t first,
          void* stream) {
  launch(adam_kernel<P, S>, count, stream, step, params, grads, state, count,
         first);
}

template <typename G>
void unscale(G* grads, std::size_t count, float multiplier, float* found,
             void* stream) {
  launch(unscale_kernel<G>, count, stream, grads, count, multiplier, found);
}

#include "memscale/kernels/cuda/instances.inc"

}  // namespace cuda
}  // namespace memscale::kernels
