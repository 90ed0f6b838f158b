#pragma once

#include <ATen/core/Tensor.h>

// What autograd knows of a tensor. Apart from call_facts.h, since autograd's
// headers are slow to compile.

namespace memscale {

// Whether something is to happen to this parameter as soon as it has its
// gradient: optimizers that step in backward.
bool is_changed_in_backward(const at::Tensor& parameter);

// Whether an op made it that autograd knows.
bool has_history(const at::Tensor& tensor);

}  // namespace memscale
