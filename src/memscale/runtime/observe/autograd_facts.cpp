#include "memscale/runtime/observe/autograd_facts.h"

#include <torch/csrc/autograd/variable.h>

namespace memscale {

bool is_changed_in_backward(const at::Tensor& parameter) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  return meta != nullptr && meta->post_acc_grad_hooks_ != nullptr;
}

bool has_history(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  // A view of a parameter has none of its own until it is asked.
  return meta != nullptr && (meta->grad_fn_ != nullptr || meta->is_view_);
}

}  // namespace memscale
