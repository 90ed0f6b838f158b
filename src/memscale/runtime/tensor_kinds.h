#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

// What kind of tensor an argument is, read from metadata: no op is called.

namespace memscale {

// Calls visit(tensor) for each defined tensor of an argument or result.
template <typename F>
void for_each_tensor(const c10::IValue& value, const F& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList().vec()) {
      if (tensor.defined()) visit(tensor);
    }
  } else if (value.isList()) {  // of optional tensors
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor() && element.toTensor().defined()) {
        visit(element.toTensor());
      }
    }
  }
}

// Note [Inside fake tensors]
// A fake tensor is a meta tensor in a Python subclass. Calls on the bare meta
// tensor are torch's own bookkeeping, and no bytes stand behind it.
inline bool is_bare_meta(const c10::TensorImpl& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  return keys.has_backend(c10::BackendComponent::MetaBit) &&
         !keys.has(c10::DispatchKey::Python);
}

// Tensors whose storage is not theirs, or not one block of bytes.
inline bool has_wrapper(const c10::DispatchKeySet& keys) {
  return keys.has(c10::DispatchKey::FuncTorchBatched) ||
         keys.has(c10::DispatchKey::FuncTorchGradWrapper) ||
         keys.has_any(c10::DispatchKeySet(c10::DispatchKey::Functionalize)) ||
         keys.has(c10::DispatchKey::NestedTensor);
}

}  // namespace memscale
