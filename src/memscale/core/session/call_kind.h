#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace memscale {

// What of a call of a model decides what its step needs. A plain value.
struct CallKind {
  // All that has to be equal: the names of arguments, types of tensors,
  // devices, the model's mode, what is trained, autocast.
  std::vector<std::string> facts;
  // All sizes in a row: of tensors, and of numbers that are passed.
  std::vector<std::int64_t> sizes;

  // Whether what was found out for a call of this kind holds for the other.
  // A call whose tensors are nowhere larger, and otherwise the same, needs no
  // more memory. Texts of many lengths so end with the longest.
  bool covers(const CallKind& call) const;

  bool operator==(const CallKind&) const = default;
};

}  // namespace memscale
