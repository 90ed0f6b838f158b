#include "memscale/core/op_facts.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <string>

#include "memscale/base/error.h"
#include "memscale/core/op_cost.h"
#include "memscale/core/workspace.h"

namespace memscale {
namespace {

bool is_view(const Trace& trace, const Op& op) {
  if (op.mutates || op.outputs.empty()) return false;
  return std::ranges::all_of(op.outputs, [&](ValueId output) {
    const StorageId storage = trace.at(output).storage;
    return storage.valid() &&
           std::ranges::any_of(op.inputs, [&](ValueId input) {
             return trace.at(input).storage == storage;
           });
  });
}

}  // namespace

void add_op_facts(Trace& trace, int num_threads) {
  std::set<std::string> unknown;
  for (std::size_t i = 0; i < trace.ops.size(); ++i) {
    Op& op = trace.ops[i];
    op.view = is_view(trace, op);
    const OpCost cost = op_cost(trace, op);
    op.flops = cost.flops;
    op.moved = cost.moved;
    if (!op.workspace_known && !op.opaque) {
      const auto scratch = workspace(trace, op, num_threads);
      op.workspace_known = scratch.has_value();
      op.workspace = scratch.value_or(Bytes());
    }
    if (op.opaque && !op.workspace_known) unknown.insert(op.name);
    if (const auto reserve = lstm_reserve(trace, op)) {
      const StorageId kept = trace.at(op.outputs.back()).storage;
      if (kept.valid()) {
        Bytes& bytes = trace.storages.at(kept.index()).bytes;
        bytes = std::max(bytes, *reserve);
      }
    }
  }
  for (const std::string& name : unknown) {
    trace.notes.push_back(
        str("what ", name, " takes for itself while it runs is not known"));
  }
}

}  // namespace memscale
