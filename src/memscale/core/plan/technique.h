#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memscale/core/config/config.h"
#include "memscale/core/plan/choice.h"
#include "memscale/core/trace/trace.h"

// A technique as the planner sees it. Each is a module in core/techniques; its
// other half, which acts on tensors, is attached by whoever runs the model. See
// docs/adding-a-technique.md.

namespace memscale {

struct Plan;
struct Question;
struct RuleContext;

// When a technique's rule is asked; within a stage, in the table's order.
enum class Stage : std::uint8_t {
  Free,    // first: it costs nothing, so there is nothing to weigh
  Step,    // then what concerns the whole step
  Layers,  // last what is chosen layer by layer
};

struct Technique {
  std::string_view name;  // in plans and files: "recompute"
  std::string_view rule;  // in verdicts and disabled_rules
  Stage stage;
  // The field of Config that switches it, and the same field of the resolved
  // config. Empty and null: no field does, and it is always allowed.
  std::string_view field;
  bool EffectiveConfig::* is_on;
  // The verdict if it is switched off; empty: nothing is said.
  std::string_view off;
  // The words that a choice can have.
  std::span<const std::string_view> choices;
  // The word that comes with a keep set; empty: none does.
  std::string_view with_keep_set;

  // Why this step cannot have it; an empty text: it cannot, and there is
  // nothing to say about that. Nothing: it can.
  std::optional<std::string> (*why_not)(const Question& question);
  // Decides: writes into the plan and says why. False ends the decision: the
  // rules after it are not asked.
  bool (*decide)(RuleContext& context);
  // The step as the plan's choices of this technique make it, from the step
  // that the techniques before it leave. `question` is the one that was asked.
  Trace (*predict)(const Trace& step, const Plan& plan,
                   const Question& question);
  // What is done where no plan can be made. The question has no trace.
  std::optional<Choice> (*fallback)(const Question& question);
  // A choice in the tables of plans: "recompute (cheap)".
  std::string (*describe)(const Choice& choice);
};

// All techniques, in the order in which they are predicted and asked. Defined
// in core/techniques/table.cpp.
std::span<const Technique> techniques();

// Their names, in that order.
std::vector<std::string> technique_names();

// The technique of that name; null if there is none.
const Technique* find_technique(std::string_view name);

// Whether its rule may choose it: it is not switched off, its rule is not
// disabled, and the step can have it.
bool is_available(const Technique& technique, const Question& question);

// The step under all choices of a plan that was made for this question.
Trace step_under(const Question& question, const Plan& plan);

// What is done where no plan can be made; `only_asked`: of the techniques that
// the user has asked for by their fields.
std::vector<Choice> fallback_choices(const Question& question, bool only_asked);

// Throws PlanError, naming the place, unless these are choices of techniques
// that are made for whole steps, or, in a layer, for layers. `place` is
// prepended: "layers[3].".
void check_choices(std::string_view place, std::span<const Choice> choices,
                   bool in_layer);

// Throws ConfigError if the plan uses, for the whole step or in a layer, a
// technique that the user has switched off by its field.
void check_allowed(const Plan& plan, const Config& config);

// "recompute (cheap)"; those of several techniques are joined by " + ".
std::string describe(std::span<const Choice> choices);

// The choice of that technique; null: it is not used.
const Choice* find_choice(std::span<const Choice> choices,
                          std::string_view technique);

}  // namespace memscale
