#include "memscale/runtime/repeatable.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include "memscale/runtime/tape_reasons.h"
#include "memscale/runtime/tensor_kinds.h"

namespace memscale {
namespace {

bool is_true(const std::optional<std::size_t>& place,
             c10::ArrayRef<const c10::IValue> inputs) {
  return place && inputs[*place].isBool() && inputs[*place].toBool();
}

}  // namespace

const char* why_not_repeatable(const OpInfo& info,
                               c10::ArrayRef<const c10::IValue> inputs,
                               bool as_cuda) {
  if (!info.may_differ) return nullptr;
  // On the CPU too, if it has several threads.
  if (is_true(info.accumulate, inputs)) return kUnordered;
  bool on_cpu = false;
  bool on_device = false;
  bool on_cuda = as_cuda;
  for (const c10::IValue& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      on_cpu |= tensor.is_cpu();
      on_device |= !tensor.is_cpu();
      on_cuda |= tensor.is_cuda();
    });
    if (input.isDevice()) on_cpu |= input.toDevice().is_cpu();
  }
  // Who reads the host's bytes has waited for the device before. We would not.
  if (on_cpu && on_device && is_true(info.non_blocking, inputs)) {
    return kNotWaitedFor;
  }
  const ReplayTarget target{
      .on_cuda = on_cuda,
      .benchmarks = on_cuda && at::globalContext().benchmarkCuDNN()};
  return why_not_on(target, info.rules, is_true(info.transposed, inputs));
}

}  // namespace memscale
