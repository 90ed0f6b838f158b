// Operators that make, reshape, resize and copy device tensors.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memscale/simdev/host_call.h"
#include "memscale/simdev/registration.h"

namespace memscale::sim {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void check_factory(std::optional<at::Layout> layout,
                   std::optional<at::Device> device,
                   std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.value_or(at::kStrided) == at::kStrided,
      "the simulated device holds strided tensors only, asked for ",
      layout.value_or(at::kStrided));
  TORCH_CHECK(!pin_memory.value_or(false),
              "Only dense CPU tensors can be pinned");
  TORCH_CHECK(!device || device->index() <= 0,
              "invalid device ordinal: sim has one device, sim:0, got ",
              device.value_or(kDevice));
}

// torch.use_deterministic_algorithms: uninitialised memory is filled.
at::Tensor filled_if_deterministic(at::Tensor tensor) {
  const at::Context& context = at::globalContext();
  if (context.deterministicAlgorithms() &&
      context.deterministicFillUninitializedMemory()) {
    at::native::fill_empty_deterministic_(tensor);
  }
  return tensor;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout,
                 std::optional<at::Device> device,
                 std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> format) {
  check_factory(layout, device, pin_memory);
  return filled_if_deterministic(at::detail::empty_generic(
      size, &allocator(), kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout,
                         std::optional<at::Device> device,
                         std::optional<bool> pin_memory) {
  check_factory(layout, device, pin_memory);
  return filled_if_deterministic(at::detail::empty_strided_generic(
      size, stride, &allocator(), kKeys, c10::dtype_or_default(dtype)));
}

// A tensor of zeros without memory, which autograd uses for gradients that
// vanish. torch's ZeroTensor key makes it real where an operator needs it.
at::Tensor efficient_zeros(at::IntArrayRef size,
                           std::optional<at::ScalarType> dtype,
                           std::optional<at::Layout> layout,
                           std::optional<at::Device> device,
                           std::optional<bool> pin_memory) {
  check_factory(layout, device, pin_memory);
  static auto* no_memory = new at::native::ZeroTensorAllocator(kDevice);
  return at::detail::empty_generic(size, no_memory,
                                   kKeys.add(c10::DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

// Device to device, host to device, device to host: all are CPU copies.
void copy_bytes(const at::Tensor& source, const at::Tensor& target) {
  HostCall call;
  at::Tensor host_target = call.alias_or_host(target);
  const at::Tensor host_source = call.alias_or_host(source);
  // A copy's own temporaries (dtype and layout conversions) live where its
  // target does.
  std::optional<UnchargedScope> uncharged;
  if (target.is_cpu()) uncharged.emplace();
  at::_ops::copy_::call(host_target, host_source, /*non_blocking=*/false);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  if (!self.is_same(source)) copy_bytes(source, self);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  copy_bytes(self, target);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self,
                                const at::Tensor& target) {
  target.resize_(self.sizes());
  copy_bytes(self, target);
  return target;
}

// Note [Moving a module keeps its Parameters]
// Module.to() changes a Parameter in place (param.data = moved) only between
// devices whose tensors torch calls compatible, and PrivateUse1 is not on its
// list. It asks this operator; device and CPU tensors of ours are alike, so
// that moving keeps Parameters, their ties, hooks and attributes, as on CUDA.
bool can_be_data_of(const at::Tensor& self, const at::Tensor& from) {
  const auto is_plain = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && !tensor.is_quantized() &&
           (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return is_plain(self) && is_plain(from);
}

}  // namespace

void register_memory_ops() {
  for (const auto key :
       {c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1}) {
    (new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__))
        ->impl("_has_compatible_shallow_copy_type", TORCH_FN(can_be_data_of));
  }
  torch::Library& aten = device_kernels();
  aten.impl("empty.memory_format", TORCH_FN(empty));
  aten.impl("empty_strided", TORCH_FN(empty_strided));
  aten.impl("_efficientzerotensor", TORCH_FN(efficient_zeros));
  aten.impl("copy_", TORCH_FN(copy_));
  aten.impl("_copy_from", TORCH_FN(copy_from));
  aten.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));

  // torch's own metadata kernels: they touch no data, or resize through the
  // storage's allocator, which is the device's.
  aten.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  aten.impl("view", TORCH_FN(at::native::view));
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten.impl("unfold", TORCH_FN(at::native::unfold));
  aten.impl("resize_", TORCH_FN(at::native::resize_));
  aten.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  aten.impl("set_.source_Storage_storage_offset",
            TORCH_FN(at::native::set_storage_cpu_));
  aten.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  aten.impl("set_", TORCH_FN(at::native::set_cpu_));
}

}  // namespace memscale::sim
