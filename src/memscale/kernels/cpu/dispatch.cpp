// Which tables this CPU can run.
#include <array>

#include "memscale/kernels/kernels.h"

namespace memscale::kernels {

std::span<const KernelTable* const> all_kernels() {
  static const std::array<const KernelTable*, 1> tables = {
      &reference_kernels()};
  return tables;
}

const KernelTable& kernels() { return *all_kernels().back(); }

}  // namespace memscale::kernels
