#pragma once

#include <c10/core/ScalarType.h>

#include "memscale/base/dtype.h"

namespace memscale {

// Our name for torch's dtype. Throws TraceError for one that MemScale does not
// know, which only a later version of torch can have.
Dtype dtype_of(c10::ScalarType type);

}  // namespace memscale
