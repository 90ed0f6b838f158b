#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <vector>

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
  } else if (value.isList()) {  // of optional tensors, or of lists
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isNone()) for_each_tensor(element, visit);
    }
  }
}

// Calls visit(tensor) for each tensor of a result, also for undefined ones: so
// that they can be counted.
template <typename F>
void for_each_result(const c10::IValue& value, const F& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) visit(tensor);
  }
}

// Whether two tensors are the same view of the same storage.
inline bool is_same_view(const at::Tensor& a, const at::Tensor& b) {
  const c10::TensorImpl& x = *a.unsafeGetTensorImpl();
  const c10::TensorImpl& y = *b.unsafeGetTensorImpl();
  return x.has_storage() && y.has_storage() &&
         x.unsafe_storage().is_alias_of(y.unsafe_storage()) &&
         x.sizes_default() == y.sizes_default() &&
         x.strides_default() == y.strides_default() &&
         x.storage_offset_default() == y.storage_offset_default();
}

// Whether a call's results are all arguments of it: detach and the like.
inline bool are_all_among(const std::vector<c10::IValue>& results,
                          const std::vector<at::Tensor>& arguments) {
  bool all = !results.empty();
  for (const c10::IValue& value : results) {
    for_each_tensor(value, [&](const at::Tensor& result) {
      all &= std::ranges::any_of(arguments, [&](const at::Tensor& argument) {
        return is_same_view(result, argument);
      });
    });
  }
  return all;
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
