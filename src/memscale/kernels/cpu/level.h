#pragma once

#include "memscale/kernels/kernel_table.h"

// The table of each CPU level: level.cpp, compiled once for each of them with
// its name as MEMSCALE_CPU_LEVEL. Only tables of levels that CpuLevels.cmake
// builds for this architecture exist.

namespace memscale::kernels {

extern const KernelTable portable_table;
extern const KernelTable v2_table;
extern const KernelTable v3_table;
extern const KernelTable v4_table;

}  // namespace memscale::kernels
