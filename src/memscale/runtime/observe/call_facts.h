#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>

#include "memscale/core/tape/op_use.h"
#include "memscale/runtime/observe/op_info.h"
#include "memscale/runtime/observe/tensor_kinds.h"

// What a call does to what it is given, read off its arguments. The recorder
// writes it into a trace, a tape decides by it: so both see the same.

namespace memscale {

// All but `in_function`, `in_mode` and `all_plain`, which the caller knows.
CallFacts call_facts(const OpInfo& info,
                     c10::ArrayRef<const c10::IValue> inputs);

// What of the device that the call is for decides whether it can be repeated.
// `as_cuda`: see TapeRules.
ReplayTarget target_of(const OpInfo& info,
                       c10::ArrayRef<const c10::IValue> inputs, bool as_cuda);

// How the call uses the tensors of one argument, by the operator alone.
Access access_of(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs,
                 std::size_t argument);
// The same for one tensor of it: a part of a storage is not all of it.
Access narrowed(Access access, const c10::TensorImpl& tensor);

// Calls visit(tensor, argument, element, access) for each tensor that the call
// is given; `element`: its place in a list, or -1. `writes_all`: the call is
// taken to write every tensor that it is given, see Note [Unseen writes].
template <typename F>
void for_each_use(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs,
                  bool writes_all, const F& visit) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const c10::IValue& input = inputs[i];
    if (!input.isTensor() && !input.isList()) continue;
    const Access access =
        writes_all ? Access::Update : access_of(info, inputs, i);
    const auto visit_one = [&](const at::Tensor& tensor, std::int32_t element) {
      if (!tensor.defined()) return;
      visit(tensor, i, element,
            narrowed(access, *tensor.unsafeGetTensorImpl()));
    };
    if (input.isTensor()) {
      visit_one(input.toTensor(), -1);
      continue;
    }
    std::int32_t element = 0;
    for (const c10::IValue& each : input.toListRef()) {
      if (each.isTensor()) {
        visit_one(each.toTensor(), element);
      } else if (each.isList()) {  // as collectives have them
        for_each_tensor(each, [&](const at::Tensor& tensor) {
          visit_one(tensor, element);
        });
      }
      ++element;
    }
  }
}

}  // namespace memscale
