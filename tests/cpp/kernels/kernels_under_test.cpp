#include "kernel_cases.h"
#include "memscale/kernels/cuda/kernels.h"

namespace memscale::kernels {

const KernelTable& cuda_bodies_on_host();

const std::vector<const KernelTable*>& kernels_under_test() {
  static const std::vector<const KernelTable*> tables = [] {
    std::vector<const KernelTable*> found(all_kernels().begin(),
                                          all_kernels().end());
    found.push_back(&cuda_bodies_on_host());
    return found;
  }();
  return tables;
}

namespace {

TEST(Kernels, AreTheLastOfAll) {
  EXPECT_EQ(&kernels(), all_kernels().back());
  EXPECT_EQ(all_kernels().front(), &reference_kernels());
  EXPECT_GT(all_kernels().size(), 1);
}

TEST(CudaKernels, SayWhetherTheyAreThere) {
  if (cuda::available()) GTEST_SKIP() << "there is a device";
  float x = 1;
  EXPECT_THROW(cuda::unscale(&x, 1, 1.0F, &x, nullptr), std::runtime_error);
}

}  // namespace
}  // namespace memscale::kernels
