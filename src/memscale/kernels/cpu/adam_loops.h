#pragma once

#include "memscale/kernels/cpu/blocks.h"

// Adam over ranges, on the CPU, in one pass: state of 8 bits is widened, used
// and narrowed again a block at a time, on the stack. Anonymous: see codec.h.

namespace memscale::kernels {
namespace {

template <typename P>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<Bf16> = true;

// How a parameter is written, `i` being its place in its block.
struct ToNearest {
  template <typename P>
  void operator()(float value, P& place, std::size_t) const {
    store(value, place);
  }
};

struct AtRandom {
  std::uint32_t key;  // of the block
  void operator()(float value, Bf16& place, std::size_t i) const {
    store_stochastic(value, place, draw(key, static_cast<std::uint32_t>(i)));
  }
};

template <typename P, typename S, typename Write>
inline void adam_block(const AdamStep& step, P* __restrict params,
                       const P* __restrict grads, S* __restrict m,
                       S* __restrict v, std::size_t size, Write write) {
  const AdamStep s = step;  // so that stores to params cannot change it
  for (std::size_t i = 0; i < size; ++i) {
    float m_new = load(m[i]);
    float v_new = load(v[i]);
    const float param =
        update(s, load(params[i]), load(grads[i]), m_new, v_new);
    store(m_new, m[i]);
    store(v_new, v[i]);
    write(param, params[i], i);
  }
}

template <typename P, typename Write>
inline void adam8_block(const AdamStep& step, P* __restrict params,
                        const P* __restrict grads, std::uint8_t* __restrict m,
                        std::uint8_t* __restrict v, float* __restrict m_absmax,
                        float* __restrict v_absmax, std::size_t size,
                        Write write) {
  const AdamStep s = step;
  alignas(64) float wide_m[kBlock];
  alignas(64) float wide_v[kBlock];
  decode<Map::Signed>(m, *m_absmax, size, wide_m);
  decode<Map::Unsigned>(v, *v_absmax, size, wide_v);
  std::uint32_t m_largest = 0;
  std::uint32_t v_largest = 0;
  for (std::size_t i = 0; i < size; ++i) {
    float m_new = wide_m[i];
    float v_new = wide_v[i];
    const float param =
        update(s, load(params[i]), load(grads[i]), m_new, v_new);
    wide_m[i] = m_new;
    wide_v[i] = v_new;
    const std::uint32_t m_bits = magnitude_bits(m_new);
    const std::uint32_t v_bits = magnitude_bits(v_new);
    m_largest = m_bits > m_largest ? m_bits : m_largest;
    v_largest = v_bits > v_largest ? v_bits : v_largest;
    write(param, params[i], i);
  }
  encode_block<Map::Signed>(wide_m, block_scale(m_largest), size, m, m_absmax);
  encode_block<Map::Unsigned>(wide_v, block_scale(v_largest), size, v,
                              v_absmax);
}

// Calls body(begin, size, write) for each block of a range. A whole block's
// size is a constant to the compiler, if the call is inlined.
template <typename MakeWrite, typename Body>
inline void for_each_block(std::size_t count, const MakeWrite& make_write,
                           const Body& body) {
  std::size_t begin = 0;
  for (; begin + kBlock <= count; begin += kBlock) {
    body(begin, kBlock, make_write(begin));
  }
  if (begin < count) body(begin, count - begin, make_write(begin));
}

template <typename P, typename Body>
inline void for_each_block(const AdamStep& step, std::size_t count,
                           std::uint64_t first, const Body& body) {
  if constexpr (kIsBf16<P>) {
    if (step.stochastic_rounding) {
      const std::uint64_t first_block = first / kBlock;
      for_each_block(
          count,
          [&](std::size_t begin) {
            return AtRandom{block_key(step.seed, first_block + begin / kBlock)};
          },
          body);
      return;
    }
  }
  for_each_block(count, [](std::size_t) { return ToNearest{}; }, body);
}

template <typename P>
void adam8(const AdamStep& step, P* params, const P* grads, const State8& state,
           std::size_t count, std::uint64_t first) {
  for_each_block<P>(
      step, count, first, [&](std::size_t begin, std::size_t size, auto write) {
        adam8_block(step, params + begin, grads + begin, state.m + begin,
                    state.v + begin, state.m_absmax + begin / kBlock,
                    state.v_absmax + begin / kBlock, size, write);
      });
}

template <typename P, typename S>
void adam(const AdamStep& step, P* params, const P* grads,
          const State<S>& state, std::size_t count, std::uint64_t first) {
  for_each_block<P>(step, count, first,
                    [&](std::size_t begin, std::size_t size, auto write) {
                      adam_block(step, params + begin, grads + begin,
                                 state.m + begin, state.v + begin, size, write);
                    });
}

}  // namespace
}  // namespace memscale::kernels
