#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "memscale/core/solver/bound.h"
#include "memscale/core/solver/instance.h"

namespace memscale::solver {

inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

// What one pass over the layers found.
struct Found {
  std::optional<std::vector<std::size_t>> choice;  // by Item; faster than told
  std::int64_t nanoseconds = kNever;
  // No plan that is faster than told takes less than this.
  std::int64_t lower_bound = kNever;
};

// Note [Search]
// Layer by layer, partial plans (held, host, time). One is dropped if
//   another has no more of any of the three,
//   the rest cannot fit after it, or
//   its time so far, or its bound, is not below `faster_than`.
// If more than `max_states` are left, those with the largest bounds are given
// up, and the smallest bound among them is what the result can be off by.
Found search(const Instance& instance, Bound& bound, std::int64_t faster_than,
             std::size_t max_states);

}  // namespace memscale::solver
