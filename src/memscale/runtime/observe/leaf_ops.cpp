#include "memscale/runtime/observe/leaf_ops.h"

#include <ATen/autocast_mode.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

#include "memscale/runtime/observe/tensor_kinds.h"

namespace memscale {

LeafOps::LeafOps(c10::Device device, IsPlain is_plain)
    : device_(device), of_device_(keys_of(device)), is_plain_(is_plain) {}

LeafOps::Keys LeafOps::keys_of(c10::Device device) {
  const auto type = device.type();
  return {c10::computeDispatchKey(c10::kFloat, c10::kStrided, device),
          at::autocast::is_autocast_available(type)
              ? at::autocast::get_autocast_dispatch_key_from_device_type(type)
              : c10::DispatchKey::Undefined};
}

bool LeafOps::contain(const OpInfo& info, const at::RecordFunction& fn) const {
  using c10::DispatchKey;
  if (c10::impl::tls_is_dispatch_key_included(
          DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return false;
  }
  std::optional<c10::Device> first;
  for (const c10::IValue& input : fn.inputs()) {
    if (first) break;
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      if (!first) first = tensor.device();
    });
  }
  const Keys keys =
      !first || first->type() == device_.type() || first->is_meta()
          ? of_device_
          : keys_of(*first);
  if (info.decomposes(keys.backend)) return false;
  if (keys.autocast != DispatchKey::Undefined &&
      !c10::impl::tls_is_dispatch_key_excluded(keys.autocast) &&
      info.handle.hasKernelForDispatchKey(keys.autocast)) {
    return false;
  }
  bool wrapped = false;
  for (const c10::IValue& input : fn.inputs()) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      wrapped |=
          is_bare_meta(impl) || (impl.key_set().has(DispatchKey::Python) &&
                                 (is_plain_ == nullptr || !is_plain_(impl)));
    });
  }
  return !wrapped;
}

}  // namespace memscale
