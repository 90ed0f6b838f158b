#include "kernel_cases.h"

namespace memscale::kernels {

const std::vector<const KernelTable*>& kernels_under_test() {
  static const std::vector<const KernelTable*> tables(all_kernels().begin(),
                                                      all_kernels().end());
  return tables;
}

}  // namespace memscale::kernels
