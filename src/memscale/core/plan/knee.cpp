#include "memscale/core/plan/knee.h"

#include <algorithm>
#include <functional>
#include <ranges>

#include "memscale/base/wide.h"

namespace memscale {

const Forecast& knee_of(std::span<const Forecast> frontier,
                        std::int64_t base_nanoseconds, Bytes margin) {
  const auto product = [&](const Forecast& found) {
    const Bytes peak = found.peak + margin;
    return Wide{base_nanoseconds + found.nanoseconds} * peak.count();
  };
  // From the fastest on: of equal products the first one is taken.
  return *std::ranges::min_element(std::views::reverse(frontier),
                                   std::ranges::less(), product);
}

}  // namespace memscale
