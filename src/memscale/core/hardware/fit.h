#pragma once

#include "memscale/base/bytes.h"

namespace memscale {

// Whether a step with this peak fits a card of this capacity.
struct Fit {
  bool fits = false;
  Bytes needed;    // the peak and the reserve
  Bytes reserve;   // see Note [What a card keeps for itself]
  Bytes capacity;  // of the card
};

// Note [What a card keeps for itself]
// Beside the allocator's blocks a CUDA process holds a context (0.3 to 0.6 GiB
// by card and driver), workspaces of cuBLAS and cuDNN (some tens of MiB), and
// what the caching allocator cannot use because it lies in pieces. Not
// measured here, where there is no such card: a round 768 MiB and 3 % of the
// peak, to be replaced by what warm-up steps measure.
Fit fit(Bytes peak, Bytes capacity);

}  // namespace memscale
