#include "memscale/core/ops/replay_rules.h"

namespace memscale {
namespace {

// Of torch's own ops. What a foreign one does with its arguments nobody knows.
bool writes_out(const OpName& name) {
  return name.space == "aten" && name.has_out();
}

}  // namespace

ReplayRules find_replay_rules(std::string_view name) {
  const OpName parts = OpName::of(name);
  const OpRow& row = find_op_row(parts);
  ReplayRules rules{
      .never = row.never,
      .work = row.work,
      .factor = row.factor,
      .slow_on_cpu = row.is_slow_on_cpu(),
      .indices = row.indices,
      .is_factory = row.factory,
      .overwrites = parts.in_place ? row.overwrites : writes_out(parts),
      .draws_bits = row.draws == Draws::Bits && parts.in_place,
      .updates_statistics = row.updates_statistics,
      .unordered = row.order == Order::Open,
      .unordered_on_cuda = row.order == Order::OpenOnCuda,
      .is_convolution = row.library == Library::Convolution,
      .fills_zeros = row.fills_zeros == parts.overload && !parts.in_place};
  if (rules.never.empty() && parts.in_place) rules.never = row.never_in_place;
  return rules;
}

const char* why_not_on(const ReplayTarget& target, const ReplayRules& rules,
                       bool transposed) {
  if (rules.unordered) return kUnordered;
  if (!target.on_cuda) return nullptr;
  // A transposed convolution is the gradient of a plain one.
  if (rules.unordered_on_cuda || (rules.is_convolution && transposed)) {
    return kUnordered;
  }
  // cuDNN remembers the fastest algorithm by thread, and backward has a thread
  // of its own: timing the algorithms there may end otherwise.
  if (target.benchmarks && rules.is_convolution) return kBenchmarked;
  return nullptr;
}

bool is_same_op(std::string_view a, std::string_view b) {
  if (a == b) return true;
  const OpName x = OpName::of(a);
  const OpName y = OpName::of(b);
  return x.space == y.space && x.base == y.base && x.overload == y.overload;
}

}  // namespace memscale
