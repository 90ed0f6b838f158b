#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "memscale/core/decision.h"
#include "memscale/core/timeline.h"

namespace memscale {

// What rules see and write. Lives for one decision.
struct RuleContext {
  // A rule may change what the later ones are asked.
  Question& question;
  // The step that question.trace points to, if a rule has replaced it.
  std::unique_ptr<const Trace>& trace;
  const Timeline& plain;  // of the plain step, on the device
  Decision& decision;
  std::string_view rule;  // that is being applied

  Plan& plan() const { return decision.plan; }
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

// Whether the plain step needs so little that nobody gains by saving.
bool is_tiny(const RuleContext& context);

bool skip_tiny_model(RuleContext& context);
bool weigh_memory(RuleContext& context);
bool quantise_optimizer(RuleContext& context);
bool recompute_layers(RuleContext& context);

}  // namespace memscale
