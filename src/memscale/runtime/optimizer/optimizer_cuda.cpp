// The CUDA kernels on torch's current stream. Nothing here needs CUDA to be
// compiled: a build without it has kernels/cuda/no_cuda.cpp, says so when
// first asked, and CUDA tensors take the generic path. Asked at the first call,
// not at import: counting devices starts the driver, which no fork survives.
//
// The launches are tested on a stand-in CUDA runtime (tests/cuda_standin), the
// kernels' arithmetic on the host. No card has run them.
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "memscale/kernels/cuda/kernels.h"
#include "memscale/runtime/optimizer/optimizer.h"
#include "memscale/runtime/optimizer/optimizer_backend.h"

namespace memscale {
namespace {

namespace cuda = kernels::cuda;

// Makes the tensor's device the current one; its current stream.
class Place final {
 public:
  explicit Place(const at::Tensor& tensor)
      : guard_(tensor.device()),
        stream_(c10::impl::VirtualGuardImpl(tensor.device().type())
                    .getStream(tensor.device())) {}
  void* stream() const { return stream_.native_handle(); }

 private:
  c10::DeviceGuard guard_;
  c10::Stream stream_;
};

// f(P*), typed as the tensor is.
template <typename F>
void with_data(const at::Tensor& tensor, F f) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return f(tensor.mutable_data_ptr<float>());
    case at::kBFloat16:
      return f(static_cast<kernels::Bf16*>(tensor.mutable_data_ptr()));
    case at::kHalf:
      return f(static_cast<kernels::Fp16*>(tensor.mutable_data_ptr()));
    default:
      refuse_type(tensor);
  }
}

void adam8(const kernels::AdamStep& step, const at::Tensor& param,
           const at::Tensor& grad, const Moments8& state, Codecs& /*codecs*/) {
  const Place place(param);
  const kernels::State8 data{state.m.mutable_data_ptr<uint8_t>(),
                             state.v.mutable_data_ptr<uint8_t>(),
                             state.m_absmax.mutable_data_ptr<float>(),
                             state.v_absmax.mutable_data_ptr<float>()};
  with_data(param, [&]<typename P>(P* params) {
    cuda::adam8(step, params, static_cast<const P*>(grad.const_data_ptr()),
                data, param.numel(), 0, place.stream());
  });
}

void adam(const kernels::AdamStep& step, const at::Tensor& param,
          const at::Tensor& grad, const Moments& state) {
  const Place place(param);
  const kernels::State<float> data{state.m.mutable_data_ptr<float>(),
                                   state.v.mutable_data_ptr<float>()};
  with_data(param, [&]<typename P>(P* params) {
    cuda::adam(step, params, static_cast<const P*>(grad.const_data_ptr()), data,
               param.numel(), 0, place.stream());
  });
}

void quantise(const at::Tensor& values, kernels::Map map,
              const at::Tensor& codes, const at::Tensor& absmax) {
  const Place place(values);
  cuda::quantise(map, values.const_data_ptr<float>(), values.numel(),
                 codes.mutable_data_ptr<uint8_t>(),
                 absmax.mutable_data_ptr<float>(), place.stream());
}

void dequantise(const at::Tensor& codes, const at::Tensor& absmax,
                kernels::Map map, const at::Tensor& values) {
  const Place place(values);
  cuda::dequantise(map, codes.const_data_ptr<uint8_t>(),
                   absmax.const_data_ptr<float>(), values.numel(),
                   values.mutable_data_ptr<float>(), place.stream());
}

bool unscale(const at::Tensor& grads, float multiplier) {
  const Place place(grads);
  const at::Tensor found = at::zeros({1}, grads.options().dtype(at::kFloat));
  with_data(grads, [&](auto* data) {
    cuda::unscale(data, grads.numel(), multiplier,
                  found.mutable_data_ptr<float>(), place.stream());
  });
  return found.item<float>() != 0;
}

}  // namespace

const OptimizerBackend& cuda_backend() {
  static const bool has_kernels = kernels::cuda::available();
  static const OptimizerBackend backend{
      adam8, adam, quantise, generic_backend().encode, dequantise, unscale};
  return has_kernels ? backend : generic_backend();
}

bool has_cuda_step() { return &cuda_backend() != &generic_backend(); }

}  // namespace memscale
