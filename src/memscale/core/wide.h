#pragma once

namespace memscale {

// Products of bytes and nanoseconds do not fit 64 bits; doubles would make
// plans depend on the host's rounding.
__extension__ using Wide = __int128;

}  // namespace memscale
