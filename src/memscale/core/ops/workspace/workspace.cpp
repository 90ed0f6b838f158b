#include "memscale/core/ops/workspace/workspace.h"

#include <optional>
#include <stdexcept>

#include "memscale/base/error.h"
#include "memscale/core/ops/op_table.h"
#include "memscale/core/ops/workspace/formulas.h"

namespace memscale {
namespace scratch {

Result none(const Call&) { return 0; }

Result contiguous_first(const Call& call) {
  return call.in.at(0).contiguous_copy();
}
Result contiguous_second(const Call& call) {
  return call.in.at(1).contiguous_copy();
}
Result contiguous_last(const Call& call) {
  return call.in.at(call.in.size() - 1).contiguous_copy();
}
Result contiguous_inputs(const Call& call) {
  Int total = 0;
  for (const Tensor& in : call.in) total += in.contiguous_copy();
  return total;
}
Result dense_first(const Call& call) { return call.in.at(0).dense_copy(); }
Result dense_inputs(const Call& call) {
  Int total = 0;
  for (const Tensor& in : call.in) total += in.dense_copy();
  return total;
}

Result first_and_output(const Call& call) {
  return call.in.at(0).bytes() + call.out.at(0).bytes();
}

}  // namespace scratch

namespace {

std::optional<Bytes> evaluate(WorkspaceFormula formula, const Trace& trace,
                              const Op& op, int num_threads) {
  const auto call = scratch::call_of(trace, op, num_threads);
  if (!call) return std::nullopt;
  // at() throws where an op has fewer tensors or dimensions than its formula
  // needs: a version of torch that the table does not know.
  try {
    const scratch::Result bytes = formula(*call);
    return bytes ? std::optional(Bytes(*bytes)) : std::nullopt;
  } catch (const std::out_of_range&) {
    return std::nullopt;
  }
}

}  // namespace

std::optional<Bytes> workspace(const Trace& trace, const Op& op,
                               int num_threads) {
  if (num_threads < 1) {
    throw InternalError(str("workspace for ", num_threads, " threads"));
  }
  if (op.view) return Bytes();
  if (op.opaque) return std::nullopt;
  const WorkspaceFormula formula = find_op_row(op.name).workspace;
  if (formula == nullptr) return std::nullopt;
  if (formula == scratch::none) return Bytes();
  return evaluate(formula, trace, op, num_threads);
}

std::optional<Bytes> reserved_bytes(const Trace& trace, const Op& op) {
  const WorkspaceFormula formula = find_op_row(op.name).reserve;
  if (formula == nullptr) return std::nullopt;
  return evaluate(formula, trace, op, 1);
}

}  // namespace memscale
