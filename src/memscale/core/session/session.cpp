#include "memscale/core/session/session.h"

#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/plan/decision.h"
#include "memscale/core/plan/technique.h"
#include "memscale/core/trace/timeline.h"

namespace memscale {
namespace {

// On an accelerator all that is allocated counts; in the memory of the host
// there are other things, and only what a step adds is seen.
std::optional<Bytes> resident_under(const Question& question,
                                    const Plan& plan) {
  if (!question.on_cpu) return std::nullopt;
  const Trace step = step_under(question, plan);
  return Timeline(step, Place::Device, question.granularity).resident();
}

}  // namespace

Session::Session(const Config& config, std::vector<std::string> layers,
                 const Tolerance& tolerance)
    : num_first_steps_(*config.warmup_steps),
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
  if (num_first_steps_ > 0) {
    kind.first_steps.emplace(*kind.plan, num_first_steps_,
                             resident_under(question, *kind.plan));
    kind.times = std::make_shared<OpTimes>();
    kind.question = std::move(question);
  }
  return *kind.plan;
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

std::shared_ptr<OpTimes> Session::times_to_measure(std::size_t kind) const {
  if (kind >= kinds_.size()) return nullptr;
  const auto& steps = kinds_[kind].first_steps;
  return steps && !steps->is_done() ? kinds_[kind].times : nullptr;
}

std::optional<Review> Session::add_step(std::size_t index,
                                        const MeasuredStep& step) {
  Kind& kind = at(index);
  if (!kind.first_steps || kind.first_steps->is_done()) return std::nullopt;
  kind.first_steps->add(step);
  if (!kind.first_steps->is_done()) return std::nullopt;
  const auto& entries = kind.first_steps->entries();
  ledger_.insert(ledger_.end(), entries.begin(), entries.end());
  Review review{.last = entries.back(), .has_new_plan = false, .problem = {}};
  plan_anew(kind, review);
  kind.question.reset();
  kind.times.reset();
  return review;
}

void Session::plan_anew(Kind& kind, Review& review) const {
  if (!kind.first_steps || !kind.question) return;
  const Bytes margin = kind.first_steps->margin(tolerance_);
  const bool is_slow = kind.first_steps->is_slow(tolerance_);
  if (margin == Bytes() && !is_slow) return;
  Question question = *kind.question;
  question.margin = margin;
  if (is_slow) {
    question.trace = std::make_shared<const Trace>(
        kind.times->applied_to(*question.trace, question.cost, layers_));
  }
  try {
    kind.plan = plan_for(question);
    review.has_new_plan = true;
  } catch (const PlanError& error) {
    review.problem =
        str("the first steps need more than predicted, and ", error.what());
  }
}

}  // namespace memscale
