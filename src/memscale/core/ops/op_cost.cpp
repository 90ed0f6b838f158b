#include "memscale/core/ops/op_cost.h"

#include <algorithm>

#include "memscale/core/ops/flops.h"
#include "memscale/core/ops/op_table.h"

namespace memscale {
namespace {

std::int64_t largest_output(const flops::Shapes& shapes) {
  std::int64_t most = 0;
  for (std::size_t i = 0; i < shapes.num_out(); ++i) {
    most = std::max(most, flops::count(shapes.out(i)));
  }
  return most;
}

}  // namespace

OpCost op_cost(const Trace& trace, const Op& op) {
  if (op.view) return {};
  const flops::Shapes shapes(trace, op);
  const OpRow& row = find_op_row(op.name);
  const auto known = row.flops != nullptr ? row.flops(shapes) : std::nullopt;
  OpCost cost{.flops = known ? *known : largest_output(shapes), .moved = {}};
  for (const auto* ids : {&op.inputs, &op.outputs}) {
    for (const ValueId id : *ids) {
      const Value& value = trace.at(id);
      const std::int64_t bytes =
          flops::times(flops::count(value.sizes), itemsize_of(value.dtype));
      cost.moved = Bytes(flops::plus(cost.moved.count(), bytes));
    }
  }
  return cost;
}

bool is_transposed_convolution(const Trace& trace, const Op& op) {
  return find_op_row(op.name).library == Library::Convolution &&
         flops::is_transposed_convolution(flops::Shapes(trace, op));
}

}  // namespace memscale
