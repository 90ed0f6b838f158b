// The kernels' arithmetic in torch's operators, one rounding at a time (see
// adam.h), for devices that have no kernel of ours. Tensors are worked on in
// pieces of whole blocks, as [blocks, 256], the short last block by itself.
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/sqrt.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "memscale/core/ops/workspace/adam.h"
#include "memscale/core/techniques/optimizer_state.h"
#include "memscale/runtime/optimizer/optimizer_backend.h"

namespace memscale {
namespace {

using kernels::AdamStep;
using kernels::Map;

constexpr int64_t kColumns = kernels::kBlock;
static_assert(kStatePiece % kColumns == 0);

struct Piece {
  int64_t first, count;  // elements
  int64_t first_block, num_blocks;

  at::Tensor elements(const at::Tensor& tensor) const {
    return tensor.narrow(0, first, count).view({num_blocks, -1});
  }
  at::Tensor blocks(const at::Tensor& absmax) const {
    return absmax.narrow(0, first_block, num_blocks);
  }
};

template <typename F>
void over_pieces(int64_t count, F work) {
  const int64_t whole = count / kColumns * kColumns;
  for (int64_t first = 0; first < whole; first += kStatePiece) {
    const int64_t size = std::min(kStatePiece, whole - first);
    work(Piece{first, size, first / kColumns, size / kColumns});
  }
  if (whole < count) {
    work(Piece{whole, count - whole, whole / kColumns, 1});
  }
}

Codec make_codec(Map map, c10::Device device) {
  const at::ArrayRef<float> values(kernels::map_values(map), 256);
  const std::array<float, 255> borders = code_borders(map);
  return {map, at::tensor(values).to(device),
          at::tensor(at::ArrayRef<float>(borders)).to(device)};
}

at::Tensor decode(const Codec& codec, const at::Tensor& codes,
                  const at::Tensor& absmax) {
  at::Tensor values =
      at::index_select(codec.values, 0, codes.reshape({-1}).to(at::kInt))
          .view(codes.sizes());
  return values.mul_(absmax.unsqueeze(1));
}

// NaN, of a block without healthy values, is coded as 0.
void write_codes(const Codec& codec, at::Tensor scaled,
                 const at::Tensor& codes) {
  scaled.nan_to_num_(0.0);
  at::Tensor found = at::bucketize(scaled, codec.borders, /*out_int32=*/true,
                                   /*right=*/true);
  // See Note [positive stays positive] in kernels/blockwise.h. Not by a border,
  // which would be a denormal: where those are flushed it would be 0.
  if (codec.map == Map::Unsigned) found.clamp_min_(scaled.gt(0));
  codes.copy_(found);
}

void quantise_piece(const Codec& codec, const at::Tensor& values,
                    const at::Tensor& codes, const at::Tensor& absmax) {
  at::Tensor largest = at::abs(values).amax(1);
  largest.masked_fill_(at::isfinite(largest).logical_not_(),
                       std::numeric_limits<double>::quiet_NaN());
  largest.masked_fill_(largest.lt(std::numeric_limits<float>::min()), 0);
  absmax.copy_(largest);
  const at::Tensor inverse =
      at::reciprocal(largest).masked_fill_(largest.eq(0), 0);
  write_codes(codec, at::mul(values, inverse.unsqueeze(1)), codes);
}

// See Note [stochastic rounding] in kernels/element.h; the same hash in
// 64-bit integers, which no product here overflows.
at::Tensor draws(uint64_t seed, const Piece& piece, c10::Device device) {
  std::vector<int64_t> keys;
  for (int64_t i = 0; i < piece.num_blocks; ++i) {
    const auto block = static_cast<uint64_t>(piece.first_block + i);
    uint64_t x = seed + (block + 1) * 0x9E3779B97F4A7C15ULL;
    x = (x ^ x >> 30U) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ x >> 27U) * 0x94D049BB133111EBULL;
    keys.push_back(static_cast<int64_t>(x >> 32U));
  }
  constexpr int64_t kLow = 0xFFFFFFFF;
  const auto integers = at::TensorOptions(device).dtype(at::kLong);
  const at::Tensor offsets =
      at::arange(piece.count / piece.num_blocks, integers)
          .mul_(0x9E3779B9)
          .unsqueeze_(0);
  at::Tensor x = at::tensor(at::ArrayRef<int64_t>(keys))
                     .to(device)
                     .unsqueeze(1)
                     .add(offsets);
  const auto mix = [&](int64_t shift, int64_t factor) {
    x.bitwise_and_(kLow);
    x.bitwise_xor_(x.bitwise_right_shift(shift)).mul_(factor);
  };
  mix(16, 0x7FEB352D);
  mix(15, 0x846CA68B - (int64_t{1} << 32U));
  return x.bitwise_and_(kLow).bitwise_right_shift_(16).to(at::kInt);
}

// `value` as a bfloat16 above or below, still in float32.
at::Tensor round_stochastically(const at::Tensor& value, uint64_t seed,
                                const Piece& piece) {
  constexpr int64_t kUpperHalf = -65536;  // 0xFFFF0000
  at::Tensor bits = draws(seed, piece, value.device());
  bits.add_(value.view(at::kInt)).bitwise_and_(kUpperHalf);
  return at::where(at::isfinite(value), bits.view(at::kFloat), value);
}

// Rounded once: torch's float32 root is an ulp off for one in five on some
// CPUs. Of a device without float64, its own.
at::Tensor square_root(const at::Tensor& v) {
  return v.is_mps() ? at::sqrt(v) : v.to(at::kDouble).sqrt_();
}

// The formula of adam.h. `m` and `v` are float32 and replaced.
void update(const AdamStep& s, const at::Tensor& param, const at::Tensor& grad,
            at::Tensor m, at::Tensor v, const Piece& piece) {
  at::Tensor p = param.to(at::kFloat);  // itself, if it is float32
  at::Tensor g = grad.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  at::Tensor t = at::mul(p, s.l2);
  g.mul_(s.grad_multiplier).add_(t);
  m.mul_(s.beta1).add_(t.copy_(g).mul_(s.one_minus_beta1));
  v.mul_(s.beta2).add_(t.copy_(g).mul_(s.one_minus_beta2).mul_(g));
  at::Tensor denom = g.copy_(square_root(v));
  denom.mul_(s.inverse_bias_correction2_sqrt).add_(s.eps);
  t.copy_(m).mul_(s.step_size).div_(denom);
  p.mul_(s.decay).sub_(t);
  if (param.scalar_type() == at::kBFloat16 && s.stochastic_rounding) {
    g = t = denom = at::Tensor();  // their memory is for the draws
    param.copy_(round_stochastically(p, s.seed, piece));
  } else if (param.scalar_type() != at::kFloat) {
    param.copy_(p);
  }
}

void adam8(const AdamStep& step, const at::Tensor& param,
           const at::Tensor& grad, const Moments8& state, Codecs& codecs) {
  const Codec of_m = codecs.of(Map::Signed, param.device());
  const Codec of_v = codecs.of(Map::Unsigned, param.device());
  const at::Tensor params = flat(param);
  const at::Tensor grads = flat(grad);
  const at::Tensor all_m = flat(state.m);
  const at::Tensor all_v = flat(state.v);
  over_pieces(param.numel(), [&](const Piece& piece) {
    const at::Tensor m_codes = piece.elements(all_m);
    const at::Tensor v_codes = piece.elements(all_v);
    const at::Tensor m_absmax = piece.blocks(state.m_absmax);
    const at::Tensor v_absmax = piece.blocks(state.v_absmax);
    const at::Tensor m = decode(of_m, m_codes, m_absmax);
    const at::Tensor v = decode(of_v, v_codes, v_absmax);
    update(step, piece.elements(params), piece.elements(grads), m, v, piece);
    quantise_piece(of_m, m, m_codes, m_absmax);
    quantise_piece(of_v, v, v_codes, v_absmax);
  });
}

void adam(const AdamStep& step, const at::Tensor& param, const at::Tensor& grad,
          const Moments& state) {
  const at::Tensor params = flat(param);
  const at::Tensor grads = flat(grad);
  const at::Tensor m = flat(state.m);
  const at::Tensor v = flat(state.v);
  over_pieces(param.numel(), [&](const Piece& piece) {
    update(step, piece.elements(params), piece.elements(grads),
           piece.elements(m), piece.elements(v), piece);
  });
}

void quantise(const at::Tensor& values, Map map, const at::Tensor& codes,
              const at::Tensor& absmax) {
  const Codec codec = make_codec(map, values.device());
  const at::Tensor all = flat(values);
  const at::Tensor bytes = flat(codes);
  over_pieces(values.numel(), [&](const Piece& piece) {
    quantise_piece(codec, piece.elements(all), piece.elements(bytes),
                   piece.blocks(absmax));
  });
}

void dequantise(const at::Tensor& codes, const at::Tensor& absmax, Map map,
                const at::Tensor& values) {
  const Codec codec = make_codec(map, values.device());
  const at::Tensor all = flat(values);
  const at::Tensor bytes = flat(codes);
  over_pieces(values.numel(), [&](const Piece& piece) {
    piece.elements(all).copy_(
        decode(codec, piece.elements(bytes), piece.blocks(absmax)));
  });
}

void encode(const at::Tensor& values, const at::Tensor& absmax, Map map,
            const at::Tensor& codes) {
  const Codec codec = make_codec(map, values.device());
  const at::Tensor all = flat(values);
  const at::Tensor bytes = flat(codes);
  over_pieces(values.numel(), [&](const Piece& piece) {
    // Divided, not multiplied by an inverse that may be denormal.
    write_codes(codec,
                piece.elements(all).div(piece.blocks(absmax).unsqueeze(1)),
                piece.elements(bytes));
  });
}

bool unscale(const at::Tensor& grads, float multiplier) {
  at::Tensor all = flat(grads);
  all.mul_(multiplier);
  bool finite = true;
  over_pieces(grads.numel(), [&](const Piece& piece) {
    finite &= at::isfinite(piece.elements(all)).all().item<bool>();
  });
  return !finite;
}

}  // namespace

Codec Codecs::of(Map map, c10::Device device) {
  for (const Codec& codec : made_) {
    if (codec.map == map && codec.values.device() == device) return codec;
  }
  return made_.emplace_back(make_codec(map, device));
}

const OptimizerBackend& generic_backend() {
  static constexpr OptimizerBackend backend{adam8,  adam,       quantise,
                                            encode, dequantise, unscale};
  return backend;
}

std::array<float, 255> code_borders(Map map) {
  const float* values = kernels::map_values(map);
  std::array<float, 255> borders{};
  for (std::size_t code = 0; code < borders.size(); ++code) {
    const double middle = (double{values[code]} + values[code + 1]) / 2;
    auto first = static_cast<float>(middle);
    // A tie goes to the value nearer to zero: to the upper of negative ones.
    const bool keeps_tie = values[code + 1] <= 0;
    if (first < middle || (first == middle && !keeps_tie)) {
      first = std::nextafter(first, 2.0F);
    }
    borders[code] = first;
  }
  return borders;
}

}  // namespace memscale
