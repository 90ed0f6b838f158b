#include "memscale/core/ops/op_facts.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <string>

#include "memscale/base/error.h"
#include "memscale/core/ops/op_cost.h"
#include "memscale/core/ops/op_table.h"
#include "memscale/core/ops/workspace/adam.h"
#include "memscale/core/ops/workspace/workspace.h"

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

// Some losses reduce into the tensor of the unreduced ones: a single number
// that keeps all of their bytes.
std::optional<Bytes> unreduced_loss(const Trace& trace, const Op& op) {
  const OpName name = OpName::of(op.name);
  if (!find_op_row(name).keeps_unreduced || !name.overload.empty() ||
      op.outputs.size() != 1) {
    return {};
  }
  const Value& loss = trace.at(op.outputs[0]);
  if (!loss.storage.valid() || !loss.sizes.empty()) return {};
  const Value& input = trace.at(op.inputs.at(0));
  return Bytes(input.numel() * itemsize_of(loss.dtype));
}

}  // namespace

void add_op_facts(Trace& trace, int num_threads, bool on_cpu) {
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
    if (const auto ours = adam_workspace(trace, op, on_cpu)) {
      op.workspace_known = true;
      op.workspace = *ours;
    }
    if (!op.workspace_known) unknown.insert(op.name);
    if (const auto unreduced = unreduced_loss(trace, op)) {
      Bytes& bytes =
          trace.storages.at(trace.at(op.outputs[0]).storage.index()).bytes;
      bytes = std::max(bytes, *unreduced);
      op.workspace = std::max(op.workspace - *unreduced, Bytes());
    }
    if (const auto reserve = reserved_bytes(trace, op)) {
      const StorageId kept = trace.at(op.outputs.back()).storage;
      if (kept.valid()) {
        Bytes& bytes = trace.storages.at(kept.index()).bytes;
        bytes = std::max(bytes, *reserve);
      }
    }
  }
  const auto note = [&](std::string_view text, const auto& names) {
    if (names.empty()) return;
    std::string list;
    for (const std::string& name : names) {
      list += (list.empty() ? "" : ", ") + name;
    }
    trace.notes.push_back(str(text, list));
  };
  note("workspaces that are not known, and left out: ", unknown);
  note("flops that are not known, and counted as one for each element: ",
       uncounted_ops(trace));
}

}  // namespace memscale
