#pragma once

#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <string_view>

#include "memscale/runtime/observe/op_info.h"
#include "memscale/runtime/observe/tensor_kinds.h"

// Note [Unseen writes]
// The dispatcher tells of a write only if the operator's schema does. It does
// not tell of
//   foreign operators: collectives write into their arguments, and no schema of
//     theirs says so. Unless someone vouches for the schema (OpInfo), such an
//     operator is taken to write every tensor that it is given;
//   custom autograd Functions: a kernel in Triton or numpy may overwrite an
//     input (fused losses do, and then save it). A Function is taken to write
//     each of its inputs, those inside of lists and dictionaries too. What it
//     saves is left to autograd itself: it may be written by that same kernel.
//     Its backward is taken to write all that it saved. A parameter is the
//     exception: a Function that writes into one which it is to differentiate
//     is wrong in eager too, and copies of shared embeddings would cost more
//     than all that is saved;
//   TorchDispatchModes: what they do to an operator's arguments and results is
//     their own affair.
// So before it runs, whoever needs the old bytes copies them; afterwards its
// arguments are new states, and saves of the old ones see the new bytes, as in
// eager.

namespace torch::autograd {
struct Node;
}

namespace memscale {

using VisitTensor = c10::function_ref<void(const at::Tensor&)>;

// What only Python can tell of a custom Function. The bindings set it once;
// without them there are no such Functions. Both may be called by any thread,
// and throw nothing.
struct FunctionTensors {
  // Visits the tensors inside of lists, tuples and dictionaries, and those
  // given by name, of the Function whose range begins in this thread.
  void (*hidden_arguments)(VisitTensor visit) = nullptr;
  // Visits what the node saved, and the tensors among its context's attributes.
  void (*saved)(const torch::autograd::Node& node, VisitTensor visit) = nullptr;
};
void set_function_tensors(FunctionTensors functions);

// Whether a TorchDispatchMode stands between the calls of this thread and their
// kernels.
inline bool is_in_dispatch_mode() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// Whether a range that is not an operator is a custom autograd Function, or
// what cannot be told from one: not autograd's or the dispatcher's own.
inline bool is_custom_function(const at::RecordFunction& fn) {
  const std::string_view name(fn.name());
  return !name.starts_with("autograd::engine::") &&
         name != "PythonDispatchMode" && name != "PythonSubclass" &&
         name != "detach" && name != "detach_";
}

// Whether a range is the backward of one node of a graph.
inline bool is_backward_of_node(const at::RecordFunction& fn) {
  return std::string_view(fn.name()).starts_with(
      "autograd::engine::evaluate_function");
}

// Calls visit(tensor) for each tensor that the operator writes, or may write.
template <typename F>
void for_each_written(const OpInfo& info, const at::RecordFunction& fn,
                      const F& visit) {
  const auto inputs = fn.inputs();
  if (info.may_write) {
    for (const c10::IValue& input : inputs) for_each_tensor(input, visit);
    return;
  }
  for (const std::size_t index : info.written) {
    if (index < inputs.size()) for_each_tensor(inputs[index], visit);
  }
}

// Whether it is a parameter, or a view of one.
inline bool is_parameter(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return false;
  return tensor.is_leaf() || (tensor.is_view() && tensor._base().is_leaf());
}

void for_each_hidden_argument(VisitTensor visit);
void for_each_saved_by_function(VisitTensor visit);

// The same for a custom Function that begins.
template <typename F>
void for_each_unseen_write(const at::RecordFunction& fn, const F& visit) {
  const auto visit_written = [&](const at::Tensor& tensor) {
    if (tensor.defined() && !is_parameter(tensor)) visit(tensor);
  };
  for (const c10::IValue& input : fn.inputs()) {
    for_each_tensor(input, visit_written);
  }
  for_each_hidden_argument(visit_written);
}

// The same for the backward of a custom Function, if that is what this thread
// is about to run.
template <typename F>
void for_each_unseen_write_in_backward(const F& visit) {
  for_each_saved_by_function([&](const at::Tensor& tensor) {
    if (tensor.defined() && !is_parameter(tensor)) visit(tensor);
  });
}

}  // namespace memscale
