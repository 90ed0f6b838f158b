#include "memscale/runtime/leaf_ops.h"

#include <ATen/autocast_mode.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "memscale/runtime/tensor_kinds.h"

namespace memscale {

LeafOps::LeafOps(c10::Device device, IsPlain is_plain)
    : backend_key_(c10::computeDispatchKey(c10::kFloat, c10::kStrided, device)),
      autocast_key_(at::autocast::get_autocast_dispatch_key_from_device_type(
          device.type())),
      is_plain_(is_plain) {}

bool LeafOps::contain(const OpInfo& info, const at::RecordFunction& fn) const {
  using c10::DispatchKey;
  if (info.decomposes(backend_key_)) return false;
  if (c10::impl::tls_is_dispatch_key_included(
          DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return false;
  }
  if (!c10::impl::tls_is_dispatch_key_excluded(autocast_key_) &&
      info.handle.hasKernelForDispatchKey(autocast_key_)) {
    return false;
  }
  bool wrapped = false;
  for (const c10::IValue& input : fn.inputs()) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      wrapped |= is_bare_meta(impl) ||
                 (impl.key_set().has(DispatchKey::Python) &&
                  (is_plain_ == nullptr || !is_plain_(impl)));
    });
  }
  return !wrapped;
}

}  // namespace memscale
