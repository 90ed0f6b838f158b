#pragma once

namespace memscale {

// Tells runtime/observe/unseen_writes.h what Python knows of custom Functions.
void look_into_functions();

}  // namespace memscale
