#pragma once

#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

#include "memscale/runtime/observe/op_info.h"

namespace memscale {

// Note [Leaf ops]
// Recorded is the outermost call that autograd differentiates as one: not a
// CompositeImplicitAutograd op (it decomposes into such calls), not an op
// that autocast or functorch is about to rewrite, not an op on a wrapper
// subclass (its __torch_dispatch__ calls the real ones), and nothing that runs
// inside a recorded op.
class LeafOps final {
 public:
  // Whether a tensor that has a Python subclass counts as a plain one.
  using IsPlain = bool (*)(const c10::TensorImpl&);

  // `device`: of ops without tensors; the others are of their first's.
  LeafOps(c10::Device device, IsPlain is_plain);

  c10::BackendComponent backend() const {
    return c10::toBackendComponent(of_device_.backend);
  }

  bool contain(const OpInfo& info, const at::RecordFunction& fn) const;

 private:
  struct Keys {
    c10::DispatchKey backend;
    c10::DispatchKey autocast;
  };
  static Keys keys_of(c10::Device device);

  c10::Device device_;
  Keys of_device_;
  IsPlain is_plain_;
};

}  // namespace memscale
