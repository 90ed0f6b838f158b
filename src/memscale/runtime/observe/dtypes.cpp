#include "memscale/runtime/observe/dtypes.h"

#include <array>
#include <cstddef>
#include <optional>

#include "memscale/base/error.h"

namespace memscale {
namespace {

constexpr auto kNumTypes = static_cast<std::size_t>(c10::ScalarType::Undefined);

using Table = std::array<std::optional<Dtype>, kNumTypes>;

// Both sides are matched by torch's names, once.
const Table& table() {
  static const Table instance = [] {
    Table result;
    for (std::size_t i = 0; i < kNumTypes; ++i) {
      const auto type = static_cast<c10::ScalarType>(i);
      result[i] = try_from_string<Dtype>(c10::getDtypeNames(type).first);
    }
    return result;
  }();
  return instance;
}

}  // namespace

Dtype dtype_of(c10::ScalarType type) {
  const auto index = static_cast<std::size_t>(type);
  if (index >= kNumTypes || !table()[index]) {
    throw TraceError(
        str("MemScale does not know torch's dtype ", c10::toString(type)));
  }
  return *table()[index];
}

}  // namespace memscale
