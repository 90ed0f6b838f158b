#include "memscale/core/trace/accumulation.h"

#include <cstddef>
#include <unordered_map>
#include <utility>
#include <vector>

namespace memscale {
namespace {

// By storage: what backward makes in its place, to be added to it.
std::vector<StorageId> add_summands(Trace& trace) {
  std::vector<StorageId> summands(trace.storages.size());
  for (std::size_t i = 0; i < summands.size(); ++i) {
    Storage summand = trace.storages[i];
    if (summand.category != Category::Gradient || !summand.born.valid()) {
      continue;
    }
    trace.storages[i].born = OpId();
    trace.storages[i].let_go = OpId();
    summand.category = Category::Transient;
    summand.freed = summand.born;  // or later, see below
    summand.let_go = OpId();
    summands[i] = StorageId(trace.storages.size());
    trace.storages.push_back(summand);
  }
  return summands;
}

}  // namespace

Trace accumulating_step(const Trace& step) {
  Trace trace = step;
  const std::vector<StorageId> summands = add_summands(trace);
  std::unordered_map<std::size_t, ValueId> moved;  // by value of `step`
  const auto move = [&](ValueId id, OpId op) {
    const StorageId storage = step.at(id).storage;
    if (!storage.valid() || !summands[storage.index()].valid()) return id;
    const StorageId summand = summands[storage.index()];
    trace.storages[summand.index()].freed = op;
    const auto [found, is_new] = moved.try_emplace(id.index());
    if (is_new) {
      found->second = ValueId(trace.values.size());
      Value value = step.at(id);
      value.storage = summand;
      trace.values.push_back(std::move(value));
    }
    return found->second;
  };
  for (std::size_t i = 0; i < trace.ops.size(); ++i) {
    Op& op = trace.ops[i];
    if (op.phase == Phase::Optimizer) continue;
    for (ValueId& value : op.inputs) value = move(value, OpId(i));
    for (ValueId& value : op.outputs) value = move(value, OpId(i));
  }
  return trace;
}

}  // namespace memscale
