// The kernels of this CPU over torch's threads. Ranges are split between
// blocks, so that any number of threads gives the same bits.
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>

#include "memscale/kernels/kernels.h"
#include "memscale/runtime/optimizer/optimizer_backend.h"

namespace memscale {
namespace {

using kernels::Bf16;
using kernels::Fp16;
using kernels::kBlock;

// Below this a second thread costs more than it gives: some 50 us of work.
constexpr int64_t kGrainBlocks = 128;

// `work(first, count)` over ranges of elements.
template <typename F>
void over_blocks(int64_t num_elements, F work) {
  const auto total = static_cast<std::size_t>(num_elements);
  at::parallel_for(0, static_cast<int64_t>(kernels::num_blocks(total)),
                   kGrainBlocks, [&](int64_t begin, int64_t end) {
                     const std::size_t first =
                         static_cast<std::size_t>(begin) * kBlock;
                     const std::size_t last = std::min(
                         static_cast<std::size_t>(end) * kBlock, total);
                     work(first, last - first);
                   });
}

template <typename P>
void adam8_as(kernels::Adam8<P>* kernel, const kernels::AdamStep& step,
              const at::Tensor& param, const at::Tensor& grad,
              const Moments8& state) {
  auto* params = static_cast<P*>(param.mutable_data_ptr());
  const auto* grads = static_cast<const P*>(grad.const_data_ptr());
  const kernels::State8 all{state.m.mutable_data_ptr<uint8_t>(),
                            state.v.mutable_data_ptr<uint8_t>(),
                            state.m_absmax.mutable_data_ptr<float>(),
                            state.v_absmax.mutable_data_ptr<float>()};
  over_blocks(param.numel(), [&](std::size_t first, std::size_t count) {
    const std::size_t block = first / kBlock;
    kernel(step, params + first, grads + first,
           {all.m + first, all.v + first, all.m_absmax + block,
            all.v_absmax + block},
           count, first);
  });
}

template <typename P>
void adam_as(kernels::Adam<P, float>* kernel, const kernels::AdamStep& step,
             const at::Tensor& param, const at::Tensor& grad,
             const Moments& state) {
  auto* params = static_cast<P*>(param.mutable_data_ptr());
  const auto* grads = static_cast<const P*>(grad.const_data_ptr());
  auto* m = state.m.mutable_data_ptr<float>();
  auto* v = state.v.mutable_data_ptr<float>();
  over_blocks(param.numel(), [&](std::size_t first, std::size_t count) {
    kernel(step, params + first, grads + first, {m + first, v + first}, count,
           first);
  });
}

void adam8(const kernels::AdamStep& step, const at::Tensor& param,
           const at::Tensor& grad, const Moments8& state, Codecs& /*codecs*/) {
  const kernels::KernelTable& table = kernels::kernels();
  switch (param.scalar_type()) {
    case at::kFloat:
      return adam8_as(table.adam8_f32, step, param, grad, state);
    case at::kBFloat16:
      return adam8_as(table.adam8_bf16, step, param, grad, state);
    case at::kHalf:
      return adam8_as(table.adam8_f16, step, param, grad, state);
    default:
      refuse_type(param);
  }
}

void adam(const kernels::AdamStep& step, const at::Tensor& param,
          const at::Tensor& grad, const Moments& state) {
  const kernels::KernelTable& table = kernels::kernels();
  switch (param.scalar_type()) {
    case at::kFloat:
      return adam_as(table.adam_f32, step, param, grad, state);
    case at::kBFloat16:
      return adam_as(table.adam_bf16_state_f32, step, param, grad, state);
    case at::kHalf:
      return adam_as(table.adam_f16_state_f32, step, param, grad, state);
    default:
      refuse_type(param);
  }
}

void quantise(const at::Tensor& values, kernels::Map map,
              const at::Tensor& codes, const at::Tensor& absmax) {
  const kernels::KernelTable& table = kernels::kernels();
  kernels::Quantise* kernel = map == kernels::Map::Signed
                                  ? table.quantise_signed
                                  : table.quantise_unsigned;
  const auto* from = values.const_data_ptr<float>();
  auto* to = codes.mutable_data_ptr<uint8_t>();
  auto* scales = absmax.mutable_data_ptr<float>();
  over_blocks(values.numel(), [&](std::size_t first, std::size_t count) {
    kernel(from + first, count, to + first, scales + first / kBlock);
  });
}

void encode(const at::Tensor& values, const at::Tensor& absmax,
            kernels::Map map, const at::Tensor& codes) {
  const std::array<float, 255> borders = code_borders(map);
  const auto* from = values.const_data_ptr<float>();
  const auto* scales = absmax.const_data_ptr<float>();
  auto* to = codes.mutable_data_ptr<uint8_t>();
  over_blocks(values.numel(), [&](std::size_t first, std::size_t count) {
    for (std::size_t i = first; i < first + count; ++i) {
      // Divided, not multiplied by an inverse that may be denormal. NaN, of a
      // block without healthy values, is coded as 0.
      const float scaled = from[i] / scales[i / kBlock];
      const float number = std::isnan(scaled) ? 0.0F : scaled;
      to[i] = static_cast<uint8_t>(
          std::upper_bound(borders.begin(), borders.end(), number) -
          borders.begin());
      // See Note [positive stays positive] in kernels/blockwise.h.
      if (map == kernels::Map::Unsigned && number > 0 && to[i] == 0) to[i] = 1;
    }
  });
}

void dequantise(const at::Tensor& codes, const at::Tensor& absmax,
                kernels::Map map, const at::Tensor& values) {
  const kernels::KernelTable& table = kernels::kernels();
  kernels::Dequantise* kernel = map == kernels::Map::Signed
                                    ? table.dequantise_signed
                                    : table.dequantise_unsigned;
  const auto* from = codes.const_data_ptr<uint8_t>();
  const auto* scales = absmax.const_data_ptr<float>();
  auto* to = values.mutable_data_ptr<float>();
  over_blocks(values.numel(), [&](std::size_t first, std::size_t count) {
    kernel(from + first, scales + first / kBlock, count, to + first);
  });
}

template <typename G>
bool unscale_as(kernels::Unscale<G>* kernel, const at::Tensor& grads,
                float multiplier) {
  auto* data = static_cast<G*>(grads.mutable_data_ptr());
  std::atomic<bool> found = false;
  over_blocks(grads.numel(), [&](std::size_t first, std::size_t count) {
    if (kernel(data + first, count, multiplier)) found = true;
  });
  return found;
}

bool unscale(const at::Tensor& grads, float multiplier) {
  const kernels::KernelTable& table = kernels::kernels();
  switch (grads.scalar_type()) {
    case at::kFloat:
      return unscale_as(table.unscale_f32, grads, multiplier);
    case at::kBFloat16:
      return unscale_as(table.unscale_bf16, grads, multiplier);
    case at::kHalf:
      return unscale_as(table.unscale_f16, grads, multiplier);
    default:
      refuse_type(grads);
  }
}

}  // namespace

const OptimizerBackend& cpu_backend() {
  static constexpr OptimizerBackend backend{adam8,  adam,       quantise,
                                            encode, dequantise, unscale};
  return backend;
}

}  // namespace memscale
