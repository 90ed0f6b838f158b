// The operators: what they check, and how they are known to torch.
//
// Note [Which path runs where]
// The CPU and CUDA keys have the kernels. CompositeExplicitAutograd has the
// generic path, and so every other device takes it until someone registers a
// kernel for that device's own key. An operator with a
// CompositeExplicitAutograd kernel never reaches a backend fallback, so the
// simulated device, whose fallback would run the CPU's kernel, takes the
// generic path as a card without kernels would. The Meta key does nothing: fake
// tensors have no values, and the steps no temporaries.
#include "memscale/runtime/optimizer/optimizer.h"

#include <ATen/core/stack.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <mutex>
#include <optional>

#include "memscale/core/techniques/optimizer_state.h"
#include "memscale/runtime/optimizer/optimizer_backend.h"

namespace memscale {
namespace {

using kernels::Map;

static_assert(kernels::kBlock == kStateBlock);

Map map_of(bool is_signed) { return is_signed ? Map::Signed : Map::Unsigned; }

// In-place operators of torch tell autograd; so must ours.
void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void check_state(const at::Tensor& tensor, const char* name,
                 const at::Tensor& param, at::ScalarType type, int64_t count) {
  TORCH_CHECK_VALUE(
      tensor.device() == param.device() && tensor.scalar_type() == type &&
          tensor.numel() == count && tensor.is_non_overlapping_and_dense(),
      name, " must be ", count, " dense elements of ", type, " on ",
      param.device(), ", got ", tensor.numel(), " of ", tensor.scalar_type(),
      " on ", tensor.device());
}

int64_t num_blocks(const at::Tensor& tensor) {
  return static_cast<int64_t>(kernels::num_blocks(tensor.numel()));
}

bool lie_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.strides() == b.strides() || (a.is_contiguous() && b.is_contiguous());
}

// `grad` as the kernels want it: itself wherever autograd made it, else a copy.
at::Tensor grad_like(const at::Tensor& grad, const at::Tensor& param) {
  if (grad.scalar_type() == param.scalar_type() && lie_alike(grad, param)) {
    return grad;
  }
  at::Tensor copy = at::empty_like(param);
  copy.copy_(grad);
  return copy;
}

// What all parameters of a call share.
struct Call {
  at::TensorList params, grads, steps;
  kernels::AdamOptions options;
  double grad_multiplier;
  bool stochastic_rounding;
  at::IntArrayRef seeds;

  // Steps each parameter; `one(coefficients, param, grad, i)` does the work.
  template <typename F>
  void run(F one) const {
    TORCH_CHECK_VALUE(
        grads.size() == params.size() && steps.size() == params.size() &&
            (!stochastic_rounding || seeds.size() == params.size()),
        "grads, steps and seeds must be as many as params, got ", grads.size(),
        ", ", steps.size(), " and ", seeds.size(), " of ", params.size());
    for (size_t i = 0; i < params.size(); ++i) {
      const at::Tensor& param = params[i];
      const at::Tensor& grad = grads[i];
      TORCH_CHECK_VALUE(
          grad.sizes() == param.sizes() && grad.device() == param.device(),
          "grad must be of the parameter's shape and device, ", param.sizes(),
          " on ", param.device(), ", got ", grad.sizes(), " on ",
          grad.device());
      const at::Tensor dense =
          param.is_non_overlapping_and_dense() ? param : param.contiguous();
      TORCH_CHECK_VALUE(
          steps[i].is_cpu() && steps[i].scalar_type() == at::kFloat,
          "step must be a float32 tensor on the CPU, got ",
          steps[i].scalar_type(), " on ", steps[i].device());
      float& number = *steps[i].mutable_data_ptr<float>();
      const auto next = static_cast<int64_t>(number) + 1;
      kernels::AdamStep step =
          kernels::adam_step(options, next, grad_multiplier);
      step.stochastic_rounding = stochastic_rounding;
      if (stochastic_rounding) {
        step.seed = static_cast<uint64_t>(seeds[i]) << 32U |
                    (static_cast<uint64_t>(next) & 0xFFFFFFFFU);
      }
      one(step, dense, grad_like(grad, dense), i);
      if (!dense.is_same(param)) param.copy_(dense);
      number = static_cast<float>(next);
      bump_version(steps[i]);
      bump_version(param);
    }
  }
};

// GradScaler's way to skip a step.
bool is_set(const std::optional<at::Tensor>& found_inf) {
  return found_inf.has_value() && found_inf->item<float>() != 0;
}

double inverse_of(const std::optional<at::Tensor>& scale) {
  return scale.has_value() ? 1.0 / scale->item<double>() : 1.0;
}

using Backend = const OptimizerBackend& (*)();

template <Backend backend>
void adam8_(at::TensorList params, at::TensorList grads, at::TensorList m,
            at::TensorList v, at::TensorList m_absmax, at::TensorList v_absmax,
            at::TensorList steps, double lr, double beta1, double beta2,
            double eps, double weight_decay, bool decoupled, bool maximize,
            const std::optional<at::Tensor>& grad_scale,
            const std::optional<at::Tensor>& found_inf,
            bool stochastic_rounding, at::IntArrayRef seeds) {
  if (is_set(found_inf)) return;
  const Call call{params,
                  grads,
                  steps,
                  {lr, beta1, beta2, eps, weight_decay, decoupled, maximize},
                  inverse_of(grad_scale),
                  stochastic_rounding,
                  seeds};
  Codecs codecs;
  call.run([&](const kernels::AdamStep& step, const at::Tensor& param,
               const at::Tensor& grad, size_t i) {
    const Moments8 state{m[i], v[i], m_absmax[i], v_absmax[i]};
    check_state(state.m, "m", param, at::kByte, param.numel());
    check_state(state.v, "v", param, at::kByte, param.numel());
    check_state(state.m_absmax, "m_absmax", param, at::kFloat,
                num_blocks(param));
    check_state(state.v_absmax, "v_absmax", param, at::kFloat,
                num_blocks(param));
    backend().adam8(step, param, grad, state, codecs);
    for (const auto& each : {state.m, state.v, state.m_absmax, state.v_absmax})
      bump_version(each);
  });
}

template <Backend backend>
void adam_(at::TensorList params, at::TensorList grads, at::TensorList m,
           at::TensorList v, at::TensorList steps, double lr, double beta1,
           double beta2, double eps, double weight_decay, bool decoupled,
           bool maximize, const std::optional<at::Tensor>& grad_scale,
           const std::optional<at::Tensor>& found_inf, bool stochastic_rounding,
           at::IntArrayRef seeds) {
  if (is_set(found_inf)) return;
  const Call call{params,
                  grads,
                  steps,
                  {lr, beta1, beta2, eps, weight_decay, decoupled, maximize},
                  inverse_of(grad_scale),
                  stochastic_rounding,
                  seeds};
  call.run([&](const kernels::AdamStep& step, const at::Tensor& param,
               const at::Tensor& grad, size_t i) {
    check_state(m[i], "m", param, at::kFloat, param.numel());
    check_state(v[i], "v", param, at::kFloat, param.numel());
    TORCH_CHECK_VALUE(lie_alike(m[i], param) && lie_alike(v[i], param),
                      "m and v must lie as the parameter, strides ",
                      param.strides(), ", got ", m[i].strides(), " and ",
                      v[i].strides());
    backend().adam(step, param, grad, {m[i], v[i]});
    bump_version(m[i]);
    bump_version(v[i]);
  });
}

void check_codes(const at::Tensor& codes, const at::Tensor& absmax,
                 const at::Tensor& values) {
  check_state(values, "values", values, at::kFloat, values.numel());
  check_state(codes, "codes", values, at::kByte, values.numel());
  check_state(absmax, "absmax", values, at::kFloat, num_blocks(values));
}

template <Backend backend>
void quantise_(const at::Tensor& codes, const at::Tensor& absmax,
               const at::Tensor& values, bool is_signed) {
  check_codes(codes, absmax, values);
  backend().quantise(values, map_of(is_signed), codes, absmax);
  bump_version(codes);
  bump_version(absmax);
}

template <Backend backend>
void encode_(const at::Tensor& codes, const at::Tensor& absmax,
             const at::Tensor& values, bool is_signed) {
  check_codes(codes, absmax, values);
  backend().encode(values, absmax, map_of(is_signed), codes);
  bump_version(codes);
}

template <Backend backend>
void dequantise_(const at::Tensor& values, const at::Tensor& codes,
                 const at::Tensor& absmax, bool is_signed) {
  check_codes(codes, absmax, values);
  backend().dequantise(codes, absmax, map_of(is_signed), values);
  bump_version(values);
}

template <Backend backend>
void unscale_(at::TensorList grads, const at::Tensor& found_inf,
              double multiplier) {
  bool found = false;
  for (const at::Tensor& grad : grads) {
    const at::Tensor dense =
        grad.is_non_overlapping_and_dense() ? grad : grad.contiguous();
    found |= backend().unscale(dense, static_cast<float>(multiplier));
    if (!dense.is_same(grad)) grad.copy_(dense);
    bump_version(grad);
  }
  if (found) found_inf.fill_(1);
}

void do_nothing(const c10::OperatorHandle& op, c10::DispatchKeySet,
                torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

template <Backend backend>
void register_backend(torch::Library& library) {
  library.impl("adam8_", adam8_<backend>);
  library.impl("adam_", adam_<backend>);
  library.impl("quantise_", quantise_<backend>);
  library.impl("encode_", encode_<backend>);
  library.impl("dequantise_", dequantise_<backend>);
  library.impl("unscale_", unscale_<backend>);
}

constexpr const char* kSchemas[] = {
    "adam8_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] m, "
    "Tensor(c!)[] v, Tensor(d!)[] m_absmax, Tensor(e!)[] v_absmax, "
    "Tensor(f!)[] steps, *, float lr, float beta1, float beta2, float eps, "
    "float weight_decay, bool decoupled, bool maximize=False, "
    "Tensor? grad_scale=None, Tensor? found_inf=None, "
    "bool stochastic_rounding=False, int[] seeds=[]) -> ()",
    "adam_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] m, "
    "Tensor(c!)[] v, Tensor(d!)[] steps, *, float lr, float beta1, "
    "float beta2, float eps, float weight_decay, bool decoupled, "
    "bool maximize=False, Tensor? grad_scale=None, Tensor? found_inf=None, "
    "bool stochastic_rounding=False, int[] seeds=[]) -> ()",
    "quantise_(Tensor(a!) codes, Tensor(b!) absmax, Tensor values, "
    "bool is_signed) -> ()",
    "encode_(Tensor(a!) codes, Tensor absmax, Tensor values, "
    "bool is_signed) -> ()",
    "dequantise_(Tensor(a!) values, Tensor codes, Tensor absmax, "
    "bool is_signed) -> ()",
    "unscale_(Tensor(a!)[] grads, Tensor(b!) found_inf, float multiplier) "
    "-> ()",
};

// A library lives as long as its operators: to the end of the process.
torch::Library& new_library(torch::Library::Kind kind,
                            std::optional<c10::DispatchKey> key) {
  return *new torch::Library(kind, "memscale", key, __FILE__, __LINE__);
}

}  // namespace

at::Tensor flat(const at::Tensor& tensor) {
  return tensor.as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

void refuse_type(const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(false, "param must be float32, bfloat16 or float16, got ",
                   tensor.scalar_type());
}

void register_optimizer_ops() {
  static std::once_flag once;
  std::call_once(once, [] {
    torch::Library& schemas = new_library(torch::Library::DEF, std::nullopt);
    for (const char* schema : kSchemas) schemas.def(schema);
    register_backend<cpu_backend>(
        new_library(torch::Library::IMPL, c10::DispatchKey::CPU));
    register_backend<cuda_backend>(
        new_library(torch::Library::IMPL, c10::DispatchKey::CUDA));
    register_backend<generic_backend>(new_library(
        torch::Library::IMPL, c10::DispatchKey::CompositeExplicitAutograd));
    torch::Library& meta =
        new_library(torch::Library::IMPL, c10::DispatchKey::Meta);
    for (const char* name : {"adam8_", "adam_", "quantise_", "encode_",
                             "dequantise_", "unscale_"}) {
      meta.impl(name, torch::CppFunction::makeFromBoxedFunction<&do_nothing>());
    }
  });
}

}  // namespace memscale
