#pragma once

#include "memscale/core/trace/trace.h"

namespace memscale {

// The step as it is where parameters have gradients when it begins: after
// another backward, or zeroed in place. Those gradients are there all the time;
// what backward makes is added to them and let go at once. Adding is no op of
// its own: it runs where the last op that made the gradient has just run, takes
// nothing, and holds no more than that op did.
Trace accumulating_step(const Trace& step);

}  // namespace memscale
