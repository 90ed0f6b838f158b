#include "memscale/core/hardware/fit.h"

#include "memscale/base/error.h"

namespace memscale {

Fit fit(Bytes peak, Bytes capacity) {
  if (peak < 0_B || capacity < 0_B) {
    throw InternalError(
        str("a peak of ", peak.count(), " bytes in ", capacity.count()));
  }
  Fit result;
  result.capacity = capacity;
  result.reserve = 768_MiB + peak * 3 / 100;
  result.needed = peak + result.reserve;
  result.fits = result.needed <= capacity;
  return result;
}

}  // namespace memscale
