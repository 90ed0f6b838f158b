#include "memscale/runtime/observe/unseen_writes.h"

#include <torch/csrc/autograd/node.h>

namespace memscale {
namespace {

FunctionTensors of_python;

}  // namespace

void set_function_tensors(FunctionTensors functions) { of_python = functions; }

void for_each_hidden_argument(VisitTensor visit) {
  if (of_python.hidden_arguments != nullptr) of_python.hidden_arguments(visit);
}

void for_each_saved_by_function(VisitTensor visit) {
  if (of_python.saved == nullptr) return;
  const auto node = torch::autograd::get_current_node();
  if (node != nullptr) of_python.saved(*node, visit);
}

}  // namespace memscale
