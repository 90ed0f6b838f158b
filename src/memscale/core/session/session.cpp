#include "memscale/core/session/session.h"

#include <algorithm>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/plan/decision.h"

namespace memscale {
namespace {

// Of a kind without a plan, so many steps are measured by themselves. Later
// ones are only watched, see MemoryTracker.
constexpr std::int64_t kNumWatched = 3;

}  // namespace

Session::Session(const Config& config, std::vector<std::string> layers,
                 const Tolerance& tolerance)
    : budget_(*config.budget),
      num_timed_steps_(*config.warmup_steps),
      layers_(std::move(layers)),
      tolerance_(tolerance) {}

Session::Kind& Session::at(std::size_t kind) {
  if (kind >= kinds_.size()) {
    throw InternalError(
        str("kind must be below ", kinds_.size(), ", got ", kind));
  }
  return kinds_[kind];
}

std::optional<std::size_t> Session::find(const CallKind& call) const {
  for (std::size_t i = 0; i < kinds_.size(); ++i) {
    if (kinds_[i].call.covers(call)) return i;
  }
  return std::nullopt;
}

std::size_t Session::add(CallKind call) {
  if (is_full()) {
    throw PlanError(str("a session plans for ", kMaxKinds, " kinds of calls"));
  }
  Kind& kind = kinds_.emplace_back();
  kind.call = std::move(call);
  return kinds_.size() - 1;
}

const Plan& Session::plan(std::size_t index, Question question) {
  Kind& kind = at(index);
  kind.plan = plan_for(question);
  kind.question = std::move(question);
  kind.was_planned_anew = false;
  kind.is_smallest = false;
  kind.has_given_up = false;
  start_measuring(kind, true);
  return *kind.plan;
}

// The steps of its plan, from the first one on.
void Session::start_measuring(Kind& kind, bool skips_first) {
  kind.first_steps.reset();
  kind.times.reset();
  if (!kind.plan) return;
  const std::int64_t num_steps =
      std::max<std::int64_t>(num_timed_steps_, kind.plan->budget ? 1 : 0);
  if (num_steps == 0) return kind.question.reset();
  kind.first_steps.emplace(*kind.plan, num_steps, skips_first);
  if (num_timed_steps_ > 0) kind.times = std::make_shared<OpTimes>();
}

const Plan* Session::plan_of(std::size_t kind) const {
  if (kind >= kinds_.size()) return nullptr;
  const std::optional<Plan>& plan = kinds_[kind].plan;
  return plan ? &*plan : nullptr;
}

std::vector<Plan> Session::plans() const {
  std::vector<Plan> plans;
  for (const Kind& kind : kinds_) {
    if (kind.plan) plans.push_back(*kind.plan);
  }
  return plans;
}

Measure Session::measure_of(std::size_t index) const {
  if (index >= kinds_.size()) return Measure::Nothing;
  const Kind& kind = kinds_[index];
  if (kind.has_given_up) return Measure::Nothing;
  if (kind.first_steps && !kind.first_steps->is_done()) {
    return kind.times ? Measure::All : Measure::Step;
  }
  if (kind.plan) return kind.plan->budget ? Measure::Peak : Measure::Nothing;
  if (!budget_) return Measure::Nothing;
  return kind.num_watched < kNumWatched ? Measure::Step : Measure::Peak;
}

std::shared_ptr<OpTimes> Session::times_to_measure(std::size_t kind) const {
  return measure_of(kind) == Measure::All ? kinds_[kind].times : nullptr;
}

std::optional<Review> Session::add_step(std::size_t index,
                                        const MeasuredStep& step) {
  Kind& kind = at(index);
  if (measure_of(index) == Measure::Nothing) return std::nullopt;
  if (!kind.plan) ++kind.num_watched;
  Review review;
  const auto& budget = kind.plan ? kind.plan->budget : budget_;
  const bool is_broken = budget && step.training_peak() > *budget;
  if (kind.first_steps && !kind.first_steps->is_done()) {
    kind.first_steps->add(step);
    if (is_broken || kind.first_steps->is_done()) {
      const auto& entries = kind.first_steps->entries();
      ledger_.insert(ledger_.end(), entries.begin(), entries.end());
      if (!entries.empty()) review.last = entries.back();
      if (!is_broken) answer_first_steps(kind, review);
    }
  }
  if (is_broken) answer_broken_budget(kind, step.training_peak(), review);
  if (!review.last && !review.has_new_plan && review.problem.empty()) {
    return std::nullopt;
  }
  return review;
}

void Session::answer_first_steps(Kind& kind, Review& review) {
  if (!kind.first_steps || !kind.question) return;
  // Under a budget only the budget counts, and this step was within it.
  const Bytes margin = kind.question->config.budget
                           ? Bytes()
                           : kind.first_steps->margin(tolerance_);
  const bool is_slow = kind.first_steps->is_slow(tolerance_);
  const auto times = std::exchange(kind.times, nullptr);
  if (kind.was_planned_anew || (margin == Bytes() && !is_slow)) {
    // Under a budget it may have to be planned again.
    if (!kind.question->config.budget) kind.question.reset();
    return;
  }
  Question& question = *kind.question;
  if (margin != Bytes()) {
    question.margin += margin;
    review.reason = str("the first steps took ", margin,
                        " more than predicted, which the new plan counts");
  }
  if (is_slow) {
    question.trace = std::make_shared<const Trace>(
        times->applied_to(*question.trace, question.cost, layers_));
    review.reason += str(review.reason.empty() ? "" : "; ",
                         "recomputing took longer than predicted, and the new "
                         "plan is made with the times that were measured");
  }
  try {
    kind.plan = plan_for(question);
  } catch (const PlanError& error) {
    // The margin is none of a budget's: with other times, another plan of the
    // same bytes is under it. This one stays where that fails all the same.
    review.problem = error.what();
    return;
  }
  kind.was_planned_anew = true;
  review.has_new_plan = true;
  start_measuring(kind, false);
}

// See Note [A budget is a promise].
void Session::answer_broken_budget(Kind& kind, Bytes peak, Review& review) {
  const Bytes budget = kind.plan ? kind.plan->budget.value_or(Bytes())
                                 : budget_.value_or(Bytes());
  const std::string what =
      str("a step took ", peak, ", ", peak - budget, " more than the budget");
  if (kind.plan && kind.question && !kind.is_smallest) {
    Question& question = *kind.question;
    const Plan before = *kind.plan;
    question.margin = peak - (before.peak - question.margin);
    Decision decision = decide(question);
    kind.is_smallest = decision.smallest_budget.has_value();
    kind.plan = std::move(decision.plan);
    if (kind.plan->layers != before.layers ||
        kind.plan->choices != before.choices) {
      kind.was_planned_anew = true;
      review.has_new_plan = true;
      review.reason = str(what, " (", before.peak, " were predicted)");
      if (kind.is_smallest) {
        review.reason +=
            ", and no plan is sure to keep it: the smallest is tried";
      }
      return start_measuring(kind, false);
    }
  }
  kind.has_given_up = true;
  kind.question.reset();
  kind.times.reset();
  review.problem =
      str("the budget of ", budget, " is not kept: ", what,
          kind.plan ? ", and no plan holds less" : ", and there is no plan",
          "; training goes on as it is. Set a budget of at least ",
          peak.count(), " bytes (", peak, "), or make the batch smaller");
}

}  // namespace memscale
