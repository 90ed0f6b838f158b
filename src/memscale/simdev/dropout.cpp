// Dropout as a card does it: one fused kernel that keeps a bool mask (1 byte
// an element; the CPU's own form keeps the noise, 4 bytes). Random draws and
// rounding are the CPU form's, so that both train bit-equally.
#include <ATen/core/Tensor.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_dropout_cpu_dispatch.h>
#include <torch/library.h>

#include <tuple>

#include "memscale/simdev/generator.h"
#include "memscale/simdev/host_call.h"
#include "memscale/simdev/registration.h"

namespace memscale::sim {
namespace {

std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p,
                                           std::optional<bool> train) {
  HostCall call;
  const at::Tensor x = call.alias(input);
  if (!train.value_or(true) || p == 0 || p == 1 || x.numel() == 0) {
    auto [output, mask] = at::cpu::native_dropout(x, p, train);
    return {call.adopt(output), call.adopt(mask)};
  }
  at::Tensor noise;
  {
    const UnchargedScope registers;
    noise = at::empty_like(x).bernoulli_(1 - p, host_generator({}));
  }
  at::Tensor mask = at::empty_like(x, x.options().dtype(at::kBool));
  mask.copy_(noise);
  noise.div_(1 - p);
  return {call.adopt(at::mul(x, noise)), call.adopt(mask)};
}

// `scale` is 1 / (1 - p); the CPU form divides by 1 - p, which rounds
// differently from multiplying by the rounded scale.
at::Tensor dropout_backward(const at::Tensor& grad, const at::Tensor& mask,
                            double scale) {
  HostCall call;
  const at::Tensor host_grad = call.alias(grad);
  const at::Tensor host_mask = call.alias(mask);
  at::Tensor noise;
  {
    const UnchargedScope registers;
    noise = host_mask.to(host_grad.scalar_type());
    if (scale != 0) noise.div_(1 / scale);
  }
  return call.adopt(at::mul(host_grad, noise));
}

}  // namespace

void register_dropout() {
  torch::Library& aten = device_kernels();
  aten.impl("native_dropout", TORCH_FN(dropout));
  aten.impl("native_dropout_backward", TORCH_FN(dropout_backward));
}

}  // namespace memscale::sim
