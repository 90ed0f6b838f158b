#include "memscale/simdev/host_call.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <cstring>
#include <thread>

namespace memscale::sim {
namespace {

// A plain tensor over `storage` with the shape of `like`.
at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key,
                       const at::Tensor& like) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  const c10::TensorImpl* source = like.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(),
                              like.storage_offset());
  if (source->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return tensor;
}

bool same_shape(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.storage_offset() == b.storage_offset();
}

void release_reference(void* storage) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(storage));
}

// The bytes of `device` for a CPU storage, which keeps `device` alive.
c10::DataPtr shared_bytes(c10::StorageImpl* device) {
  c10::raw::intrusive_ptr::incref(device);
  return {device->mutable_data(), device, &release_reference,
          c10::Device(c10::DeviceType::CPU)};
}

// Gives `device` the bytes of `host`: by moving the block where it was charged
// to the device, by copying bytes that came from elsewhere (a constant, another
// thread). Whoever still holds `host` (a kernel's cache) goes on sharing the
// bytes: it never dangles.
void take_over(c10::StorageImpl* host, c10::StorageImpl* device) {
  c10::DataPtr& data = host->_mutable_data_ptr_no_checks();
  const size_t bytes = host->nbytes();
  if (data.get() != nullptr && !heap().owns(data.get())) {
    c10::DataPtr copy = allocator().allocate(bytes);
    std::memcpy(copy.get(), data.get(), bytes);
    device->set_data_ptr_noswap(std::move(copy));
  } else {
    data.unsafe_set_device(kDevice);
    device->set_data_ptr_noswap(std::move(data));
    host->set_data_ptr_noswap(shared_bytes(device));
  }
  device->set_nbytes(bytes);
}

// Note [One thread count for the device]
// Some CPU kernels split their sums by the number of threads, which OpenMP
// keeps per thread; and backward runs on a thread of autograd's engine. So that
// forward, backward and the CPU round alike, every thread that runs device
// kernels takes the count of the thread that loaded the device.
void match_thread_count() {
  // The first call is register_device's.
  static const std::thread::id loader = std::this_thread::get_id();
  static std::atomic<int> count{at::get_num_threads()};
  if (std::this_thread::get_id() == loader) {
    count = at::get_num_threads();
  } else if (at::get_num_threads() != count) {
    at::set_num_threads(count);
  }
}

}  // namespace

void refuse_mixed_devices(const at::Tensor& other, const std::string& where) {
  TORCH_CHECK(false,
              "Expected all tensors to be on the same device, but found at "
              "least two devices, ",
              kDevice, " and ", other.device(), "!", where);
}

HostCall::HostCall()
    : charge_(&device_blocks()),
      no_cpu_autocast_(c10::DispatchKey::AutocastCPU) {
  match_thread_count();
}

at::Tensor HostCall::alias(const at::Tensor& tensor) {
  const bool may_take_part = !tensor.defined() || tensor.is_privateuseone() ||
                             (tensor.is_cpu() && tensor.dim() == 0);
  if (!may_take_part) refuse_mixed_devices(tensor);
  return alias_or_host(tensor);
}

std::optional<at::Tensor> HostCall::alias(
    const std::optional<at::Tensor>& tensor) {
  if (!tensor.has_value() || !tensor->defined()) return std::nullopt;
  return alias(*tensor);
}

at::Tensor HostCall::alias_or_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  for (const Argument& argument : arguments_) {
    if (argument.device.is_same(tensor)) return argument.host;
  }
  TORCH_CHECK(tensor.numel() == 0 || tensor.storage().data() != nullptr,
              "the storage of this tensor on ", kDevice, " was freed");
  at::Tensor host = tensor_over(host_storage(tensor.storage()),
                                c10::DispatchKey::CPU, tensor);
  arguments_.push_back({tensor, host});
  return host;
}

const c10::Storage& HostCall::host_storage(const c10::Storage& device) {
  for (const SharedStorage& shared : storages_) {
    if (shared.device.is_alias_of(device)) return shared.host;
  }
  c10::StorageImpl* impl = device.unsafeGetStorageImpl();
  storages_.push_back(
      {device, c10::Storage(c10::make_intrusive<c10::StorageImpl>(
                   c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
                   shared_bytes(impl), c10::GetCPUAllocator(),
                   /*resizable=*/impl->resizable()))});
  return storages_.back().host;
}

c10::Storage HostCall::device_storage(const c10::Storage& host) {
  for (const SharedStorage& shared : storages_) {
    if (shared.host.is_alias_of(host)) return shared.device;
  }
  c10::Storage device(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, &allocator(),
      /*resizable=*/true));
  take_over(host.unsafeGetStorageImpl(), device.unsafeGetStorageImpl());
  storages_.push_back({device, host});
  return device;
}

at::Tensor HostCall::adopt(const at::Tensor& result) {
  if (!result.defined()) return result;
  for (const Argument& argument : arguments_) {
    if (argument.host.is_same(result)) return argument.device;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      result.layout() == c10::kStrided && !result.is_quantized(),
      "the simulated device holds strided tensors only, not ", result.layout(),
      result.is_quantized() ? " quantized" : "",
      " ones; move the tensor to the CPU first");
  return tensor_over(device_storage(result.storage()),
                     c10::DispatchKey::PrivateUse1, result);
}

void HostCall::finish() {
  for (const SharedStorage& shared : storages_) {
    c10::StorageImpl* host = shared.host.unsafeGetStorageImpl();
    c10::StorageImpl* device = shared.device.unsafeGetStorageImpl();
    if (host->data() != device->data() && host->data() != nullptr) {
      take_over(host, device);
    }
  }
  for (const Argument& argument : arguments_) {
    c10::TensorImpl* impl = argument.device.unsafeGetTensorImpl();
    const c10::Storage storage = device_storage(argument.host.storage());
    if (!storage.is_alias_of(impl->storage())) {
      impl->set_storage_keep_dtype(storage);
    }
    if (!same_shape(argument.device, argument.host)) {
      impl->set_sizes_and_strides(argument.host.sizes(),
                                  argument.host.strides(),
                                  argument.host.storage_offset());
    }
  }
}

}  // namespace memscale::sim
