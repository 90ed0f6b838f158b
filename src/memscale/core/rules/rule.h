#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "memscale/core/decision.h"
#include "memscale/core/timeline.h"

namespace memscale {

// What rules see and write. Lives for one decision.
struct RuleContext {
  const Question& question;
  const Timeline& plain;  // of the plain step, on the device
  Decision& decision;
  std::string_view rule;  // that is being applied

  Plan& plan() { return decision.plan; }
  void say(std::string text) {
    plan().verdicts.push_back({std::string(rule), std::move(text)});
  }
};

// One decision; a file of its own each. The plan is checked after every one.
struct Rule {
  std::string_view name;
  // False: the rules after it are not asked.
  bool (*apply)(RuleContext& context);
};

bool skip_tiny_model(RuleContext& context);
bool weigh_memory(RuleContext& context);
bool recompute_layers(RuleContext& context);

}  // namespace memscale
