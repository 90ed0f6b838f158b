#include "memscale/core/plan/forecast.h"

#include <algorithm>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/plan/tape_choice.h"
#include "memscale/core/predict/replayed_step.h"
#include "memscale/core/trace/timeline.h"

namespace memscale {
namespace {

std::string reason_for(const LayerPlan& layer) {
  if (layer.held_bytes >= layer.plain_bytes) return "nothing to gain";
  return str("frees ", layer.plain_bytes - layer.held_bytes);
}

}  // namespace

std::vector<std::int64_t> times_by_layer(const CostModel& cost,
                                         const Trace& trace) {
  std::vector<std::int64_t> times(trace.layers.size());
  for (const Op& op : trace.ops) {
    if (op.layer.valid()) {
      times[op.layer.index()] += cost.nanoseconds(trace, op);
    }
  }
  return times;
}

Forecast forecast(const Question& question, std::vector<TapeRules> rules) {
  const Trace& plain = *question.trace;
  ReplayedStep step;
  if (plain.saves_known) {
    step = replayed_step(plain, rules, question.on_cpu, question.target);
  } else {  // nothing is replayed, and who holds what is not known
    step.trace = plain;
    step.layers.resize(plain.layers.size());
  }
  const auto peak_at = [&](Place place, Bytes granularity) {
    const Timeline timeline(step.trace, place, granularity);
    const auto peak = timeline.peak();
    return peak ? peak->bytes : timeline.resident();
  };
  Forecast result;
  result.rules = std::move(rules);
  result.peak = peak_at(Place::Device, question.granularity);
  result.host_peak = peak_at(Place::Host, Bytes(1));
  const auto before = times_by_layer(question.cost, plain);
  const auto after = times_by_layer(question.cost, step.trace);
  for (std::size_t i = 0; i < step.layers.size(); ++i) {
    const LayerReplay& layer = step.layers[i];
    const std::int64_t time = after[i] - before[i];
    result.layers.push_back({layer.held_plain, layer.held, time});
    result.nanoseconds += time;
  }
  return result;
}

std::vector<TapeRules> uniform_rules(const Question& question,
                                     ReplayPolicy policy) {
  const TapeRules rules{policy, nullptr,
                        static_cast<std::size_t>(question.min_bytes.count())};
  return {question.trace->layers.size(), rules};
}

void apply_forecast(const Question& question, const Forecast& found,
                    Plan& plan) {
  plan.peak = found.peak + question.margin;
  plan.host_peak = found.host_peak;
  plan.nanoseconds = std::max<std::int64_t>(found.nanoseconds, 0);
  for (std::size_t i = 0; i < plan.layers.size(); ++i) {
    LayerPlan& layer = plan.layers[i];
    layer.plain_bytes = found.layers[i].plain;
    layer.held_bytes = found.layers[i].held;
    layer.choices.clear();
    if (found.rules[i].keeps_all()) continue;
    Choice& choice = layer.choices.emplace_back(choice_of(found.rules[i]));
    choice.bytes = std::max(layer.plain_bytes - layer.held_bytes, Bytes());
    choice.nanoseconds = std::max<std::int64_t>(found.layers[i].nanoseconds, 0);
    choice.reason = reason_for(layer);
  }
}

}  // namespace memscale
