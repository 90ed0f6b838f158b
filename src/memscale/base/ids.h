#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>

#include "memscale/base/error.h"

namespace memscale {

// An index into one particular array: an OpId cannot be used where a ValueId is
// meant. Default-constructed ids are invalid and compare after every valid one.
// Trivially copyable; 32 bits, as traces hold very many of them.
template <typename Tag>
class StrongId final {
 public:
  constexpr StrongId() = default;
  // Throws InternalError if the index does not fit.
  constexpr explicit StrongId(std::size_t index)
      : value_(static_cast<std::uint32_t>(index)) {
    if (index >= kInvalid) {
      throw InternalError(str("index ", index, " does not fit a 32-bit id"));
    }
  }

  constexpr bool valid() const { return value_ != kInvalid; }

  // The position in the array. Throws InternalError if invalid.
  constexpr std::size_t index() const {
    if (!valid()) throw InternalError("index of an invalid id");
    return value_;
  }

  constexpr auto operator<=>(const StrongId&) const = default;

  // Prints the index, or "-" if invalid.
  friend std::ostream& operator<<(std::ostream& out, StrongId id) {
    return id.valid() ? out << id.value_ : out << '-';
  }

 private:
  friend struct std::hash<StrongId>;
  static constexpr std::uint32_t kInvalid =
      std::numeric_limits<std::uint32_t>::max();
  std::uint32_t value_ = kInvalid;
};

using OpId = StrongId<struct OpTag>;            // into Trace's ops
using ValueId = StrongId<struct ValueTag>;      // into Trace's values
using StorageId = StrongId<struct StorageTag>;  // into Trace's storages
using LayerId = StrongId<struct LayerTag>;      // into Trace's layers

}  // namespace memscale

template <typename Tag>
struct std::hash<memscale::StrongId<Tag>> {
  std::size_t operator()(memscale::StrongId<Tag> id) const noexcept {
    return std::hash<std::uint32_t>()(id.value_);
  }
};
