#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/core/plan/plan.h"
#include "memscale/core/plan/question.h"

// From a question to a plan. The same question gives the same plan, byte for
// byte, on any host.

namespace memscale {

struct Decision {
  Plan plan;
  // Set only if no plan meets the budget: the smallest budget that can be met.
  // `plan` is then the plan for it.
  std::optional<Bytes> smallest_budget;
  // Set only by plan_frontier().
  std::vector<Plan> frontier;
};

Decision decide(const Question& question);

// The decision's plan. Throws PlanError, naming the smallest budget that works
// and what it costs, if no plan meets the budget.
Plan plan_for(const Question& question);

// Plans from the smallest peak to the fastest, at most so many: peaks rise,
// predicted times fall. The same rules are asked as for one plan, but for
// whatever size and time: the budget, the mode's slowdown and the size of the
// model do not matter.
std::vector<Plan> plan_frontier(const Question& question,
                                std::size_t max_plans);

// Names of the rules, in their order.
std::vector<std::string> rule_names();

}  // namespace memscale
