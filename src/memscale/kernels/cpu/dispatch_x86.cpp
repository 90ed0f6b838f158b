// Which tables this x86-64 CPU can run.
#include <vector>

#include "memscale/kernels/cpu/level.h"
#include "memscale/kernels/kernels.h"

namespace memscale::kernels {

std::span<const KernelTable* const> all_kernels() {
  static const std::vector<const KernelTable*> tables = [] {
    std::vector<const KernelTable*> found = {&reference_kernels()};
    if (__builtin_cpu_supports("x86-64-v2")) found.push_back(&v2_table);
    if (__builtin_cpu_supports("x86-64-v3")) found.push_back(&v3_table);
    if (__builtin_cpu_supports("x86-64-v4")) found.push_back(&v4_table);
    return found;
  }();
  return tables;
}

}  // namespace memscale::kernels
