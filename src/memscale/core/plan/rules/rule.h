#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "memscale/core/plan/decision.h"
#include "memscale/core/plan/question.h"

namespace memscale {

// What a rule sees and writes. It lives for one decision.
struct RuleContext {
  const Question& asked;  // as the caller put it
  // The question for this rule: its trace is the step under what the rules
  // before it have decided.
  Question& question;
  Decision& decision;
  std::string_view rule;  // the name of the rule that is being asked
  // Set if the caller wants the frontier: so many plans instead of one.
  std::optional<std::size_t> max_plans;

  Plan& plan() const { return decision.plan; }
  void say(std::string text) {
    plan().verdicts.push_back({std::string(rule), std::move(text)});
  }
  // The step is now this one: for the rules that follow, and in the plan's
  // predictions.
  void set_step(std::shared_ptr<const Trace> step);
};

// One decision: of a technique, or one of the engine's own, which have a file
// each. The plan is checked after every one.
struct Rule {
  std::string_view name;
  // False: the rules after it are not asked.
  bool (*apply)(RuleContext& context);
};

// Whether the plain step needs so little that saving gains nothing.
bool is_tiny(const RuleContext& context);

bool skip_tiny_model(RuleContext& context);
bool weigh_memory(RuleContext& context);

}  // namespace memscale
