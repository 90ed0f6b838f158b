#include <algorithm>
#include <optional>
#include <vector>

#include "memscale/base/error.h"
#include "memscale/core/layer_choices.h"
#include "memscale/core/rules/recompute_layers.h"
#include "memscale/core/rules/rule.h"

namespace memscale {
namespace {

// The forecast of a mixture may be off from the sum of its parts: so often the
// limit is lowered by what it is off.
constexpr int kMaxCorrections = 6;
// From which the smallest within a slowdown is chosen.
constexpr std::size_t kFrontier = 24;

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
  std::optional<Forecast> fastest_within(Bytes limit) const {
    std::optional<Forecast> best;
    const auto consider = [&](const Forecast& found) {
      if (found.peak <= limit && (!best || is_faster(found, *best))) {
        best = found;
      }
    };
    for (const Forecast& found : uniform_) consider(found);
    if (best && best->nanoseconds == 0) return best;
    Problem problem = choices_.problem();
    problem.device_budget = limit;
    problem.host_budget = Bytes();
    for (int i = 0; i <= kMaxCorrections; ++i) {
      const SolveResult result = solve(problem);
      if (result.status == SolveStatus::Infeasible) break;
      const Forecast found = forecast(result.plan);
      consider(found);
      if (found.peak <= limit) break;
      problem.device_budget -= found.peak - limit;
      if (problem.device_budget < Bytes()) break;
    }
    return best;
  }

  // Peaks rise, times fall.
  std::vector<Forecast> frontier(std::size_t max_points) const {
    std::vector<Forecast> all = uniform_;
    Problem problem = choices_.problem();
    problem.host_budget = Bytes();
    for (const SolveResult& result : pareto(problem, max_points)) {
      all.push_back(forecast(result.plan));
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
  Forecast forecast(const Question& question,
                    std::vector<TapeRules> rules) const {
    return memscale::forecast(question, std::move(rules));
  }
  Forecast forecast(const Selection& selection) const {
    return forecast(question_, choices_.rules(selection.choice));
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
  return Chooser(question).frontier(max_points);
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
