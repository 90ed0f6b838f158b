#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "memscale/base/error.h"
#include "memscale/core/plan/forecast.h"
#include "memscale/core/plan/frontier.h"
#include "memscale/core/plan/question.h"
#include "memscale/core/plan/rules/rule.h"
#include "memscale/core/plan/tape_choice.h"
#include "memscale/core/predict/replayed_step.h"
#include "memscale/core/techniques/table.h"

namespace memscale {
namespace {

constexpr std::array<std::string_view, 3> kChoices = {"cheap", "block",
                                                      kChosen};

std::optional<std::string> why_not(const Question& question) {
  if (question.trace->saves_known) return std::nullopt;
  return "what backward needs is not known: every layer keeps all";
}

void fill_frontier(RuleContext& context, std::size_t max_plans) {
  const Question& question = context.question;
  for (const Forecast& found : forecast_frontier(question, max_plans)) {
    Plan& plan = context.decision.frontier.emplace_back(context.plan());
    apply_forecast(question, found, plan);
    plan.verdicts.push_back(
        {std::string(context.rule), "the fastest with this peak"});
  }
}

void choose_under_budget(RuleContext& context, const FrontierSearch& search) {
  const Question& question = context.question;
  const std::optional<Bytes> asked = question.config.budget;
  if (!asked) return;
  const Bytes budget = *asked - question.margin;
  if (const auto found = search.fastest_within(budget)) {
    apply_forecast(question, *found, context.plan());
    context.say("the fastest plan under the budget");
    return;
  }
  const Forecast smallest = search.frontier().front();
  apply_forecast(question, smallest, context.plan());
  context.decision.smallest_budget = smallest.peak + question.margin;
  context.say(str("no plan is under the budget; the smallest peak is ",
                  smallest.peak + question.margin));
}

void choose_by_mode(RuleContext& context, const FrontierSearch& search) {
  const Question& question = context.question;
  const std::vector<Forecast> frontier = search.frontier();
  const auto limit = question.config.slowdown_limit;
  const auto is_allowed = [&](const Forecast& found) {
    return !limit ||
           static_cast<double>(found.nanoseconds) <=
               *limit * static_cast<double>(context.plan().plain_nanoseconds);
  };
  // The last one takes no time at all.
  const auto chosen = std::ranges::find_if(frontier, is_allowed);
  apply_forecast(question, *chosen, context.plan());
  const Bytes peak = context.plan().peak;
  const auto memory = question.limit();
  std::string text = "the smallest peak";
  if (limit) text += str(" for at most ", *limit * 100, " % more time");
  if (memory && peak > *memory) {
    text += str(", which is ", peak - *memory, " more than there is");
    if (frontier.front().peak + question.margin <= *memory) {
      text += "; a slower plan would fit: mode aggressive, or a budget";
    }
  }
  context.say(text);
}

bool recompute_layers(RuleContext& context) {
  if (context.max_plans) {
    fill_frontier(context, *context.max_plans);
    return true;
  }
  const FrontierSearch search(context.question);
  if (context.question.config.budget) {
    choose_under_budget(context, search);
  } else {
    choose_by_mode(context, search);
  }
  return true;
}

Trace predict(const Trace& step, const Plan& plan, const Question& question) {
  if (!step.saves_known) return step;
  return replayed_step(step, tape_rules(plan, question.min_bytes),
                       question.on_cpu, question.target)
      .trace;
}

std::optional<Choice> fallback(const Question& question) {
  if (question.step.is_compiled) return std::nullopt;
  // Under a budget the least is held: nobody knows whether more would fit.
  const bool holds_least =
      question.config.mode == OptimizationMode::Aggressive ||
      question.config.budget.has_value();
  TapeRules rules;
  rules.policy = holds_least ? ReplayPolicy::Block : ReplayPolicy::Cheap;
  return choice_of(rules);
}

std::string describe(const Choice& choice) {
  if (!choice.keep_set) return str("recompute (", choice.choice, ")");
  return str("recompute (keeps ", choice.keep_set->kept.size(), " results of ",
             choice.keep_set->ops.size(), " ops)");
}

}  // namespace

Technique recompute_technique() {
  return {.name = kRecompute,
          .rule = "recompute_layers",
          .stage = Stage::Layers,
          .field = "enable_checkpointing",
          .is_on = &EffectiveConfig::enable_checkpointing,
          .off = "enable_checkpointing is off: every layer keeps all",
          .choices = kChoices,
          .with_keep_set = kChosen,
          .why_not = &why_not,
          .decide = &recompute_layers,
          .predict = &predict,
          .fallback = &fallback,
          .describe = &describe};
}

}  // namespace memscale
