// The obvious version of every kernel, one element at a time: what the fast
// ones are held to, bit for bit. Nothing here is meant to be quick.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "memscale/kernels/kernels.h"

namespace memscale::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::array<float, 256> build_map(Map map) {
  const bool is_signed = map == Map::Signed;
  const int last = is_signed ? 6 : 7;
  std::array<float, 256> values{};
  std::size_t size = 0;
  int n = is_signed ? 1 : 2;
  for (int e = is_signed ? 0 : 1; e <= last; ++e, n *= 2) {
    const auto part =
        static_cast<float>(1 / (20 * n * std::pow(10.0, last - e)));
    for (int j = 0; j < n; ++j) {
      const float value = float(2 * n + 18 * j + 9) * part;
      values[size++] = value;
      if (is_signed) values[size++] = -value;
    }
  }
  values[size++] = 0;
  values[size++] = 1;
  std::ranges::sort(values);
  return values;
}

std::uint8_t nearest(const float* values, float x) {
  std::size_t best = 0;
  for (std::size_t i = 1; i < 256; ++i) {
    // In double the distances of two floats of such magnitudes are exact
    // wherever they are nearly equal.
    const double distance = std::abs(double{values[i]} - x);
    const double least = std::abs(double{values[best]} - x);
    const bool nearer_zero = std::abs(values[i]) < std::abs(values[best]);
    if (distance < least || (distance == least && nearer_zero)) best = i;
  }
  return static_cast<std::uint8_t>(best);
}

template <Map map>
void quantise(const float* values, std::size_t count, std::uint8_t* codes,
              float* absmax) {
  const float* table = map_values(map);
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t end = std::min(begin + kBlock, count);
    float largest = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const float magnitude = std::abs(values[i]);
      if (!std::isfinite(magnitude)) largest = kNan;
      if (magnitude > largest) largest = magnitude;
    }
    if (largest < std::numeric_limits<float>::min()) largest = 0;
    absmax[begin / kBlock] = largest;
    for (std::size_t i = begin; i < end; ++i) {
      const bool has_values = largest > 0;  // not zero, not NaN
      const float x = has_values ? values[i] * (1 / largest) : 0;
      codes[i] = nearest(table, x);
      // See Note [positive stays positive].
      if (map == Map::Unsigned && x > 0 && codes[i] == 0) codes[i] = 1;
    }
  }
}

template <Map map>
void dequantise(const std::uint8_t* codes, const float* absmax,
                std::size_t count, float* values) {
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = map_values(map)[codes[i]] * absmax[i / kBlock];
  }
}

float load(float value) { return value; }

float load(Bf16 value) {
  return std::bit_cast<float>(std::uint32_t{value.bits} << 16U);
}

float load(Fp16 value) {
  const int exponent = value.bits / 1024 % 32;
  const int fraction = value.bits % 1024;
  const float sign = value.bits >= 0x8000 ? -1.0F : 1.0F;
  if (exponent == 31) return fraction != 0 ? kNan : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(float(fraction), -24);
  return sign * std::ldexp(float(1024 + fraction), exponent - 25);
}

void store(float value, float& place) { place = value; }

void store(float value, Bf16& place) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t is_odd = bits >> 16U & 1U;
  const std::uint32_t rounded = std::isnan(value)
                                    ? 0x7FC00000U
                                    : bits + 0x7FFFU + is_odd;  // ties to even
  place.bits = static_cast<std::uint16_t>(rounded >> 16U);
}

void store(float value, Fp16& place) {
  const std::uint32_t sign = std::signbit(value) ? 0x8000U : 0;
  const float magnitude = std::abs(value);
  std::uint32_t bits = 0;
  if (std::isnan(value)) {
    place.bits = 0x7E00;
    return;
  }
  if (magnitude >= 65520) {  // halfway from the largest finite to the next
    bits = 0x7C00;
  } else if (magnitude >= 0x1p-14F) {
    const int exponent = std::ilogb(magnitude);
    // nearbyint: ties to even; 2048 carries into the exponent.
    const float fraction = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
    bits = static_cast<std::uint32_t>((exponent + 14) * 1024 + int(fraction));
  } else {
    bits =
        static_cast<std::uint32_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  }
  place.bits = static_cast<std::uint16_t>(sign | bits);
}

// See Note [stochastic rounding] in element.h.
std::uint32_t block_key(std::uint64_t seed, std::uint64_t block) {
  std::uint64_t x = seed + (block + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ x >> 30U) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ x >> 27U) * 0x94D049BB133111EBULL;
  return static_cast<std::uint32_t>(x >> 32U);
}

std::uint32_t draw(std::uint64_t seed, std::uint64_t element) {
  std::uint32_t x = block_key(seed, element / kBlock) +
                    static_cast<std::uint32_t>(element % kBlock) * 0x9E3779B9U;
  x = (x ^ x >> 16U) * 0x7FEB352DU;
  x = (x ^ x >> 15U) * 0x846CA68BU;
  return x >> 16U;
}

template <typename P>
void store_param(float value, P& place, const AdamStep& step,
                 std::uint64_t element) {
  store(value, place);
  if constexpr (std::is_same_v<P, Bf16>) {
    if (!step.stochastic_rounding || !std::isfinite(value)) return;
    const std::uint32_t bits =
        std::bit_cast<std::uint32_t>(value) + draw(step.seed, element);
    place.bits = static_cast<std::uint16_t>(bits >> 16U);
  }
}

// Adam of one element; returns the new parameter.
float update(const AdamStep& s, float param, float grad, float& m, float& v) {
  const float g = grad * s.grad_multiplier + s.l2 * param;
  m = s.beta1 * m + s.one_minus_beta1 * g;
  v = s.beta2 * v + s.one_minus_beta2 * g * g;
  const float denom = std::sqrt(v) * s.inverse_bias_correction2_sqrt + s.eps;
  return param * s.decay - s.step_size * m / denom;
}

template <typename P, typename S>
void adam(const AdamStep& step, P* params, const P* grads,
          const State<S>& state, std::size_t count, std::uint64_t first) {
  for (std::size_t i = 0; i < count; ++i) {
    float m = load(state.m[i]);
    float v = load(state.v[i]);
    const float param = update(step, load(params[i]), load(grads[i]), m, v);
    store(m, state.m[i]);
    store(v, state.v[i]);
    store_param(param, params[i], step, first + i);
  }
}

template <typename P>
void adam8(const AdamStep& step, P* params, const P* grads, const State8& state,
           std::size_t count, std::uint64_t first) {
  for (std::size_t begin = 0; begin < count; begin += kBlock) {
    const std::size_t size = std::min(kBlock, count - begin);
    const std::size_t block = begin / kBlock;
    float m[kBlock];
    float v[kBlock];
    dequantise<Map::Signed>(state.m + begin, state.m_absmax + block, size, m);
    dequantise<Map::Unsigned>(state.v + begin, state.v_absmax + block, size, v);
    adam(step, params + begin, grads + begin, State<float>{m, v}, size,
         first + begin);
    quantise<Map::Signed>(m, size, state.m + begin, state.m_absmax + block);
    quantise<Map::Unsigned>(v, size, state.v + begin, state.v_absmax + block);
  }
}

template <typename G>
bool unscale(G* grads, std::size_t count, float multiplier) {
  bool found = false;
  for (std::size_t i = 0; i < count; ++i) {
    store(load(grads[i]) * multiplier, grads[i]);
    if (!std::isfinite(load(grads[i]))) found = true;
  }
  return found;
}

}  // namespace

const float* map_values(Map map) {
  static const std::array<float, 256> signed_map = build_map(Map::Signed);
  static const std::array<float, 256> unsigned_map = build_map(Map::Unsigned);
  return map == Map::Signed ? signed_map.data() : unsigned_map.data();
}

const KernelTable& reference_kernels() {
  static constexpr KernelTable table{
      .name = "reference",
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
