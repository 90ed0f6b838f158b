#pragma once

#include <ATen/core/Tensor.h>

// What autograd knows of a tensor. Apart from call_facts.h, since autograd's
// headers are slow to compile.
//
// Note [Nodes are not asked for]
// A view of a tensor that was written in place gets its node when somebody asks
// for it: grad_fn() does, and so does is_leaf(). Nodes are numbered as they are
// made, and backward runs, and sums gradients, by their numbers. So we look at
// what is there, and never ask.

namespace memscale {

// Whether something is to happen to this parameter as soon as it has its
// gradient: optimizers that step in backward.
bool is_changed_in_backward(const at::Tensor& parameter);

// Whether an op made it that autograd knows.
bool has_history(const at::Tensor& tensor);

// Whether it is a parameter, or a view of one.
bool is_parameter(const at::Tensor& tensor);

}  // namespace memscale
