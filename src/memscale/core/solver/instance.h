#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "memscale/base/wide.h"
#include "memscale/core/solver/solver.h"

// A Problem in the form that the search works on. Bytes are plain integers
// here: they are multiplied with times.

namespace memscale::solver {

// Larger than any peak, see Problem::check().
inline constexpr Bytes kNoLimit{static_cast<std::int64_t>(power_of_two(53))};

// An option of one layer. Both of its instants come down to one: layer L needs
// sum(held, 1..L) + need <= budget.
struct Item {
  std::int64_t held;
  std::int64_t need;
  std::int64_t host;
  std::int64_t nanoseconds;
  std::size_t option;  // its place in the layer's list
};

struct Instance {
  // By layer; options that another one beats in everything are left out.
  std::vector<std::vector<Item>> layers;
  std::vector<std::size_t> lists;  // by layer: Problem's list
  std::int64_t other_peak = 0;
  std::int64_t device_budget = 0;
  std::int64_t host_budget = 0;

  explicit Instance(const Problem& problem);
};

// Note [What fits after a layer]
// After layer k with h held so far, the rest can be made to fit if and only if
// h <= budget - tail[k], where tail[k] does not depend on the budget:
//   tail[n] = -infinity
//   tail[k - 1] = min over items of max(held + need, tail[k] + held)
// So tail[0] is the smallest budget that works, host memory aside.
std::vector<std::int64_t> tails(const Instance& instance);

// By k: the least host memory that the layers after the k-th take.
std::vector<std::int64_t> host_tails(const Instance& instance);

// The smallest device budget that works within the host's, and choices (by
// Item) that need no more; nothing if none does.
struct SmallestBudget {
  std::int64_t budget;
  std::vector<std::size_t> choice;
};
std::optional<SmallestBudget> smallest_budget(const Instance& instance,
                                              std::size_t max_states);

}  // namespace memscale::solver
