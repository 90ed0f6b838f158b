#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>

#include "memscale/hostmem/host_allocator.h"
#include "memscale/simdev/device.h"

namespace memscale::sim {

// Note [Zero-copy host calls]
// A device tensor's bytes are host bytes, so a CPU kernel can work on them in
// place. For one call, alias() dresses device tensors as CPU tensors over the
// same memory; while the HostCall lives, whatever the kernel allocates (its
// results, but also its workspaces) comes from the device's heap and is
// charged to it; adopt() turns a result into a device tensor by moving its
// block into a device storage. Nothing is copied in either direction.
//
// Results that share memory with an argument (views, in-place, out=) are
// mapped back onto the argument's own storage or tensor: an adopted alias
// would be a second owner of the same bytes.
//
// The call is one device kernel: while the HostCall lives, neither autograd
// nor the CPU's autocast sees the operators that it is made of.
//
// One HostCall serves one operator call, on one thread. Not copyable.
class HostCall final {
 public:
  HostCall();

  // `tensor` as a CPU tensor over the same bytes. Undefined tensors and CPU
  // scalars come back as they are; other CPU tensors raise torch's
  // mixed-device error. The same tensor gives the same alias.
  at::Tensor alias(const at::Tensor& tensor);
  std::optional<at::Tensor> alias(const std::optional<at::Tensor>& tensor);

  // The same, but CPU tensors of any shape may take part.
  at::Tensor alias_or_host(const at::Tensor& tensor);

  // The device tensor for what a kernel returned; undefined stays undefined.
  at::Tensor adopt(const at::Tensor& result);

  // After the kernel: arguments that it resized (out=) follow their aliases.
  void finish();

 private:
  struct Argument {
    at::Tensor device;
    at::Tensor host;
  };
  struct SharedStorage {
    c10::Storage device;
    c10::Storage host;
  };

  const c10::Storage& host_storage(const c10::Storage& device);
  c10::Storage device_storage(const c10::Storage& host);

  hostmem::RedirectGuard charge_;
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_cpu_autocast_;
  c10::SmallVector<Argument, 8> arguments_;
  c10::SmallVector<SharedStorage, 8> storages_;
};

// torch's error for `other` beside device tensors; `where` may name the place.
[[noreturn]] void refuse_mixed_devices(const at::Tensor& other,
                                       const std::string& where = "");

// While alive, what this thread allocates is host scratch that no card would
// hold in its memory (registers and on-chip memory there).
struct UnchargedScope final {
  hostmem::RedirectGuard to_host{nullptr};
};

}  // namespace memscale::sim
