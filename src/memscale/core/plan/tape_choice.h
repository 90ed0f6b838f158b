#pragma once

#include <string_view>
#include <vector>

#include "memscale/core/plan/choice.h"
#include "memscale/core/plan/plan.h"
#include "memscale/core/tape/tape_rules.h"

// The rules of a layer's tape as a choice in a plan, and back.

namespace memscale {

// The technique whose choices these are.
inline constexpr std::string_view kRecompute = "recompute";
// The word of a choice that comes with a keep set.
inline constexpr std::string_view kChosen = "chosen";

// For rules that do not keep everything. Bytes, price and reason are left to
// the caller.
Choice choice_of(const TapeRules& rules);

// What the layer's tape is to do; it keeps all if the layer has no such choice.
TapeRules tape_rules(const LayerPlan& layer, Bytes min_bytes);

// What its layers do from the first op on that the plan does not know: under a
// budget they hold the least.
ReplayPolicy policy_after_difference(const Plan& plan);

// For all layers, in the plan's order.
std::vector<TapeRules> tape_rules(const Plan& plan, Bytes min_bytes);

}  // namespace memscale
