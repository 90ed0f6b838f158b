// Every operator that has no kernel of its own on the device runs the CPU's.
// See Note [Zero-copy host calls].
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

// Arguments that may be CPU tensors of any shape beside device tensors.
struct HostArgument {
  std::string_view op;
  std::string_view argument;
};
constexpr std::array kHostArguments = std::to_array<HostArgument>({
    {"aten::index", "indices"},
    {"aten::index_put", "indices"},
    {"aten::index_put_", "indices"},
    {"aten::_index_put_impl_", "indices"},
    {"aten::_unsafe_index", "indices"},
    {"aten::_unsafe_index_put", "indices"},
    {"aten::_pack_padded_sequence_backward", "batch_sizes"},
    {"aten::_ctc_loss", "input_lengths"},
    {"aten::_ctc_loss", "target_lengths"},
    {"aten::_ctc_loss_backward", "input_lengths"},
    {"aten::_ctc_loss_backward", "target_lengths"},
    {"aten::_foreach_copy_", "self"},
    {"aten::_foreach_copy_", "src"},
});

bool may_be_on_host(const c10::OperatorHandle& op,
                    const c10::Argument& argument) {
  return std::any_of(kHostArguments.begin(), kHostArguments.end(),
                     [&](const HostArgument& allowed) {
                       return allowed.op == op.operator_name().name &&
                              allowed.argument == argument.name();
                     });
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// One tensor argument, or list of them, dressed for the CPU.
IValue to_host(const c10::OperatorHandle& op, HostCall& call,
               const c10::Argument& argument, const IValue& value) {
  const auto dress = [&](const at::Tensor& tensor) {
    if (tensor.defined() && !tensor.is_privateuseone()) {
      if (may_be_on_host(op, argument)) return call.alias_or_host(tensor);
      if (is_written(argument)) {
        refuse_mixed_devices(tensor, " (argument " + argument.name() + " of " +
                                         c10::toString(op.operator_name()) +
                                         ")");
      }
    }
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
  // Autograd counts writes to single tensors; to lists, kernels do it
  // themselves.
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < num_arguments; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    IValue& value = (*stack)[first + i];
    if (value.isTensorList() && is_written(argument)) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        written.push_back(tensor);
      }
    }
    if (is_generator(argument)) {
      value = host_generator(value.toOptional<at::Generator>());
    } else if (value.isDevice() && value.toDevice().type() == kDeviceType) {
      value = c10::Device(c10::DeviceType::CPU);
    } else {
      value = to_host(op, call, argument, value);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  call.finish();
  for (const at::Tensor& tensor : written) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
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
// - random operators without a generator argument, whose CPU form would draw
//   from the CPU's stream: also made of in-place operators,
// - the ones below, whose composite form is right for a device.
constexpr std::array kKeepComposite = std::to_array<std::string_view>(
    {"aten::_pack_padded_sequence",  // one result is a CPU tensor anywhere
     "aten::convolution"});          // torch.jit.trace records what it calls

template <typename Predicate>
bool any_argument(const c10::FunctionSchema& schema, Predicate is_such) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     is_such);
}

bool has_device_argument(const c10::FunctionSchema& schema) {
  return any_argument(schema, [](const c10::Argument& argument) {
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
  const bool draws_unseen = op.hasTag(at::Tag::nondeterministic_seeded) &&
                            !any_argument(op.schema(), is_generator);
  return composite && !has(c10::DispatchKey::PrivateUse1) &&
         !is_view(op.schema()) && !has_device_argument(op.schema()) &&
         !draws_unseen &&
         std::find(kKeepComposite.begin(), kKeepComposite.end(),
                   op.operator_name().name) == kKeepComposite.end();
}

}  // namespace

void register_fallback() {
  static auto* every_namespace =
      new torch::Library(torch::Library::IMPL, "_",
                         c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  every_namespace->fallback(
      torch::CppFunction::makeFromBoxedFunction<&run_on_host>());

  torch::Library& aten = device_kernels();
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.getNamespace().has_value() || *name.getNamespace() != "aten") {
      continue;
    }
    const auto op = dispatcher.findOp(name);
    if (!op.has_value() || !op->hasSchema() || !hides_fallback(*op)) continue;
    const std::string qualified = c10::toString(name);
    aten.impl(qualified.c_str(),
              torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

}  // namespace memscale::sim
