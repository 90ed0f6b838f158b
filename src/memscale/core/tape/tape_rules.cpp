#include "memscale/core/tape/tape_rules.h"

#include <algorithm>

#include "memscale/base/error.h"

namespace memscale {

bool KeepSet::keeps(std::size_t op, std::size_t output) const {
  return std::ranges::binary_search(kept, std::pair(op, output));
}

std::size_t KeepSet::find(std::string_view name, std::size_t first) const {
  for (std::size_t i = first; i < ops.size(); ++i) {
    if (is_same_op(ops[i], name)) return i;
    if (!find_op_row(ops[i]).makes_nothing) break;
  }
  return ops.size();
}

void KeepSet::check() const {
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (kept[i].first >= ops.size()) {
      throw PlanError(str("keep_set.kept[", i, "] must name one of ",
                          ops.size(), " ops, got ", kept[i].first));
    }
    if (i > 0 && kept[i] <= kept[i - 1]) {
      throw PlanError(
          str("keep_set.kept must be sorted without repetition, "
              "kept[",
              i, "] is not after kept[", i - 1, "]"));
    }
  }
}

}  // namespace memscale
