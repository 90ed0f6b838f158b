#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

// "unknown field 'buget'; did you mean 'budget'?"

namespace memscale {

// How many single-letter edits (insert, delete, replace, swap of neighbours)
// lie between the two, in any case of letters.
std::size_t edit_distance(std::string_view a, std::string_view b);

// The candidates that `name` may be a slip for, nearest first (ties: in the
// order given), at most `max_count`. A candidate counts as a slip if at most a
// third of the longer name differs.
std::vector<std::string> nearest_names(
    std::string_view name, std::span<const std::string_view> candidates,
    std::size_t max_count);

// The first of nearest_names, if any.
std::optional<std::string> nearest_name(
    std::string_view name, std::span<const std::string_view> candidates);

}  // namespace memscale
