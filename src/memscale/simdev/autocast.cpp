// torch.autocast("sim"): the operator lists that torch uses for CUDA, served
// by three boxed kernels. (torch's own macros are unboxed templates over all
// of ATen: 40 s to compile.)
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>

#include "memscale/simdev/device.h"
#include "memscale/simdev/registration.h"

// Declared here because ATen/autocast_mode.h includes all of ATen.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg,
                             c10::DeviceType device_type);
}  // namespace at::autocast

namespace memscale::sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

const c10::DispatchKeySet kAutocast(c10::DispatchKey::AutocastPrivateUse1);

bool is_eligible(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() &&
         tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
}

// Calls `use` with each tensor among the arguments and puts back what it
// returns.
void for_each_tensor(Stack* stack, size_t num_arguments,
                     const std::function<at::Tensor(const at::Tensor&)>& use) {
  for (size_t i = stack->size() - num_arguments; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor() && value.toTensor().defined()) {
      value = use(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        list.push_back(use(tensor));
      }
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(use(*tensor)) : std::nullopt);
      }
      value = list;
    }
  }
}

void call_cast_to(at::ScalarType dtype, const c10::OperatorHandle& op,
                  Stack* stack) {
  for_each_tensor(
      stack, op.schema().arguments().size(), [&](const at::Tensor& tensor) {
        return is_eligible(tensor)
                   ? at::autocast::cached_cast(dtype, tensor, kDeviceType)
                   : tensor;
      });
  op.callBoxed(stack);
}

void lower_precision(const c10::OperatorHandle& op, c10::DispatchKeySet,
                     Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  call_cast_to(at::autocast::get_autocast_dtype(kDeviceType), op, stack);
}

void float32(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  call_cast_to(at::kFloat, op, stack);
}

// Reductions with an optional output dtype: ask for float32 results, unless
// the caller named a dtype. norm() without one goes through casting.
void float32_result(const c10::OperatorHandle& op, c10::DispatchKeySet,
                    Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  const IValue& self = (*stack)[first];
  if (self.isTensor() && is_eligible(self.toTensor())) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      IValue& value = (*stack)[first + i];
      if (arguments[i].name() == "dtype" && value.isNone()) {
        value = at::kFloat;
      }
    }
  }
  op.callBoxed(stack);
}

// All arguments in the widest type among them.
void promote(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocast);
  at::ScalarType widest = at::autocast::get_autocast_dtype(kDeviceType);
  for_each_tensor(
      stack, op.schema().arguments().size(), [&](const at::Tensor& tensor) {
        if (is_eligible(tensor) && tensor.scalar_type() == at::kFloat) {
          widest = at::kFloat;
        }
        return tensor;
      });
  call_cast_to(widest, op, stack);
}

void refuse_binary_cross_entropy(const c10::OperatorHandle&,
                                 c10::DispatchKeySet, Stack*) {
  TORCH_CHECK(false,
              "torch.nn.functional.binary_cross_entropy and "
              "torch.nn.BCELoss are unsafe to autocast. Combine sigmoid and "
              "loss with binary_cross_entropy_with_logits, which is safe.");
}

constexpr const char* kLowerPrecision[] = {
    "_convolution",
    "_convolution.deprecated",
    "conv1d",
    "conv1d.padding",
    "conv2d",
    "conv2d.padding",
    "conv3d",
    "conv3d.padding",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d.input",
    "conv_transpose3d.input",
    "convolution",
    "prelu",
    "addmm",
    "addmv",
    "addr",
    "matmul",
    "einsum",
    "mm",
    "mv",
    "linalg_vecdot",
    "linear",
    "addbmm",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "linalg_multi_dot",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "lstm_cell",
    "gru_cell",
    "rnn_tanh_cell",
    "rnn_relu_cell",
    "lstm.input",
    "lstm.data",
    "_scaled_dot_product_flash_attention",
    "scaled_dot_product_attention"};

constexpr const char* kFloat32[] = {"acos",
                                    "asin",
                                    "cosh",
                                    "erfinv",
                                    "exp",
                                    "expm1",
                                    "log",
                                    "log10",
                                    "log2",
                                    "log1p",
                                    "reciprocal",
                                    "rsqrt",
                                    "sinh",
                                    "tan",
                                    "pow.Tensor_Scalar",
                                    "pow.Tensor_Tensor",
                                    "pow.Scalar",
                                    "softplus",
                                    "layer_norm",
                                    "native_layer_norm",
                                    "rms_norm",
                                    "group_norm",
                                    "frobenius_norm.dim",
                                    "nuclear_norm",
                                    "nuclear_norm.dim",
                                    "cosine_similarity",
                                    "poisson_nll_loss",
                                    "cosine_embedding_loss",
                                    "nll_loss",
                                    "nll_loss2d",
                                    "hinge_embedding_loss",
                                    "kl_div",
                                    "l1_loss",
                                    "smooth_l1_loss",
                                    "huber_loss",
                                    "mse_loss",
                                    "margin_ranking_loss",
                                    "multilabel_margin_loss",
                                    "soft_margin_loss",
                                    "triplet_margin_loss",
                                    "multi_margin_loss",
                                    "binary_cross_entropy_with_logits",
                                    "dist",
                                    "pdist",
                                    "cdist",
                                    "renorm",
                                    "logsumexp",
                                    "norm.Scalar",
                                    "norm.ScalarOpt_dim",
                                    "upsample_nearest1d",
                                    "_upsample_nearest_exact1d",
                                    "upsample_nearest2d",
                                    "_upsample_nearest_exact2d",
                                    "upsample_nearest3d",
                                    "_upsample_nearest_exact3d",
                                    "upsample_linear1d",
                                    "upsample_bilinear2d",
                                    "_upsample_bilinear2d_aa",
                                    "upsample_trilinear3d",
                                    "upsample_bicubic2d",
                                    "_upsample_bicubic2d_aa"};

constexpr const char* kFloat32Result[] = {"prod",
                                          "prod.dim_int",
                                          "softmax.int",
                                          "log_softmax.int",
                                          "cumprod",
                                          "cumsum",
                                          "linalg_vector_norm",
                                          "linalg_matrix_norm",
                                          "linalg_matrix_norm.str_ord",
                                          "sum",
                                          "sum.dim_IntList"};

constexpr const char* kPromote[] = {
    "addcdiv",     "addcmul", "atan2",        "bilinear",  "cross",
    "dot",         "vdot",    "grid_sampler", "index_put", "tensordot",
    "scatter_add", "cat",     "stack"};

template <auto* kernel, size_t N>
void register_all(torch::Library& library, const char* const (&names)[N]) {
  for (const char* name : names) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<kernel>());
  }
}

}  // namespace

void register_autocast() {
  static auto* aten = new torch::Library(torch::Library::IMPL, "aten",
                                         c10::DispatchKey::AutocastPrivateUse1,
                                         __FILE__, __LINE__);
  register_all<&lower_precision>(*aten, kLowerPrecision);
  register_all<&float32>(*aten, kFloat32);
  register_all<&float32_result>(*aten, kFloat32Result);
  register_all<&promote>(*aten, kPromote);
  aten->impl("binary_cross_entropy", torch::CppFunction::makeFromBoxedFunction<
                                         &refuse_binary_cross_entropy>());
  static auto* every_namespace = new torch::Library(
      torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1,
      __FILE__, __LINE__);
  every_namespace->fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace memscale::sim
