#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "memscale/core/plan/forecast.h"
#include "memscale/core/plan/layer_choices.h"

namespace memscale {

// The best that layers can do: from the smallest peak to no time at all. Holds
// the question by reference; it must outlive this.
class FrontierSearch final {
 public:
  explicit FrontierSearch(const Question& question);

  // The fastest whose peak is within the limit; nothing if none is.
  //
  // Note [A larger budget is never slower]
  // The forecast of a mixture may be off from the sum of its parts, so what the
  // solver finds for a limit may not fit, and what fits may come from another
  // limit. Candidates therefore do not depend on the limit: they are the
  // frontier, and between two neighbours of it a row of limits that is the same
  // for all that fall there. Those that are faster than the upper neighbour
  // would make it a step back, and are left out.
  std::optional<Forecast> fastest_within(Bytes limit) const;

  // Peaks rise, times fall. The solver is asked for so many points.
  std::vector<Forecast> frontier(std::size_t max_points = kPoints) const;

 private:
  // From which plans are chosen.
  static constexpr std::size_t kPoints = 24;

  std::vector<Forecast> between(Bytes low, Bytes high) const;
  void add_forecasts(const Selection& selection,
                     std::vector<Forecast>& found) const;

  const Question& question_;
  const LayerChoices choices_;
  std::vector<Forecast> uniform_;
};

// Whether some plan's predicted peak is within the budget.
bool fits_budget(const Question& question, Bytes budget);

// The best plans there are, at most so many, from the smallest peak to the
// fastest.
std::vector<Forecast> forecast_frontier(const Question& question,
                                        std::size_t max_points);

}  // namespace memscale
