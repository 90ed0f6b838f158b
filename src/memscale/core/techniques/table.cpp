#include "memscale/core/techniques/table.h"

#include <array>

namespace memscale {

std::span<const Technique> techniques() {
  static const std::array kTable = {
      use_cache_technique(),
      optimizer_state_technique(),
      recompute_technique(),
  };
  return kTable;
}

}  // namespace memscale
