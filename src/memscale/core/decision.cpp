#include "memscale/core/decision.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>

#include "memscale/base/ascii.h"
#include "memscale/base/error.h"
#include "memscale/base/log.h"
#include "memscale/core/optimizer_bits.h"
#include "memscale/core/rules/recompute_layers.h"
#include "memscale/core/rules/rule.h"
#include "memscale/core/timeline.h"

namespace memscale {
namespace {

// In this order. See rules/rule.h.
constexpr std::array kRules = {
    Rule{"weigh_memory", &weigh_memory},
    Rule{"quantise_optimizer", &quantise_optimizer},
    Rule{"skip_tiny_model", &skip_tiny_model},
    Rule{"recompute_layers", &recompute_layers},
};

void check(const Question& question) {
  for (const std::string& name : question.disabled_rules) {
    if (std::ranges::find(kRules, name, &Rule::name) == kRules.end()) {
      throw PlanError(
          str("disabled_rules must name rules, got ", ascii::quoted(name)));
    }
  }
  if (!question.parameter_bytes.empty() &&
      question.parameter_bytes.size() != question.trace->layers.size()) {
    throw PlanError(str("parameter_bytes must be of the trace's ",
                        question.trace->layers.size(), " layers, got ",
                        question.parameter_bytes.size()));
  }
}

Bytes peak_of(const Timeline& timeline) {
  const auto peak = timeline.peak();
  return peak ? peak->bytes : timeline.resident();
}

// Of the program as it is by itself: it holds for longer what the trace has it
// forget.
Bytes plain_peak(const Question& question) {
  Trace plain = *question.trace;
  for (Storage& storage : plain.storages) {
    if (storage.plain_freed.valid() && storage.freed.valid()) {
      storage.freed = std::max(storage.freed, storage.plain_freed);
    }
  }
  return peak_of(Timeline(plain, Place::Device, question.granularity));
}

// Says what is forgotten, if anything is. Python looks for the rule's name: a
// program is run as it was traced.
void say_forgotten(const Trace& trace, Plan& plan) {
  Bytes bytes;
  for (const Storage& storage : trace.storages) {
    if (storage.plain_freed.valid()) bytes += storage.bytes;
  }
  if (bytes == 0_B) return;
  plan.verdicts.push_back(
      {"forget_cache", str("keys and values that the model caches and training "
                           "does not read, ",
                           bytes, ", are let go as each layer returns")});
}

// Every layer keeps all: what rules start from.
Plan plain_plan(const Question& question, const Timeline& timeline) {
  const Trace& trace = *question.trace;
  Plan plan;
  plan.model = question.model;
  plan.fingerprint = fingerprint_of(trace);
  plan.call = question.call;
  plan.device = question.device;
  plan.optimizer = question.optimizer;
  plan.mode = question.config.mode;
  plan.budget = question.config.budget;
  for (const Layer& layer : trace.layers) {
    plan.layers.emplace_back().layer = layer.name;
  }
  if (!question.parameter_bytes.empty()) {
    for (std::size_t i = 0; i < plan.layers.size(); ++i) {
      plan.layers[i].parameter_bytes = question.parameter_bytes[i];
    }
  }
  plan.plain_nanoseconds = question.cost.nanoseconds(trace);
  say_forgotten(trace, plan);
  plan.plain_peak =
      plan.verdicts.empty() ? peak_of(timeline) : plain_peak(question);
  apply_forecast(
      question, forecast(question, uniform_rules(question, ReplayPolicy::Keep)),
      plan);
  return plan;
}

}  // namespace

std::optional<Bytes> Question::limit() const {
  if (config.budget) return config.budget;
  if (!device_memory) return std::nullopt;
  return Bytes(static_cast<std::int64_t>(
      static_cast<double>(device_memory->count()) * utilization));
}

Decision decide(const Question& asked) {
  check(asked);
  Question question = asked;  // rules may change it
  std::unique_ptr<const Trace> replaced;
  const Timeline timeline(*question.trace, Place::Device, question.granularity);
  Decision decision{plain_plan(question, timeline), std::nullopt};
  for (const Rule& rule : kRules) {
    if (std::ranges::find(question.disabled_rules, rule.name) !=
        question.disabled_rules.end()) {
      continue;
    }
    const auto start = std::chrono::steady_clock::now();
    RuleContext context{question, replaced, timeline, decision, rule.name};
    const bool go_on = rule.apply(context);
    decision.plan.check();
    const std::chrono::duration<double, std::milli> time =
        std::chrono::steady_clock::now() - start;
    log::debug("decide", "rule ", rule.name, ": ", time.count(), " ms");
    if (!go_on) break;
  }
  // Also where no rule was there, or allowed, to lower it.
  const Plan& plan = decision.plan;
  if (plan.budget && plan.peak > *plan.budget && !decision.smallest_budget) {
    decision.smallest_budget = plan.peak;
  }
  return decision;
}

std::vector<Plan> plan_frontier(const Question& asked, std::size_t max_plans) {
  check(asked);
  Question question = asked;
  const Timeline timeline(*question.trace, Place::Device, question.granularity);
  Plan plain = plain_plan(question, timeline);
  std::optional<Trace> with_8bit;
  if (question.state_bits == StateBits::Eight &&
      question.optimizer_can_be_8bit) {
    plain.optimizer_nanoseconds =
        optimizer_step_times(*question.trace, question.cost,
                             question.steps_8bit_in_pieces)
            .extra();
    with_8bit = with_8bit_state(*question.trace, question.on_cpu);
    question.trace = &*with_8bit;
    plain.optimizer_bits = 8;
  }
  std::vector<Plan> plans;
  for (const Forecast& found : forecast_frontier(question, max_plans)) {
    Plan plan = plain;
    apply_forecast(question, found, plan);
    plan.verdicts.push_back({"frontier", "the fastest with this peak"});
    plans.push_back(std::move(plan));
  }
  return plans;
}

std::vector<std::string> rule_names() {
  std::vector<std::string> names;
  names.reserve(kRules.size());
  for (const Rule& rule : kRules) names.emplace_back(rule.name);
  return names;
}

}  // namespace memscale
