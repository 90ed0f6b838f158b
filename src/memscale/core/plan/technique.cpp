#include "memscale/core/plan/technique.h"

#include <algorithm>

#include "memscale/base/ascii.h"
#include "memscale/base/error.h"
#include "memscale/core/plan/plan.h"
#include "memscale/core/plan/question.h"

namespace memscale {
namespace {

std::string listed(std::span<const std::string_view> words) {
  std::string text;
  for (const std::string_view word : words) {
    text += str(text.empty() ? "" : ", ", word);
  }
  return text;
}

void check_choice(const std::string& place, const Choice& choice,
                  bool in_layer) {
  const Technique* technique = find_technique(choice.technique);
  if (technique == nullptr || (technique->stage == Stage::Layers) != in_layer) {
    std::vector<std::string_view> names;
    for (const Technique& each : techniques()) {
      if ((each.stage == Stage::Layers) == in_layer) names.push_back(each.name);
    }
    throw PlanError(str(place, "technique must be one of ", listed(names),
                        ", got ", ascii::quoted_start(choice.technique)));
  }
  if (std::ranges::find(technique->choices, choice.choice) ==
      technique->choices.end()) {
    throw PlanError(str(place, "choice must be one of ",
                        listed(technique->choices), ", got ",
                        ascii::quoted_start(choice.choice)));
  }
  const bool needs_set = !technique->with_keep_set.empty() &&
                         choice.choice == technique->with_keep_set;
  if (choice.keep_set.has_value() != needs_set) {
    throw PlanError(str(place, "keep_set must ", needs_set ? "" : "not ",
                        "be given with the choice '", choice.choice, "'"));
  }
  if (choice.keep_set) {
    try {
      choice.keep_set->check();
    } catch (const PlanError& error) {
      throw PlanError(place + error.what());
    }
  }
  if (choice.bytes < 0_B) {
    throw PlanError(
        str(place, "bytes must be >= 0, got ", choice.bytes.count()));
  }
  if (choice.nanoseconds < 0) {
    throw PlanError(
        str(place, "nanoseconds must be >= 0, got ", choice.nanoseconds));
  }
}

}  // namespace

std::vector<std::string> technique_names() {
  std::vector<std::string> names;
  for (const Technique& each : techniques()) names.emplace_back(each.name);
  return names;
}

const Technique* find_technique(std::string_view name) {
  const auto all = techniques();
  const auto found = std::ranges::find(all, name, &Technique::name);
  return found == all.end() ? nullptr : &*found;
}

bool is_available(const Technique& technique, const Question& question) {
  return question.wish(technique) != Wish::Off &&
         std::ranges::find(question.disabled_rules, technique.rule) ==
             question.disabled_rules.end() &&
         !technique.why_not(question);
}

Trace step_under(const Question& question, const Plan& plan) {
  Trace step = plain_step(*question.trace);
  for (const Technique& technique : techniques()) {
    step = technique.predict(step, plan, question);
  }
  return step;
}

std::vector<Choice> fallback_choices(const Question& question,
                                     bool only_asked) {
  std::vector<Choice> choices;
  for (const Technique& technique : techniques()) {
    const Wish wish = question.wish(technique);
    if (wish == Wish::Off || (only_asked && wish != Wish::Asked)) continue;
    if (auto choice = technique.fallback(question)) {
      choices.push_back(*std::move(choice));
    }
  }
  return choices;
}

void check_choices(std::string_view place, std::span<const Choice> choices,
                   bool in_layer) {
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const std::string here = str(place, "choices[", i, "].");
    check_choice(here, choices[i], in_layer);
    if (find_choice(choices.first(i), choices[i].technique) != nullptr) {
      throw PlanError(str(here, "technique must not be there twice, got '",
                          choices[i].technique, "'"));
    }
  }
}

void check_allowed(const Plan& plan, const Config& config) {
  const EffectiveConfig effective = config.resolve();
  if (effective.budget && plan.peak > *effective.budget) {
    throw PlanError(str("budget must be at least the given plan's peak, ",
                        plan.peak.count(), " bytes (", plan.peak, "), got ",
                        effective.budget->count(), " (", *effective.budget,
                        ")"));
  }
  const auto check = [&](std::span<const Choice> choices) {
    for (const Choice& choice : choices) {
      const Technique* technique = find_technique(choice.technique);
      if (technique == nullptr || technique->is_on == nullptr) continue;
      if (config.is_set(technique->field) && !(effective.*technique->is_on)) {
        throw ConfigError(str(
            technique->field, " must not be False with a plan that uses it (",
            technique->name, ": ", technique->describe(choice), ")"));
      }
    }
  };
  check(plan.choices);
  for (const LayerPlan& layer : plan.layers) check(layer.choices);
}

std::string describe(std::span<const Choice> choices) {
  std::string text;
  for (const Choice& choice : choices) {
    const Technique* technique = find_technique(choice.technique);
    text += str(text.empty() ? "" : " + ", technique == nullptr
                                               ? choice.technique
                                               : technique->describe(choice));
  }
  return text;
}

const Choice* find_choice(std::span<const Choice> choices,
                          std::string_view technique) {
  const auto found = std::ranges::find(choices, technique, &Choice::technique);
  return found == choices.end() ? nullptr : &*found;
}

}  // namespace memscale
