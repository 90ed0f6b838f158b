#include "memscale/base/suggest.h"

#include <algorithm>
#include <utility>

#include "memscale/base/ascii.h"

namespace memscale {

std::size_t edit_distance(std::string_view a, std::string_view b) {
  // Optimal string alignment, three rows at a time.
  std::vector<std::size_t> before(b.size() + 1), last(b.size() + 1),
      row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  const auto same = [&](std::size_t i, std::size_t j) {
    return ascii::to_lower(a[i]) == ascii::to_lower(b[j]);
  };
  for (std::size_t i = 1; i <= a.size(); ++i) {
    before = std::exchange(last, row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replace = last[j - 1] + (same(i - 1, j - 1) ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, replace});
      if (i > 1 && j > 1 && same(i - 1, j - 2) && same(i - 2, j - 1)) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return row[b.size()];
}

std::vector<std::string> nearest_names(
    std::string_view name, std::span<const std::string_view> candidates,
    std::size_t max_count) {
  std::vector<std::pair<std::size_t, std::size_t>> near;  // distance, index
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const std::size_t distance = edit_distance(name, candidates[i]);
    if (distance * 3 <= std::max(name.size(), candidates[i].size())) {
      near.emplace_back(distance, i);
    }
  }
  std::sort(near.begin(), near.end());
  near.resize(std::min(near.size(), max_count));
  std::vector<std::string> names;
  names.reserve(near.size());
  for (const auto& [distance, i] : near) names.emplace_back(candidates[i]);
  return names;
}

std::optional<std::string> nearest_name(
    std::string_view name, std::span<const std::string_view> candidates) {
  std::vector<std::string> names = nearest_names(name, candidates, 1);
  if (names.empty()) return std::nullopt;
  return std::move(names.front());
}

}  // namespace memscale
