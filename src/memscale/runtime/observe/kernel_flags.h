#pragma once

#include <cstdint>

#include "memscale/core/time/cost_model.h"

namespace memscale {

// Switches of the process by which torch chooses between kernels that round
// differently: a model may turn one for a part of its forward
// (torch.backends.mkldnn.flags), and backward must replay under the same.
// Precisions (TF32, matmul precision) are not among them.
using KernelFlags = std::uint8_t;

KernelFlags kernel_flags();

// The process's settings for products of 32-bit floats on CUDA.
Tf32 allowed_tf32();

// The flags are these while it lives. Like the user's own context managers, it
// changes them for all threads: two of them must not overlap in two threads, as
// theirs must not.
class KernelFlagsGuard final {
 public:
  explicit KernelFlagsGuard(KernelFlags flags);
  ~KernelFlagsGuard();
  KernelFlagsGuard(const KernelFlagsGuard&) = delete;
  KernelFlagsGuard& operator=(const KernelFlagsGuard&) = delete;

 private:
  const KernelFlags before_;
  const KernelFlags during_;
};

}  // namespace memscale
