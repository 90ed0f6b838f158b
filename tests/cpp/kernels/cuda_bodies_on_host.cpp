// The bodies of the CUDA kernels as one more table of kernels, the threads of a
// group being the rounds of a loop.
#include <algorithm>

#include "kernel_cases.h"
#include "memscale/kernels/cuda/bodies.cuh"

namespace memscale::kernels {
namespace {

class Rounds {
 public:
  template <typename F>
  void each(std::size_t size, const F& f) {
    for (std::size_t i = 0; i < size; ++i) f(i);
  }
  template <typename F>
  std::uint32_t largest(std::size_t size, const F& f) {
    std::uint32_t result = 0;
    for (std::size_t i = 0; i < size; ++i) result = std::max(result, f(i));
    return result;
  }
  float& first(std::size_t i) { return first_[i]; }
  float& second(std::size_t i) { return second_[i]; }

 private:
  float first_[kBlock];
  float second_[kBlock];
};

template <Map map>
constexpr const Codec& codec_of() {
  return map == Map::Signed ? kSignedCodec : kUnsignedCodec;
}

template <Map map>
void quantise(const float* values, std::size_t count, std::uint8_t* codes,
              float* absmax) {
  Rounds rounds;
  for (std::size_t i = 0; i < count; i += kBlock) {
    quantise_block<map>(rounds, codec_of<map>(), values + i,
                        std::min(kBlock, count - i), codes + i,
                        absmax + i / kBlock);
  }
}

template <Map map>
void dequantise(const std::uint8_t* codes, const float* absmax,
                std::size_t count, float* values) {
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = codec_of<map>().values[codes[i]] * absmax[i / kBlock];
  }
}

template <typename P>
void adam8(const AdamStep& step, P* params, const P* grads, const State8& state,
           std::size_t count, std::uint64_t first) {
  Rounds rounds;
  for (std::size_t i = 0; i < count; i += kBlock) {
    adam8_block(rounds, Codecs{kSignedCodec, kUnsignedCodec}, step, params + i,
                grads + i,
                State8{state.m + i, state.v + i, state.m_absmax + i / kBlock,
                       state.v_absmax + i / kBlock},
                std::min(kBlock, count - i), first + i);
  }
}

template <typename P, typename S>
void adam(const AdamStep& step, P* params, const P* grads,
          const State<S>& state, std::size_t count, std::uint64_t first) {
  for (std::size_t i = 0; i < count; ++i) {
    adam_element(step, params[i], grads[i], state.m[i], state.v[i], first + i);
  }
}

template <typename G>
bool unscale(G* grads, std::size_t count, float multiplier) {
  bool found = false;
  for (std::size_t i = 0; i < count; ++i) {
    if (unscale_element(grads[i], multiplier)) found = true;
  }
  return found;
}

}  // namespace

const KernelTable& cuda_bodies_on_host() {
  static constexpr KernelTable table{
      .name = "cuda_bodies",
      .quantise_signed = quantise<Map::Signed>,
      .quantise_unsigned = quantise<Map::Unsigned>,
      .dequantise_signed = dequantise<Map::Signed>,
      .dequantise_unsigned = dequantise<Map::Unsigned>,
      .adam8_f32 = adam8<float>,
      .adam8_bf16 = adam8<Bf16>,
      .adam8_f16 = adam8<Fp16>,
      .adam_f32 = adam<float, float>,
      .adam_bf16_state_f32 = adam<Bf16, float>,
      .adam_bf16_state_bf16 = adam<Bf16, Bf16>,
      .adam_f16_state_f32 = adam<Fp16, float>,
      .unscale_f32 = unscale<float>,
      .unscale_bf16 = unscale<Bf16>,
      .unscale_f16 = unscale<Fp16>,
  };
  return table;
}

}  // namespace memscale::kernels
