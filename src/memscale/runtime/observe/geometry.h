#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/SizesAndStrides.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace memscale {

using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;
using WeakStoragePtr = c10::weak_intrusive_ptr<c10::StorageImpl>;

// What a tensor is, without the bytes behind it: shape, strides, offset, dtype,
// conjugate and negative bits. A value; copying allocates only beyond 5
// dimensions. Only for plain tensors: see is_plain.
class Geometry final {
 public:
  explicit Geometry(const c10::TensorImpl& tensor);

  // A tensor of this geometry over other bytes, outside of autograd.
  at::Tensor over(const StoragePtr& storage) const;
  c10::ScalarType type() const { return dtype_.toScalarType(); }
  // "torch.FloatTensor [2, 3]", as torch's own messages have it.
  std::string describe(c10::Device device) const;

  bool operator==(const Geometry& other) const;

 private:
  c10::impl::SizesAndStrides shape_;
  std::int64_t offset_;
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
  bool is_wrapped_number_;
};

// Whether a tensor is one strided view of one block of bytes, and nothing else:
// not sparse, quantised, nested, a wrapper, or of a subclass with its own
// dispatch.
bool is_plain(const c10::TensorImpl& tensor);

// The storage of a plain tensor; own_storage: with one more owner.
const c10::StorageImpl* storage_of(const at::Tensor& tensor);
StoragePtr own_storage(const at::Tensor& tensor);

// The same tensor outside of autograd; version counter shared.
at::Tensor alias_of(const at::Tensor& tensor);

// A copy of the bytes, on the same device.
StoragePtr clone_storage(const StoragePtr& storage);
// So many bytes on that device: zero, or unset.
StoragePtr zero_storage(std::size_t bytes, c10::Device device);
StoragePtr empty_storage(std::size_t bytes, c10::Device device);

}  // namespace memscale
