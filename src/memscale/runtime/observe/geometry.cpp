#include "memscale/runtime/observe/geometry.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <sstream>

#include "memscale/runtime/observe/tensor_kinds.h"

namespace memscale {

Geometry::Geometry(const c10::TensorImpl& tensor)
    : offset_(tensor.storage_offset()),
      keys_(tensor.key_set()),
      dtype_(tensor.dtype()),
      is_wrapped_number_(tensor.is_wrapped_number()) {
  shape_.set_sizes(tensor.sizes());
  shape_.set_strides(tensor.strides());
}

at::Tensor Geometry::over(const StoragePtr& storage) const {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), keys_, dtype_);
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(shape_.sizes_arrayref(),
                              shape_.strides_arrayref(), offset_);
  if (is_wrapped_number_) impl->set_wrapped_number(true);
  return tensor;
}

std::string Geometry::describe(c10::Device device) const {
  const auto nothing = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
      nullptr, /*resizable=*/false);
  const at::Tensor tensor = over(nothing);
  std::ostringstream out;
  out << tensor.toString() << ' ' << tensor.sizes();
  return out.str();
}

bool Geometry::operator==(const Geometry& other) const {
  return shape_.sizes_arrayref() == other.shape_.sizes_arrayref() &&
         shape_.strides_arrayref() == other.shape_.strides_arrayref() &&
         offset_ == other.offset_ && keys_ == other.keys_ &&
         dtype_ == other.dtype_;
}

bool is_plain(const c10::TensorImpl& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kSpecial(
      {DispatchKey::Python, DispatchKey::Quantized, DispatchKey::Sparse,
       DispatchKey::SparseCsr, DispatchKey::NestedTensor,
       DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
       DispatchKey::Functionalize, DispatchKey::ZeroTensor});
  const c10::DispatchKeySet keys = tensor.key_set();
  return tensor.has_storage() && keys.has(DispatchKey::Dense) &&
         !keys.has_any(kSpecial) && !is_bare_meta(tensor);
}

const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

StoragePtr own_storage(const at::Tensor& tensor) {
  return StoragePtr::unsafe_reclaim_from_nonowning(
      tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

at::Tensor alias_of(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return at::Tensor(impl.shallow_copy_and_detach(
      impl.version_counter(), /*allow_tensor_metadata_change=*/false));
}

StoragePtr empty_storage(std::size_t bytes, c10::Device device) {
  const at::Tensor memory =
      at::empty({static_cast<std::int64_t>(bytes)},
                at::TensorOptions(device).dtype(at::kByte));
  return own_storage(memory);
}

StoragePtr zero_storage(std::size_t bytes, c10::Device device) {
  const at::Tensor memory =
      at::zeros({static_cast<std::int64_t>(bytes)},
                at::TensorOptions(device).dtype(at::kByte));
  return own_storage(memory);
}

StoragePtr clone_storage(const StoragePtr& storage) {
  const auto bytes = static_cast<std::int64_t>(storage->nbytes());
  const auto view = [&](const StoragePtr& of) {
    at::Tensor tensor =
        at::empty({0}, at::TensorOptions(storage->device()).dtype(at::kByte));
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(c10::Storage(of));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous({bytes});
    return tensor;
  };
  StoragePtr copy = empty_storage(storage->nbytes(), storage->device());
  view(copy).copy_(view(storage));
  return copy;
}

}  // namespace memscale
