#include "memscale/runtime/observe/call_facts.h"

#include <ATen/Context.h>

#include <algorithm>

namespace memscale {
namespace {

bool is_true(const std::optional<std::size_t>& place,
             c10::ArrayRef<const c10::IValue> inputs) {
  return place && *place < inputs.size() && inputs[*place].isBool() &&
         inputs[*place].toBool();
}

bool has_all_arguments(const OpInfo& info,
                       c10::ArrayRef<const c10::IValue> inputs) {
  return inputs.size() == info.handle.schema().arguments().size();
}

bool copies_to_host(c10::ArrayRef<const c10::IValue> inputs) {
  bool on_cpu = false;
  bool on_device = false;
  for (const c10::IValue& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      on_cpu |= tensor.is_cpu();
      on_device |= !tensor.is_cpu();
    });
    if (input.isDevice()) on_cpu |= input.toDevice().is_cpu();
  }
  return on_cpu && on_device;
}

}  // namespace

CallFacts call_facts(const OpInfo& info,
                     c10::ArrayRef<const c10::IValue> inputs) {
  CallFacts facts;
  facts.has_all_arguments = has_all_arguments(info, inputs);
  if (!info.may_differ || !facts.has_all_arguments) return facts;
  facts.accumulates = is_true(info.accumulate, inputs);
  facts.transposed = is_true(info.transposed, inputs);
  facts.not_waited_for =
      is_true(info.non_blocking, inputs) && copies_to_host(inputs);
  return facts;
}

ReplayTarget target_of(const OpInfo& info,
                       c10::ArrayRef<const c10::IValue> inputs, bool as_cuda) {
  if (!info.may_differ) return {};
  bool on_cuda = as_cuda;
  for (const c10::IValue& input : inputs) {
    for_each_tensor(
        input, [&](const at::Tensor& tensor) { on_cuda |= tensor.is_cuda(); });
  }
  return {.on_cuda = on_cuda,
          .benchmarks = on_cuda && at::globalContext().benchmarkCuDNN()};
}

Access access_of(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs,
                 std::size_t argument) {
  if (info.may_write) return Access::Update;
  if (std::ranges::find(info.statistics, argument) != info.statistics.end() &&
      has_all_arguments(info, inputs)) {
    const bool trains = !info.training || inputs[*info.training].toBool();
    if (trains) return Access::Scratch;
  }
  if (std::ranges::find(info.written, argument) == info.written.end()) {
    return Access::Read;
  }
  return info.rules.overwrites ? Access::Overwrite : Access::Update;
}

Access narrowed(Access access, const c10::TensorImpl& tensor) {
  if (access != Access::Overwrite) return access;
  if (!tensor.has_storage()) return Access::Update;
  const c10::SymInt bytes = tensor.unsafe_storage().sym_nbytes();
  if (bytes.is_heap_allocated()) return Access::Update;
  const c10::IntArrayRef sizes = tensor.sizes_default();
  const c10::IntArrayRef strides = tensor.strides_default();
  const bool is_all =
      covers({sizes.data(), sizes.size()}, {strides.data(), strides.size()},
             tensor.storage_offset_default(),
             static_cast<std::int64_t>(tensor.dtype().itemsize()),
             bytes.as_int_unchecked());
  return is_all ? Access::Overwrite : Access::Update;
}

}  // namespace memscale
