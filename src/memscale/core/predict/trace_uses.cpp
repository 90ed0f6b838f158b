#include "memscale/core/predict/trace_uses.h"

#include <algorithm>
#include <optional>

#include "memscale/base/dtype.h"

namespace memscale {
namespace {

std::uint8_t float_bytes(Dtype dtype) {
  const std::int64_t bytes = itemsize_of(dtype);
  const bool is_wide = kind_of(dtype) == DtypeKind::Floating && bytes > 1;
  return is_wide ? static_cast<std::uint8_t>(bytes) : 0;
}

}  // namespace

const ReplayRules& TraceUses::rules_of(std::string_view name) {
  auto [entry, is_new] = rules_.try_emplace(name);
  if (is_new) entry->second = find_replay_rules(name);
  return entry->second;
}

TensorUse TraceUses::use_of(ValueId id) const {
  const Value& value = trace_.at(id);
  if (!value.storage.valid()) return {};
  const Storage& storage = trace_.at(value.storage);
  return {.storage = key(value.storage),
          .tensor = id.index(),
          .bytes = storage.bytes.count(),
          .on_cpu = on_cpu_ || storage.place == Place::Host,
          .float_bytes = float_bytes(value.dtype)};
}

OpUse TraceUses::of(OpId id) {
  const Op& op = trace_.at(id);
  const ReplayRules& rules = rules_of(op.name);
  CallFacts facts{.in_function = op.in_function,
                  .accumulates = op.accumulates,
                  .transposed = op.transposed,
                  .not_waited_for = op.not_waited_for};
  uses_.clear();
  for (std::size_t i = 0; i < op.inputs.size(); ++i) {
    TensorUse use = use_of(op.inputs[i]);
    if (use.storage == 0) {
      facts.all_plain = false;
      continue;
    }
    use.access = op.use(i).access;
    use.is_leaf = op.use(i).is_leaf;
    uses_.push_back(use);
  }
  std::optional<Factor> factor;
  if (rules.factor < op.inputs.size()) {
    const Value& value = trace_.at(op.inputs[rules.factor]);
    factor = Factor{value.sizes, itemsize_of(value.dtype)};
  }
  const bool first_on_cpu = !op.inputs.empty() && !uses_.empty() &&
                            uses_.front().tensor == op.inputs[0].index() &&
                            uses_.front().on_cpu;
  return {.name = op.name,
          .rules = &rules,
          .why = why_not(rules, facts, target_),
          .expensive = is_expensive(rules, first_on_cpu, factor),
          .is_view = op.aliases,
          .holds = !op.no_grad && !op.in_function,
          .tensors = uses_};
}

std::span<const TensorUse> TraceUses::values(std::span<const ValueId> values) {
  uses_.clear();
  for (const ValueId value : values) {
    const TensorUse use = use_of(value);
    if (use.storage != 0) uses_.push_back(use);
  }
  return uses_;
}

std::span<const TensorUse> TraceUses::results_of(OpId id) {
  uses_.clear();
  for (const ValueId output : trace_.at(id).outputs) {
    uses_.push_back(use_of(output));
  }
  return uses_;
}

void TraceVersions::begin_op(const OpUse& use) {
  for (const TensorUse& tensor : use.tensors) {
    const ValueId value(std::size_t{tensor.tensor});
    of(tensor) = std::max(of(tensor), trace_.at(value).version);
  }
}

void TraceVersions::end_op(OpId op, const OpUse& use) {
  for (const TensorUse& tensor : use.tensors) {
    if (tensor.access == Access::Update || tensor.access == Access::Overwrite) {
      ++of(tensor);
    }
  }
  for (const ValueId output : trace_.at(op).outputs) {
    const Value& value = trace_.at(output);
    if (value.storage.valid()) {
      versions_[value.storage.index()] = value.version;
    }
  }
}

void TraceVersions::leave_function(std::span<const TensorUse> tensors) {
  for (const TensorUse& tensor : tensors) ++of(tensor);
}

}  // namespace memscale
