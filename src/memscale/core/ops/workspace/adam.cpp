#include "memscale/core/ops/workspace/adam.h"

#include <algorithm>

namespace memscale {
namespace {

constexpr std::int64_t kFloat = 4;  // bytes

// For each element of a piece.
constexpr std::int64_t kBytesWithCodes = 24;
constexpr std::int64_t kBytesWithFloats = 16;
constexpr std::int64_t kBytesOfHalves = 4;  // more, for parameters of 16 bits

}  // namespace

Bytes adam_workspace(std::int64_t largest, std::int64_t width, int bits,
                     bool on_cpu) {
  if (on_cpu) return Bytes();
  const std::int64_t each = (bits == 8 ? kBytesWithCodes : kBytesWithFloats) +
                            (width < kFloat ? kBytesOfHalves : 0);
  return Bytes(std::min(largest, kStatePiece) * each);
}

std::optional<Bytes> adam_workspace(const Trace& trace, const Op& op,
                                    bool on_cpu) {
  if (!op.name.starts_with("memscale::adam")) return std::nullopt;
  std::int64_t largest = 0;
  std::int64_t width = kFloat;
  for (const ValueId id : op.inputs) {
    const Value& value = trace.at(id);
    largest = std::max(largest, value.numel());
    if (is_half(value.dtype)) width = 2;
  }
  const int bits = op.name.starts_with("memscale::adam8") ? 8 : 32;
  return adam_workspace(largest, width, bits, on_cpu);
}

}  // namespace memscale
