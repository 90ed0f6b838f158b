#include "memscale/core/solver/solver.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/base/wide.h"
#include "memscale/core/solver/bound.h"
#include "memscale/core/solver/instance.h"
#include "memscale/core/solver/search.h"

namespace memscale {
namespace {

using solver::Found;
using solver::Instance;

constexpr auto kMaxSum = static_cast<std::int64_t>(power_of_two(50));
constexpr std::size_t kFewStates = 64;
// States times options, over all layers: a quarter of a second.
constexpr std::size_t kMaxWork = 10'000'000;

template <typename... Where>
void check_amount(std::int64_t amount, const Where&... where) {
  if (amount >= 0 && amount <= kMaxSum) return;
  throw PlanError(str(where..., " must be from 0 to 2^50, got ", amount));
}

// Choices by Item, as choices by Option.
std::vector<std::size_t> options_of(const Instance& instance,
                                    std::vector<std::size_t> choice) {
  for (std::size_t k = 0; k < choice.size(); ++k) {
    choice[k] = instance.layers[k][choice[k]].option;
  }
  return choice;
}

// Some plan fits, such as `known`: the fastest under the budget. First with few
// states, which is quick and mostly near the best; then with a better bound and
// more, of which the time found so far rules out nearly all.
SolveResult solve_feasible(const Problem& problem, const Instance& instance,
                           std::vector<std::size_t> known,
                           const SolveLimits& limits) {
  SolveResult result;
  result.plan = evaluate(problem, options_of(instance, known));
  const Wide host_price = solver::best_host_price(instance);
  std::size_t num_items = 1;
  for (const auto& items : instance.layers) num_items += items.size();
  const std::size_t most = std::clamp<std::size_t>(
      kMaxWork / num_items, 1, std::max<std::size_t>(limits.num_states, 1));
  std::vector<bool> tight;
  for (const std::size_t wanted : {kFewStates, kFewStates, most}) {
    const std::size_t num_states = std::min(wanted, most);
    solver::Bound bound(instance, host_price, std::move(tight));
    const Found found =
        search(instance, bound, result.plan.nanoseconds, num_states);
    if (found.choice) {
      known = *found.choice;
      result.plan = evaluate(problem, options_of(instance, known));
    }
    result.lower_bound =
        std::max(result.lower_bound,
                 std::min(found.lower_bound, result.plan.nanoseconds));
    if (result.gap() <= limits.gap) break;
    tight = solver::tight_layers(instance, known);
  }
  result.status = result.lower_bound == result.plan.nanoseconds
                      ? SolveStatus::Optimal
                      : SolveStatus::Feasible;
  return result;
}

}  // namespace

void Problem::check() const {
  check_amount(other_peak.count(), "other_peak");
  if (host_budget < Bytes()) {
    throw PlanError(str("host_budget must be >= 0, got ", host_budget.count()));
  }
  for (std::size_t i = 0; i < options.size(); ++i) {
    if (options[i].empty()) {
      throw PlanError(str("options[", i, "] must not be empty"));
    }
    for (std::size_t c = 0; c < options[i].size(); ++c) {
      const Option& option = options[i][c];
      const auto check_field = [&](std::int64_t amount, std::string_view name) {
        check_amount(amount, "options[", i, "][", c, "].", name);
      };
      check_field(option.held.count(), "held");
      check_field(option.forward_peak.count(), "forward_peak");
      check_field(option.backward_peak.count(), "backward_peak");
      check_field(option.host.count(), "host");
      check_field(option.nanoseconds, "nanoseconds");
    }
  }
  Option sum;
  for (std::size_t k = 0; k < layers.size(); ++k) {
    const ProblemLayer& layer = layers[k];
    if (layer.options >= options.size()) {
      throw PlanError(str("layers[", k, "].options must be one of ",
                          options.size(), " lists, got ", layer.options));
    }
    check_amount(layer.forward_base.count(), "layers[", k, "].forward_base");
    check_amount(layer.backward_base.count(), "layers[", k, "].backward_base");
    Option most;
    for (const Option& option : options[layer.options]) {
      most.held = std::max(most.held, option.held);
      most.host = std::max(most.host, option.host);
      most.nanoseconds = std::max(most.nanoseconds, option.nanoseconds);
    }
    sum.held += most.held;
    sum.host += most.host;
    sum.nanoseconds += most.nanoseconds;
    check_amount(sum.held.count(), "the sum of held");
    check_amount(sum.host.count(), "the sum of host");
    check_amount(sum.nanoseconds, "the sum of nanoseconds");
  }
}

double SolveResult::gap() const {
  if (plan.nanoseconds <= lower_bound) return 0.0;
  if (lower_bound == 0) return std::numeric_limits<double>::infinity();
  return static_cast<double>(plan.nanoseconds - lower_bound) /
         static_cast<double>(lower_bound);
}

Selection evaluate(const Problem& problem, std::vector<std::size_t> choice) {
  if (choice.size() != problem.layers.size()) {
    throw PlanError(str("choice must be given for each of ",
                        problem.layers.size(), " layers, got ", choice.size()));
  }
  Selection plan;
  plan.peak = problem.other_peak;
  Bytes held;
  for (std::size_t k = 0; k < choice.size(); ++k) {
    const ProblemLayer& layer = problem.layers[k];
    const std::vector<Option>& options = problem.options.at(layer.options);
    if (choice[k] >= options.size()) {
      throw PlanError(str("choice[", k, "] must be one of ", options.size(),
                          " options, got ", choice[k]));
    }
    const Option& option = options[choice[k]];
    held += option.held;
    plan.peak =
        std::max({plan.peak, held + layer.forward_base + option.forward_peak,
                  held + layer.backward_base + option.backward_peak});
    plan.host += option.host;
    plan.nanoseconds += option.nanoseconds;
  }
  plan.choice = std::move(choice);
  return plan;
}

SolveResult solve(const Problem& problem, const SolveLimits& limits) {
  problem.check();
  Instance instance(problem);
  instance.device_budget =
      std::min(instance.device_budget, solver::kNoLimit.count());
  // A rough answer is mostly enough to see that something fits.
  auto smallest = smallest_budget(instance, kFewStates);
  if (smallest && smallest->budget > instance.device_budget) {
    smallest = smallest_budget(instance, limits.num_states);
  }
  if (!smallest) return {};
  const bool fits = smallest->budget <= instance.device_budget;
  if (!fits) instance.device_budget = smallest->budget;
  SolveResult result =
      solve_feasible(problem, instance, std::move(smallest->choice), limits);
  if (!fits) {
    result.status = SolveStatus::Infeasible;
    result.smallest_budget = Bytes(instance.device_budget);
  }
  return result;
}

}  // namespace memscale
