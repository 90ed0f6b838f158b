#include "memscale/core/plan/tape_choice.h"

#include <memory>

#include "memscale/base/enum_names.h"
#include "memscale/core/plan/technique.h"

namespace memscale {

Choice choice_of(const TapeRules& rules) {
  Choice choice;
  choice.technique = kRecompute;
  if (rules.keep_set != nullptr) {
    choice.choice = kChosen;
    choice.keep_set = *rules.keep_set;
  } else {
    choice.choice = to_string(rules.policy);
  }
  return choice;
}

TapeRules tape_rules(const LayerPlan& layer, Bytes min_bytes) {
  TapeRules rules;
  rules.min_bytes = static_cast<std::size_t>(min_bytes.count());
  const Choice* choice = find_choice(layer.choices, kRecompute);
  if (choice == nullptr) return rules;
  if (choice->keep_set) {
    rules.keep_set = std::make_shared<const KeepSet>(*choice->keep_set);
  } else {
    rules.policy = from_string<ReplayPolicy>(choice->choice);
  }
  return rules;
}

ReplayPolicy policy_after_difference(const Plan& plan) {
  return plan.budget ? ReplayPolicy::Block : ReplayPolicy::Cheap;
}

std::vector<TapeRules> tape_rules(const Plan& plan, Bytes min_bytes) {
  std::vector<TapeRules> rules;
  rules.reserve(plan.layers.size());
  for (const LayerPlan& layer : plan.layers) {
    rules.push_back(tape_rules(layer, min_bytes));
    rules.back().after_difference = policy_after_difference(plan);
  }
  return rules;
}

}  // namespace memscale
