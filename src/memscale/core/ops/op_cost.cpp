#include "memscale/core/ops/op_cost.h"

#include <algorithm>
#include <array>
#include <set>

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

// Of a foreign op: less than this is no work to speak of.
constexpr Bytes kMuchMoved = 1_MiB;

// Words in the names of ops that multiply.
constexpr auto kProducts = std::to_array<std::string_view>(
    {"attention", "conv", "gru", "lstm", "matmul", "mm", "rnn"});

bool names_a_product(std::string_view base) {
  // Between underscores, digits and ends: "mm" of "_grouped_mm", not of
  // "comm".
  const auto is_letter = [](char c) { return c >= 'a' && c <= 'z'; };
  return std::ranges::any_of(kProducts, [&](std::string_view word) {
    for (std::size_t at = base.find(word); at != std::string_view::npos;
         at = base.find(word, at + 1)) {
      const std::size_t end = at + word.size();
      const bool begins = at == 0 || !is_letter(base[at - 1]);
      const bool ends = end == base.size() || !is_letter(base[end]);
      if (begins && ends) return true;
    }
    return false;
  });
}

bool is_uncounted(const Trace& trace, const Op& op) {
  if (op.view) return false;
  const OpName name = OpName::of(op.name);
  const OpRow& row = find_op_row(name);
  if (row.flops != nullptr && row.flops(flops::Shapes(trace, op))) return false;
  if (name.space == "memscale") return false;  // steps of optimizers
  if (name.space != "aten" || op.opaque) {
    return op_cost(trace, op).moved >= kMuchMoved;
  }
  return row.work != Work::Little || row.library != Library::Other ||
         names_a_product(name.base);
}

}  // namespace

std::vector<std::string> uncounted_ops(const Trace& trace) {
  std::set<std::string> names;
  for (const Op& op : trace.ops) {
    if (is_uncounted(trace, op)) names.insert(op.name);
  }
  return {names.begin(), names.end()};
}

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
