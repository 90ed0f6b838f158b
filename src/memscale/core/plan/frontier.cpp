#include "memscale/core/plan/frontier.h"

#include <algorithm>
#include <utility>

#include "memscale/core/plan/technique.h"

namespace memscale {
namespace {

// Between two neighbours of those, so many more are looked at.
constexpr int kBetween = 8;

// The better of two, if smaller bytes or less time is what counts.
bool is_faster(const Forecast& a, const Forecast& b) {
  return std::pair(a.nanoseconds, a.peak) < std::pair(b.nanoseconds, b.peak);
}
bool is_smaller(const Forecast& a, const Forecast& b) {
  return std::pair(a.peak, a.nanoseconds) < std::pair(b.peak, b.nanoseconds);
}

}  // namespace

FrontierSearch::FrontierSearch(const Question& question)
    : question_(question), choices_(question) {
  for (const auto policy :
       {ReplayPolicy::Keep, ReplayPolicy::Cheap, ReplayPolicy::Block}) {
    uniform_.push_back(forecast(question_, uniform_rules(question_, policy)));
  }
}

std::optional<Forecast> FrontierSearch::fastest_within(Bytes limit) const {
  if (uniform_.front().peak <= limit) return uniform_.front();  // keeps all
  const std::vector<Forecast> all = frontier();
  const auto upper = std::ranges::upper_bound(all, limit, {}, &Forecast::peak);
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

std::vector<Forecast> FrontierSearch::frontier(std::size_t max_points) const {
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

// Of the solver's plans for limits from `low` to `high`.
std::vector<Forecast> FrontierSearch::between(Bytes low, Bytes high) const {
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
// gain nothing by it. Not always the better one: a layer's bytes may be let go
// with its neighbour's.
void FrontierSearch::add_forecasts(const Selection& selection,
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

std::vector<Forecast> forecast_frontier(const Question& question,
                                        std::size_t max_points) {
  if (!question.trace->saves_known) {
    return {forecast(question, uniform_rules(question, ReplayPolicy::Keep))};
  }
  std::vector<Forecast> all = FrontierSearch(question).frontier(max_points);
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
  const bool has_choice =
      std::ranges::any_of(techniques(), [&](const Technique& technique) {
        return technique.stage == Stage::Layers &&
               is_available(technique, question);
      });
  if (!has_choice) {
    const auto keep = uniform_rules(question, ReplayPolicy::Keep);
    return forecast(question, keep).peak <= budget;
  }
  return FrontierSearch(question).fastest_within(budget).has_value();
}

}  // namespace memscale
