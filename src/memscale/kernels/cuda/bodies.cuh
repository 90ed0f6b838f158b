#pragma once

#include "memscale/kernels/codec.h"
#include "memscale/kernels/element.h"

// What the CUDA kernels do, apart from being launched: for one element, or for
// one block of 256 elements by a group of 256 threads. A group is
//
//   each(size, f)      f(i) for each element i of the block
//   largest(size, f)   the largest f(i), an unsigned integer, to every thread
//   first(i), second(i)   two floats of element i's own
//
// On the device (kernels.cu) element i is thread i's. The tests' group is a
// loop on the host: so these bodies are held to the reference without a device.
// Anonymous: see codec.h.

namespace memscale::kernels {
namespace {

// The maps, wherever the code runs.
struct Codecs {
  const Codec& m;
  const Codec& v;
};

template <Map map>
MEMSCALE_DEVICE inline std::uint8_t code_of(const Codec& codec, float value,
                                            float inverse) {
  constexpr bool is_signed = map == Map::Signed;
  if (inverse == 0) return is_signed ? kSignedZero : kUnsignedZero;
  const float x = value * inverse;
  const bool counts = is_signed || x > 0;
  const std::uint32_t bits = counts ? magnitude_bits(x) : 0;
  const std::uint32_t steps = steps_of(codec, bucket_of(bits), bits);
  return is_signed ? signed_code(steps, value < 0)
                   : static_cast<std::uint8_t>(steps);
}

template <Map map, typename Group>
MEMSCALE_DEVICE inline void quantise_block(Group& group, const Codec& codec,
                                           const float* values,
                                           std::size_t size,
                                           std::uint8_t* codes, float* absmax) {
  const BlockScale scale = block_scale(group.largest(
      size, [&](std::size_t i) { return magnitude_bits(values[i]); }));
  group.each(size, [&](std::size_t i) {
    codes[i] = code_of<map>(codec, values[i], scale.inverse);
    if (i == 0) *absmax = scale.absmax;
  });
}

template <typename P>
MEMSCALE_DEVICE inline void store_param(const AdamStep&, float value, P& place,
                                        std::uint64_t) {
  store(value, place);
}

MEMSCALE_DEVICE inline void store_param(const AdamStep& step, float value,
                                        Bf16& place, std::uint64_t element) {
  if (!step.stochastic_rounding) return store(value, place);
  const std::uint32_t key = block_key(step.seed, element / kBlock);
  store_stochastic(value, place,
                   draw(key, static_cast<std::uint32_t>(element % kBlock)));
}

template <typename P, typename Group>
MEMSCALE_DEVICE inline void adam8_block(Group& group, const Codecs& codecs,
                                        const AdamStep& step, P* params,
                                        const P* grads, const State8& state,
                                        std::size_t size, std::uint64_t first) {
  group.each(size, [&](std::size_t i) {
    float m = codecs.m.values[state.m[i]] * *state.m_absmax;
    float v = codecs.v.values[state.v[i]] * *state.v_absmax;
    const float param = update(step, load(params[i]), load(grads[i]), m, v);
    store_param(step, param, params[i], first + i);
    group.first(i) = m;
    group.second(i) = v;
  });
  // largest() waits for all threads: none reads the old absmax after it.
  const BlockScale m_scale = block_scale(group.largest(
      size, [&](std::size_t i) { return magnitude_bits(group.first(i)); }));
  const BlockScale v_scale = block_scale(group.largest(
      size, [&](std::size_t i) { return magnitude_bits(group.second(i)); }));
  group.each(size, [&](std::size_t i) {
    state.m[i] =
        code_of<Map::Signed>(codecs.m, group.first(i), m_scale.inverse);
    state.v[i] =
        code_of<Map::Unsigned>(codecs.v, group.second(i), v_scale.inverse);
    if (i == 0) {
      *state.m_absmax = m_scale.absmax;
      *state.v_absmax = v_scale.absmax;
    }
  });
}

template <typename P, typename S>
MEMSCALE_DEVICE inline void adam_element(const AdamStep& step, P& param, P grad,
                                         S& m, S& v, std::uint64_t element) {
  float m_new = load(m);
  float v_new = load(v);
  const float result = update(step, load(param), load(grad), m_new, v_new);
  store(m_new, m);
  store(v_new, v);
  store_param(step, result, param, element);
}

// True if the result is not finite.
template <typename G>
MEMSCALE_DEVICE inline bool unscale_element(G& grad, float multiplier) {
  store(load(grad) * multiplier, grad);
  return stored_magnitude(grad) >= stored_infinity(grad);
}

}  // namespace
}  // namespace memscale::kernels
