#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memscale/base/error.h"
#include "memscale/core/plan/forecast.h"
#include "memscale/core/plan/frontier.h"
#include "memscale/core/plan/knee.h"
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

// The part of a frontier that takes at most so much longer than the plain step.
std::span<const Forecast> within_slowdown(std::span<const Forecast> frontier,
                                          std::optional<double> limit,
                                          std::int64_t plain_nanoseconds) {
  if (!limit) return frontier;
  const auto is_allowed = [&](const Forecast& found) {
    return static_cast<double>(found.nanoseconds) <=
           *limit * static_cast<double>(plain_nanoseconds);
  };
  // The last one takes no time at all.
  return {std::ranges::find_if(frontier, is_allowed), frontier.end()};
}

constexpr std::string_view kTooLittle =
    " percent would buy less than a percent of the peak";

// "at 6.7 % more time": the step under these rules, all choices included.
std::string at_time(const Plan& plan, const Forecast& found) {
  const double slowdown =
      static_cast<double>(plan.step_nanoseconds() + found.nanoseconds) /
      static_cast<double>(std::max<std::int64_t>(plan.plain_nanoseconds, 1));
  return str("at ", std::round(slowdown * 1000) / 10, " % more time");
}

void choose_by_mode(RuleContext& context, const FrontierSearch& search) {
  const Question& question = context.question;
  Plan& plan = context.plan();
  const std::vector<Forecast> frontier = search.frontier();
  const auto limit = question.config.slowdown_limit;
  const auto memory = question.limit();
  const auto excess = [&](const Forecast& found) {
    return memory ? found.peak + question.margin - *memory : Bytes();
  };
  const auto allowed = within_slowdown(frontier, limit, plan.plain_nanoseconds);
  const Forecast* chosen = &allowed.front();
  std::string text = "the smallest peak";
  if (limit) text += str(" for at most ", *limit * 100, " % more time");
  if (question.config.stops_at_knee) {
    const Forecast& knee =
        knee_of(allowed, plan.plain_nanoseconds + plan.step_nanoseconds(),
                question.margin);
    if (&knee != chosen && excess(knee) > 0_B) {
      text = str("the step does not fit ", at_time(plan, knee),
                 ", so more is spent: ", text);
    } else if (&knee != chosen) {
      chosen = &knee;
      text = knee.nanoseconds > 0
                 ? str("stops ", at_time(plan, knee), ": a further", kTooLittle)
                 : str("spends no time: a", kTooLittle);
    }
  }
  if (excess(*chosen) > 0_B) {
    text += str(", which is ", excess(*chosen), " more than there is");
    if (excess(frontier.front()) <= 0_B) {
      text += "; a slower plan would fit: mode aggressive, or a budget";
    }
  }
  apply_forecast(question, *chosen, plan);
  context.say(std::move(text));
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
