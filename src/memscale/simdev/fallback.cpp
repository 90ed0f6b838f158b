// Every operator that has no kernel of its own on the device runs the CPU's.
// See Note [Zero-copy host calls].
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <string_view>

#include "memscale/simdev/generator.h"
#include "memscale/simdev/host_call.h"
#include "memscale/simdev/registration.h"

namespace memscale::sim {
namespace {

using c10::IValue;
using torch::jit::Stack;

// Operators that take CPU tensors beside device tensors by contract.
constexpr std::array kMixedDevices = std::to_array<std::string_view>(
    {"aten::index", "aten::index_put", "aten::index_put_",
     "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put",
     "aten::_pack_padded_sequence_backward", "aten::_ctc_loss",
     "aten::_ctc_loss_backward"});

template <size_t N>
bool contains(const std::array<std::string_view, N>& names,
              std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// A CPU tensor of one element may meet device tensors, as on any accelerator.
void check_device(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_privateuseone() || tensor.dim() == 0) {
    return;
  }
  TORCH_CHECK(
      contains(kMixedDevices, op.operator_name().name),
      "Expected all tensors to be on the same device, but found at least two "
      "devices, ",
      kDevice, " and ", tensor.device(), "! (in a call of ", op.operator_name(),
      ")");
}

// One tensor argument, or list of them, dressed for the CPU.
IValue to_host(const c10::OperatorHandle& op, HostCall& call,
               const IValue& value) {
  const auto dress = [&](const at::Tensor& tensor) {
    check_device(op, tensor);
    return call.alias(tensor);
  };
  if (value.isTensor()) return dress(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> host;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      host.push_back(dress(tensor));
    }
    return host;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> host;
    for (const std::optional<at::Tensor>& tensor :
         value.toOptionalTensorVector()) {
      host.push_back(tensor ? std::optional(dress(*tensor)) : std::nullopt);
    }
    return host;
  }
  return value;
}

IValue to_device(HostCall& call, const IValue& value) {
  if (value.isTensor()) return call.adopt(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> device;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      device.push_back(call.adopt(tensor));
    }
    return device;
  }
  return value;
}

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  return type->kind() == c10::TypeKind::GeneratorType;
}

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet,
                 Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t num_arguments = schema.arguments().size();
  const size_t first = stack->size() - num_arguments;

  HostCall call;
  bool generator_given = false;
  for (size_t i = 0; i < num_arguments; ++i) {
    IValue& value = (*stack)[first + i];
    if (is_generator(schema.arguments()[i])) {
      value = host_generator(value.toOptional<at::Generator>());
      generator_given = true;
    } else if (value.isDevice() && value.toDevice().type() == kDeviceType) {
      value = c10::Device(c10::DeviceType::CPU);
    } else {
      value = to_host(op, call, value);
    }
  }

  {
    // The call is one device kernel: neither autograd nor autocast of the CPU
    // may see the operators that it is made of.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_cpu_autocast(
        c10::DispatchKey::AutocastCPU);
    std::optional<BorrowDefaultGenerator> generator;
    if (!generator_given && op.hasTag(at::Tag::nondeterministic_seeded)) {
      generator.emplace();
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }

  call.finish();
  const size_t num_returns = schema.returns().size();
  for (size_t i = stack->size() - num_returns; i < stack->size(); ++i) {
    (*stack)[i] = to_device(call, (*stack)[i]);
  }
}

// Note [Composite kernels hide the fallback]
// An operator with a CompositeExplicitAutograd kernel never reaches a backend
// fallback, though the CPU may have a kernel of its own that computes
// something else (native_layer_norm does). Nor does one that has both a
// CompositeImplicitAutograd and a CPU kernel (mish_backward). So the fallback
// is registered for each of them by name, but for
// - views, which touch no data and must keep the device's storage,
// - factories (a device argument): made of empty() and in-place operators,
// - the ones below, whose composite form is right for a device.
constexpr std::array kKeepComposite = std::to_array<std::string_view>(
    {"aten::_pack_padded_sequence", "aten::record_stream"});

bool has_device_argument(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     [](const c10::Argument& argument) {
                       return argument.name() == "device";
                     });
}

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(),
                     [](const c10::Argument& result) {
                       const c10::AliasInfo* alias = result.alias_info();
                       return alias != nullptr && !alias->isWrite();
                     });
}

bool hides_fallback(const c10::OperatorHandle& op) {
  const auto has = [&](c10::DispatchKey key) {
    return op.hasKernelForDispatchKey(key);
  };
  const bool composite =
      has(c10::DispatchKey::CompositeExplicitAutograd) ||
      has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
      (has(c10::DispatchKey::CompositeImplicitAutograd) &&
       has(c10::DispatchKey::CPU));
  return composite && !has(c10::DispatchKey::PrivateUse1) &&
         !contains(kKeepComposite, op.operator_name().name) &&
         !is_view(op.schema()) && !has_device_argument(op.schema());
}

}  // namespace

void register_fallback() {
  static auto* every_namespace =
      new torch::Library(torch::Library::IMPL, "_",
                         c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  every_namespace->fallback(
      torch::CppFunction::makeFromBoxedFunction<&run_on_host>());

  static auto* aten =
      new torch::Library(torch::Library::IMPL, "aten",
                         c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.getNamespace().has_value() || *name.getNamespace() != "aten") {
      continue;
    }
    const auto op = dispatcher.findOp(name);
    if (!op.has_value() || !op->hasSchema() || !hides_fallback(*op)) continue;
    const std::string qualified = c10::toString(name);
    aten->impl(qualified.c_str(),
               torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

}  // namespace memscale::sim
