#pragma once

#include <cstddef>
#include <vector>

#include "memscale/core/layer_choices.h"

namespace memscale {

// Writes what each layer does, and what is predicted, into the plan.
void apply_forecast(const Question& question, const Forecast& found,
                    Plan& plan);

// Whether some plan's predicted peak is within the budget.
bool fits_budget(const Question& question, Bytes budget);

// The best plans there are, from the smallest peak to the fastest.
std::vector<Forecast> forecast_frontier(const Question& question,
                                        std::size_t max_points);

}  // namespace memscale
