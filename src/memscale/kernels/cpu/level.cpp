// All kernels for one CPU level: plain loops, left to the vectorizer. The table
// is the object's only symbol that others can see.
#include "memscale/kernels/cpu/level.h"

#include "memscale/kernels/cpu/adam_loops.h"

#define MEMSCALE_JOIN_(a, b) a##b
#define MEMSCALE_JOIN(a, b) MEMSCALE_JOIN_(a, b)
#define MEMSCALE_STRING_(a) #a
#define MEMSCALE_STRING(a) MEMSCALE_STRING_(a)

namespace memscale::kernels {
namespace {

template <typename G>
bool unscale(G* grads, std::size_t count, float multiplier) {
  // Magnitudes as integers: infinity and NaN are the largest.
  std::uint32_t largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    G result;
    store(load(grads[i]) * multiplier, result);
    grads[i] = result;
    const std::uint32_t bits = stored_magnitude(result);
    largest = bits > largest ? bits : largest;
  }
  return largest >= stored_infinity(G{});
}

}  // namespace

const KernelTable MEMSCALE_JOIN(MEMSCALE_CPU_LEVEL, _table) = {
    .name = MEMSCALE_STRING(MEMSCALE_CPU_LEVEL),
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

}  // namespace memscale::kernels
