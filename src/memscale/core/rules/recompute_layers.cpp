#include <algorithm>
#include <optional>
#include <vector>

#include "memscale/base/error.h"
#include "memscale/core/layer_choices.h"
#include "memscale/core/rules/recompute_layers.h"
#include "memscale/core/rules/rule.h"

namespace memscale {
namespace {

// From which plans are chosen.
constexpr std::size_t kFrontier = 24;
// Between two neighbours of those, so many more are looked at.
constexpr int kBetween = 8;

// The better of two, if smaller bytes or less time is what counts.
bool is_faster(const Forecast& a, const Forecast& b) {
  return std::pair(a.nanoseconds, a.peak) < std::pair(b.nanoseconds, b.peak);
}
bool is_smaller(const Forecast& a, const Forecast& b) {
  return std::pair(a.peak, a.nanoseconds) < std::pair(b.peak, b.nanoseconds);
}

class Chooser final {
 public:
  explicit Chooser(const Question& question)
      : question_(question), choices_(question) {
    for (const auto policy :
         {ReplayPolicy::Keep, ReplayPolicy::Cheap, ReplayPolicy::Block}) {
      uniform_.push_back(forecast(question_, uniform_rules(question_, policy)));
    }
  }

  // The fastest whose peak is within the limit; nothing if none is.
  //
  // Note [A larger budget is never slower]
  // The forecast of a mixture may be off from the sum of its parts, so what the
  // solver finds for a limit may not fit, and what fits may come from another
  // limit. Candidates therefore do not depend on the limit: they are the
  // frontier, and between two neighbours of it a row of limits that is the same
  // for all that fall there. Those that are faster than the upper neighbour
  // would make it a step back, and are left out.
  std::optional<Forecast> fastest_within(Bytes limit) const {
    if (uniform_.front().peak <= limit) return uniform_.front();  // keeps all
    const std::vector<Forecast> all = frontier(kFrontier);
    const auto upper =
        std::ranges::upper_bound(all, limit, {}, &Forecast::peak);
    if (upper == all.begin()) return std::nullopt;
    Forecast best = *std::prev(upper);
    if (upper == all.end()) return best;
    for (Forecast& found : between(std::prev(upper)->peak, upper->peak)) {
      if (found.peak <= limit && found.nanoseconds >= upper->nanoseconds &&
          is_faster(found, best)) {
        best = std::move(found);
      }
    }
    return best;
  }

  // Peaks rise, times fall.
  std::vector<Forecast> frontier(std::size_t max_points) const {
    std::vector<Forecast> all = uniform_;
    Problem problem = choices_.problem();
    problem.host_budget = Bytes();
    for (const SolveResult& result : pareto(problem, max_points)) {
      add_forecasts(result.plan, all);
    }
    std::ranges::stable_sort(all, is_smaller);
    std::vector<Forecast> best;
    for (Forecast& found : all) {
      if (best.empty() || found.nanoseconds < best.back().nanoseconds) {
        best.push_back(std::move(found));
      }
    }
    return best;
  }

 private:
  // Of the solver's plans for limits from `low` to `high`.
  std::vector<Forecast> between(Bytes low, Bytes high) const {
    Problem problem = choices_.problem();
    problem.host_budget = Bytes();
    std::vector<Forecast> found;
    Selection last;
    for (int i = 0; i < kBetween; ++i) {
      problem.device_budget = low + (high - low) / kBetween * i;
      SolveResult result = solve(problem);
      if (result.status == SolveStatus::Infeasible || result.plan == last) {
        continue;
      }
      last = std::move(result.plan);
      add_forecasts(last, found);
    }
    return found;
  }

  // Of what was selected, and of the same without the layers that recompute and
  // gain nothing by it. Not always the better one: a layer's bytes may be let
  // go with its neighbour's.
  void add_forecasts(const Selection& selection,
                     std::vector<Forecast>& found) const {
    Forecast selected = forecast(question_, choices_.rules(selection.choice));
    std::vector<TapeRules> rules = selected.rules;
    bool changed = false;
    for (std::size_t i = 0; i < rules.size(); ++i) {
      const Forecast::Layer& layer = selected.layers[i];
      // Those that hold nothing may be around others, whose tape would end
      // where they run; a trace does not tell whether they are called at all.
      if (rules[i].keeps_all() || layer.plain == Bytes() ||
          layer.held < layer.plain) {
        continue;
      }
      rules[i].policy = ReplayPolicy::Keep;
      rules[i].keep_set.reset();
      changed = true;
    }
    // First: of two that are equal, the first is taken.
    if (changed) found.push_back(forecast(question_, std::move(rules)));
    found.push_back(std::move(selected));
  }

  const Question& question_;
  const LayerChoices choices_;
  std::vector<Forecast> uniform_;
};

std::string reason_for(const LayerPlan& layer) {
  if (!layer.recomputes()) {
    return layer.plain_bytes == Bytes() ? "holds nothing" : "";
  }
  if (layer.held_bytes >= layer.plain_bytes) return "nothing to gain";
  return str("frees ", layer.plain_bytes - layer.held_bytes);
}

}  // namespace

void apply_forecast(const Question& question, const Forecast& found,
                    Plan& plan) {
  plan.peak = found.peak + question.margin;
  plan.host_peak = found.host_peak;
  plan.nanoseconds = std::max<std::int64_t>(found.nanoseconds, 0);
  for (std::size_t i = 0; i < plan.layers.size(); ++i) {
    LayerPlan& layer = plan.layers[i];
    const TapeRules& rules = found.rules[i];
    layer.policy = rules.policy;
    layer.keep_set.reset();
    if (rules.keep_set != nullptr) layer.keep_set = *rules.keep_set;
    layer.plain_bytes = found.layers[i].plain;
    layer.held_bytes = found.layers[i].held;
    layer.nanoseconds = std::max<std::int64_t>(found.layers[i].nanoseconds, 0);
    layer.reason = reason_for(layer);
  }
}

std::vector<Forecast> forecast_frontier(const Question& question,
                                        std::size_t max_points) {
  if (!question.trace->saves_known) {
    return {forecast(question, uniform_rules(question, ReplayPolicy::Keep))};
  }
  std::vector<Forecast> all = Chooser(question).frontier(max_points);
  if (all.size() <= max_points) return all;
  // Evenly, both ends included; of one, the smallest.
  std::vector<Forecast> some;
  for (std::size_t i = 0; i < max_points; ++i) {
    const std::size_t gaps = std::max<std::size_t>(max_points - 1, 1);
    some.push_back(std::move(all[i * (all.size() - 1) / gaps]));
  }
  return some;
}

bool fits_budget(const Question& question, Bytes budget) {
  if (!question.config.enable_checkpointing) {
    const auto keep = uniform_rules(question, ReplayPolicy::Keep);
    return forecast(question, keep).peak <= budget;
  }
  return Chooser(question).fastest_within(budget).has_value();
}

bool recompute_layers(RuleContext& context) {
  const Question& question = context.question;
  if (!question.config.enable_checkpointing) {
    context.say("enable_checkpointing is off: every layer keeps all");
    return true;
  }
  if (!question.trace->saves_known) {
    context.say("what backward needs is not known: every layer keeps all");
    return true;
  }
  const Chooser chooser(question);
  if (question.config.budget) {
    const Bytes budget = *question.config.budget - question.margin;
    if (const auto found = chooser.fastest_within(budget)) {
      apply_forecast(question, *found, context.plan());
      context.say("the fastest plan under the budget");
      return true;
    }
    const Forecast smallest = chooser.frontier(kFrontier).front();
    apply_forecast(question, smallest, context.plan());
    context.decision.smallest_budget = smallest.peak + question.margin;
    context.say(str("no plan is under the budget; the smallest peak is ",
                    smallest.peak + question.margin));
    return true;
  }

  const std::vector<Forecast> frontier = chooser.frontier(kFrontier);
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
  return true;
}

}  // namespace memscale
