// The tables of CPUs without levels of ours: built for what the compiler
// targets by itself.
#include <array>

#include "memscale/kernels/cpu/level.h"
#include "memscale/kernels/kernels.h"

namespace memscale::kernels {

std::span<const KernelTable* const> all_kernels() {
  static const std::array<const KernelTable*, 2> tables = {&reference_kernels(),
                                                           &portable_table};
  return tables;
}

}  // namespace memscale::kernels
