#pragma once

#include <cstdint>

namespace memscale {

// The process's switches by which torch chooses between kernels that round
// differently: a model may turn one for a part of its forward
// (torch.backends.mkldnn.flags), and backward must replay under the same.
using KernelFlags = std::uint8_t;

KernelFlags kernel_flags();

// The flags are these while it lives. Like the user's own context managers, it
// changes them for all threads.
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
