#pragma once

#include <cstdint>
#include <optional>

#include "memscale/base/bytes.h"
#include "memscale/core/trace/trace.h"

// Temporaries of our own Adam steps. `on_cpu`: they run in kernels of ours,
// without any; other devices take them in pieces, by torch's operators (see
// runtime/optimizer/optimizer_backend.h).

namespace memscale {

// Elements worked on at a time where a device has no kernel of ours.
inline constexpr std::int64_t kStatePiece = 262'144;

// Of parameters of at most `largest` elements, of `width` bytes each, with
// moments of 8 or 32 bits.
Bytes adam_workspace(std::int64_t largest, std::int64_t width, int bits,
                     bool on_cpu);

// Of a step as it was traced; nothing if it is another op.
std::optional<Bytes> adam_workspace(const Trace& trace, const Op& op,
                                    bool on_cpu);

}  // namespace memscale
