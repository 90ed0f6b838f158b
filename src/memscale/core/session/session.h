#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memscale/core/config/config.h"
#include "memscale/core/plan/plan.h"
#include "memscale/core/plan/question.h"
#include "memscale/core/session/call_kind.h"
#include "memscale/core/session/first_steps.h"
#include "memscale/core/time/op_times.h"

namespace memscale {

// What happened to a plan after its first steps.
struct Review {
  LedgerEntry last;  // of the steps that were measured
  bool has_new_plan = false;
  std::string problem;  // why there is no new plan although there should be one
};

// The training of one model: a plan for each kind of call, and the first steps
// of each. Whoever runs the model (Python's executor, a C++ program) tells it
// of calls, traces those of a new kind, and follows the plan that it gets:
//
//   auto kind = session.find(call);
//   if (!kind) {
//     kind = session.add(call);
//     session.plan(*kind, Question::of(trace, config, target, facts));
//   }
//   follow(session.plan_of(*kind));
//   if (auto times = session.times_to_measure(*kind)) {
//     ... run the step, measure it ...
//     auto review = session.add_step(*kind, measured);
//   }
//
// Not synchronised: one thread at a time.
class Session final {
 public:
  // A kind of call is planned for once, which costs about a second; calls of
  // further kinds (an argument that counts steps, say) reuse the current plan.
  static constexpr std::size_t kMaxKinds = 16;

  // `layers`: the model's, by name, in the order in which ops are timed.
  Session(const Config& config, std::vector<std::string> layers,
          const Tolerance& tolerance = {});

  // ---- plans by kind of call ----

  // The kind that covers the call; none: it is of a new kind.
  std::optional<std::size_t> find(const CallKind& call) const;
  bool is_full() const { return kinds_.size() >= kMaxKinds; }
  // A kind of its own, still without a plan. Throws PlanError if it is full.
  std::size_t add(CallKind call);
  // Decides. Throws PlanError if the budget is too small; then the kind stays
  // without a plan. A kind can be planned again.
  const Plan& plan(std::size_t kind, Question question);
  // Null: it has none.
  const Plan* plan_of(std::size_t kind) const;
  // Those that there are, in the order of their kinds.
  std::vector<Plan> plans() const;

  // ---- the first steps ----

  // To measure the kind's next step with: what its ops take belongs into
  // these. Null: nothing is to be measured.
  std::shared_ptr<OpTimes> times_to_measure(std::size_t kind) const;
  // A step of that kind was measured. After the last one a plan whose promises
  // were broken is made anew, once, with what was measured.
  std::optional<Review> add_step(std::size_t kind, const MeasuredStep& step);
  // All entries, plan by plan as they were completed.
  const std::vector<LedgerEntry>& ledger() const { return ledger_; }

 private:
  struct Kind {
    CallKind call;
    std::optional<Plan> plan;
    // Until the plan is final.
    std::optional<Question> question;
    std::optional<FirstSteps> first_steps;
    std::shared_ptr<OpTimes> times;
  };

  void plan_anew(Kind& kind, Review& review) const;
  Kind& at(std::size_t kind);

  std::int64_t num_first_steps_;
  std::vector<std::string> layers_;
  Tolerance tolerance_;
  std::vector<Kind> kinds_;
  std::vector<LedgerEntry> ledger_;
};

}  // namespace memscale
