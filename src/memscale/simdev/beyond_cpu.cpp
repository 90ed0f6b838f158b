// Operators that cards run in dtypes which the CPU's kernels refuse.
#include <ATen/core/Tensor.h>
#include <ATen/ops/histc.h>
#include <torch/library.h>

#include "memscale/simdev/host_call.h"
#include "memscale/simdev/registration.h"

namespace memscale::sim {
namespace {

// Integers too: mixture-of-experts routing counts tokens with it. Counts and
// bin edges are exact in double up to 2^53.
at::Tensor histogram(const at::Tensor& self, int64_t bins,
                     const at::Scalar& min, const at::Scalar& max) {
  HostCall call;
  const at::Tensor host = call.alias(self);
  if (host.is_floating_point()) {
    return call.adopt(at::histc(host, bins, min, max));
  }
  return call.adopt(
      at::histc(host.to(at::kDouble), bins, min, max).to(host.scalar_type()));
}

}  // namespace

void register_beyond_cpu() {
  device_kernels().impl("histc", TORCH_FN(histogram));
}

}  // namespace memscale::sim
