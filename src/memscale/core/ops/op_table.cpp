#include "memscale/core/ops/op_table.h"

#include <array>
#include <unordered_map>

#include "memscale/base/error.h"
#include "memscale/core/ops/workspace/formulas.h"

namespace memscale {
namespace {

constexpr OpRow kEmptyRow;
constexpr OpRow kForeignRow{.name = {}, .never = "not one of torch's own ops"};

// Operators without a row of their own, by how their names begin.
constexpr auto kFamilies = std::to_array<OpRow>({
    {.name = "_foreach_addc", .workspace = scratch::foreach_cast},
    {.name = "_foreach_", .workspace = scratch::foreach_number},
    {.name = "_fused_", .workspace = scratch::none},
    {.name = "_linalg_", .work = Work::Much},
    {.name = "linalg_", .work = Work::Much},
});

using RowsByName = std::unordered_map<std::string_view, const OpRow*>;

// Never destroyed: threads may ask while the process ends.
const RowsByName& rows_by_name() {
  static const RowsByName& instance = *[] {
    auto* rows = new RowsByName();
    for (const OpRow& row : op_rows()) rows->emplace(row.name, &row);
    return rows;
  }();
  return instance;
}

}  // namespace

const OpRow& find_op_row(const OpName& name) {
  if (name.space == "torchvision") return kEmptyRow;
  // Nobody has promised that calling it twice gives the same.
  if (name.space != "aten") return kForeignRow;
  const auto row = rows_by_name().find(name.base);
  if (row != rows_by_name().end()) return *row->second;
  for (const OpRow& family : kFamilies) {
    if (name.base.starts_with(family.name)) return family;
  }
  return kEmptyRow;
}

std::string describe(const OpRow& row) {
  std::string text;
  const auto add = [&](bool holds, const auto&... words) {
    if (holds) text += str(text.empty() ? "" : ", ", words...);
  };
  const int factor = row.factor;
  add(row.work == Work::Much, "much work");
  add(row.work == Work::Matmul, "matmul by argument ", factor);
  add(row.work == Work::Convolution, "convolution by argument ", factor);
  add(row.cpu_picoseconds > 0, row.cpu_picoseconds, " ps an element on a CPU");
  add(row.is_slow_on_cpu(), "kept there");
  add(row.library == Library::Blas, "BLAS");
  add(row.library == Library::Convolution, "library for convolutions");
  add(row.library == Library::Recurrence, "library for recurrence");
  add(row.order == Order::OpenOnCuda, "unordered on CUDA");
  add(row.order == Order::Open, "unordered");
  add(row.draws == Draws::Numbers, "random");
  add(row.draws == Draws::Bits, "random bits");
  add(!row.never.empty(), "never replayed: ", row.never);
  add(!row.never_in_place.empty(),
      "never replayed in place: ", row.never_in_place);
  add(row.factory, "factory");
  add(row.overwrites, "overwrites");
  add(row.updates_statistics, "updates statistics");
  add(row.indices.has_value(), "indices in result ",
      static_cast<int>(row.indices.value_or(0)));
  add(row.makes_nothing, "makes nothing");
  add(row.keeps_unreduced, "keeps unreduced losses");
  add(row.fills_zeros.has_value(), "fills new zeros");
  add(row.flops != nullptr, "flops");
  add(row.workspace == scratch::none, "no workspace");
  add(row.workspace != nullptr && row.workspace != scratch::none, "workspace");
  add(row.reserve != nullptr, "reserve");
  return str(row.name, ": ", text.empty() ? "nothing" : text);
}

}  // namespace memscale
