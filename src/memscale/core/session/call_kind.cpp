#include "memscale/core/session/call_kind.h"

#include <algorithm>
#include <functional>

namespace memscale {

bool CallKind::covers(const CallKind& call) const {
  return facts == call.facts &&
         std::ranges::equal(call.sizes, sizes, std::less_equal<>());
}

}  // namespace memscale
