#pragma once

#include "memscale/core/plan/technique.h"

// The modules of this folder; table.cpp lists them in order.

namespace memscale {

// Keys and values that a model caches for generation are let go in training.
Technique use_cache_technique();
// Adam's moments are held in fewer bits.
Technique optimizer_state_technique();
// Layers keep less, and backward computes it again.
Technique recompute_technique();

}  // namespace memscale
