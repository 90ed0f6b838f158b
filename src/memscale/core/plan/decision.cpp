#include "memscale/core/plan/decision.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <span>
#include <utility>

#include "memscale/base/ascii.h"
#include "memscale/base/error.h"
#include "memscale/base/log.h"
#include "memscale/core/plan/forecast.h"
#include "memscale/core/plan/rules/rule.h"
#include "memscale/core/plan/technique.h"
#include "memscale/core/trace/timeline.h"

namespace memscale {
namespace {

// A rule, and the technique that it decides about; null: one of the engine's.
struct Entry {
  Rule rule;
  const Technique* technique;
};

// All rules, in the order in which they are asked.
std::span<const Entry> entries() {
  static const std::vector<Entry> kEntries = [] {
    std::vector<Entry> all;
    const auto add_stage = [&](Stage stage) {
      for (const Technique& technique : techniques()) {
        if (technique.stage != stage) continue;
        all.push_back({{technique.rule, technique.decide}, &technique});
      }
    };
    add_stage(Stage::Free);
    all.push_back({{"weigh_memory", &weigh_memory}, nullptr});
    add_stage(Stage::Step);
    all.push_back({{"skip_tiny_model", &skip_tiny_model}, nullptr});
    add_stage(Stage::Layers);
    return all;
  }();
  return kEntries;
}

void check(const Question& question) {
  for (const std::string& name : question.disabled_rules) {
    if (std::ranges::none_of(entries(), [&](const Entry& entry) {
          return entry.rule.name == name;
        })) {
      throw PlanError(
          str("disabled_rules must name rules, got ", ascii::quoted(name)));
    }
  }
  const std::size_t num_sizes = question.step.parameter_bytes.size();
  if (num_sizes != 0 && num_sizes != question.trace->layers.size()) {
    throw PlanError(str("parameter_bytes must be of the trace's ",
                        question.trace->layers.size(), " layers, got ",
                        num_sizes));
  }
}

Bytes peak_of(const Timeline& timeline) {
  const auto peak = timeline.peak();
  return peak ? peak->bytes : timeline.resident();
}

// No technique is used: what rules start from.
Plan plain_plan(const Question& question) {
  const Trace& trace = *question.trace;
  Plan plan;
  plan.model = question.step.model;
  plan.fingerprint = fingerprint_of(trace);
  plan.call = question.step.call;
  plan.device = question.device;
  plan.optimizer = question.step.optimizer;
  plan.mode = question.config.mode;
  plan.budget = question.config.budget;
  for (const Layer& layer : trace.layers) {
    plan.layers.emplace_back().layer = layer.name;
  }
  for (std::size_t i = 0; i < question.step.parameter_bytes.size(); ++i) {
    plan.layers[i].parameter_bytes = question.step.parameter_bytes[i];
  }
  plan.plain_nanoseconds = question.cost.nanoseconds(trace);
  // The margin, which no trace shows, would be there as well.
  plan.plain_peak =
      peak_of(Timeline(trace, Place::Device, question.granularity)) +
      question.margin;
  apply_forecast(
      question, forecast(question, uniform_rules(question, ReplayPolicy::Keep)),
      plan);
  return plan;
}

// False: the rules after it are not asked.
bool ask(const Entry& entry, RuleContext& context) {
  const Technique* technique = entry.technique;
  if (technique != nullptr) {
    std::optional<std::string> why_not;
    if (context.question.wish(*technique) == Wish::Off) {
      why_not = technique->off;
    } else {
      // A rule before it may have let go of what makes the step eligible.
      why_not = technique->why_not(context.asked);
    }
    if (why_not) {
      if (!why_not->empty()) context.say(*std::move(why_not));
      return true;
    }
  }
  const auto start = std::chrono::steady_clock::now();
  const bool go_on = entry.rule.apply(context);
  context.plan().check();
  const std::chrono::duration<double, std::milli> time =
      std::chrono::steady_clock::now() - start;
  log::debug("decide", "rule ", entry.rule.name, ": ", time.count(), " ms");
  return go_on;
}

Decision run_rules(const Question& asked,
                   std::optional<std::size_t> max_plans) {
  check(asked);
  Question question = asked;  // rules may change its step
  question.trace = std::make_shared<const Trace>(plain_step(*asked.trace));
  Decision decision{plain_plan(question), std::nullopt, {}};
  for (const Entry& entry : entries()) {
    if (std::ranges::find(question.disabled_rules, entry.rule.name) !=
        question.disabled_rules.end()) {
      continue;
    }
    RuleContext context{asked, question, decision, entry.rule.name, max_plans};
    if (!ask(entry, context)) break;
  }
  return decision;
}

}  // namespace

void RuleContext::set_step(std::shared_ptr<const Trace> step) {
  question.trace = std::move(step);
  apply_forecast(
      question, forecast(question, uniform_rules(question, ReplayPolicy::Keep)),
      plan());
}

Decision decide(const Question& question) {
  Decision decision = run_rules(question, std::nullopt);
  // Also where no rule was there, or allowed, to lower it.
  const Plan& plan = decision.plan;
  if (plan.budget && plan.peak > *plan.budget && !decision.smallest_budget) {
    decision.smallest_budget = plan.peak;
  }
  return decision;
}

Plan plan_for(const Question& question) {
  Decision decision = decide(question);
  const std::optional<Bytes> asked = question.config.budget;
  if (!decision.smallest_budget || !asked) return std::move(decision.plan);
  const Bytes smallest = *decision.smallest_budget;
  const Bytes budget = *asked;
  throw PlanError(str("budget must be at least ", smallest.count(), " bytes (",
                      smallest, ", at a predicted slowdown of ",
                      std::llround(decision.plan.slowdown() * 100), "%) for ",
                      question.step.model, " with ", question.step.call,
                      " and ", question.step.optimizer, ", got ",
                      budget.count(), " (", budget, ")"));
}

std::vector<Plan> plan_frontier(const Question& asked, std::size_t max_plans) {
  Question question = asked;
  question.config.budget.reset();
  question.config.slowdown_limit.reset();
  question.force = true;
  Decision decision = run_rules(question, max_plans);
  if (decision.frontier.empty()) {
    decision.frontier.push_back(std::move(decision.plan));
  }
  return std::move(decision.frontier);
}

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  for (const Entry& entry : entries()) names.emplace_back(entry.rule.name);
  return names;
}

}  // namespace memscale
