#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "memscale/base/enum_names.h"
#include "memscale/core/config/config.h"
#include "memscale/core/plan/plan.h"
#include "memscale/core/plan/question.h"
#include "memscale/core/session/call_kind.h"
#include "memscale/core/session/first_steps.h"
#include "memscale/core/time/op_times.h"

namespace memscale {

// What is to be measured of a step.
enum class Measure : std::uint8_t {
  Nothing,
  Peak,  // whether it is above the budget: cheap enough for every step
  Step,  // its own peak, for the ledger
  All,   // its peak and its times
};

template <>
struct EnumNames<Measure> {
  static constexpr std::string_view kWhat = "measure";
  static constexpr Measure kLast = Measure::All;
  static constexpr std::array kTable = {
      EnumName{Measure::Nothing, "nothing"}, EnumName{Measure::Peak, "peak"},
      EnumName{Measure::Step, "step"}, EnumName{Measure::All, "all"}};
};

// What follows from a step that was measured. Texts are for people.
struct Review {
  // The last of a plan's first steps, now that all of them are through.
  std::optional<LedgerEntry> last;
  bool has_new_plan = false;
  std::string reason;   // why there is a new plan
  std::string problem;  // what cannot be helped: a warning
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
//   if (session.measure_of(*kind) != Measure::Nothing) {
//     ... run the step, measure it ...
//     auto review = session.add_step(*kind, measured);
//   }
//
// Note [A budget is a promise]
// Under a budget every step is measured, for as long as the model trains. One
// that is above it has its plan made anew at once, with room for the bytes by
// which the prediction was too low, and the new plan is measured again. Since
// that room grows each time, this ends: within the budget, or at the smallest
// plan. If a step is above the budget even with that, the review says what
// budget would do, and the training goes on: its state is worth more than the
// promise.
//
// Not synchronised: one thread at a time.
class Session final {
 public:
  // A kind of call is planned for once, which costs about a second; calls of
  // further kinds (an argument that counts steps, say) reuse the current plan,
  // or hold the least under a budget; their steps are not measured.
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

  // ---- steps ----

  // What of the kind's next step is to be measured.
  Measure measure_of(std::size_t kind) const;
  // What its ops take belongs into these, if all is to be measured; else null.
  std::shared_ptr<OpTimes> times_to_measure(std::size_t kind) const;
  // A step of that kind was measured. One above the budget has its plan made
  // anew at once; after the last of the first steps, a plan whose predictions
  // were wrong is made anew as well, once, with what was measured.
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
    std::int64_t num_watched = 0;  // steps without a plan
    bool was_planned_anew = false;
    // No plan is smaller, or there is none, and a step was above the budget.
    bool is_smallest = false;
    bool has_given_up = false;
  };

  void start_measuring(Kind& kind, bool skips_first);
  void answer_broken_budget(Kind& kind, Bytes peak, Review& review);
  void answer_first_steps(Kind& kind, Review& review);
  Kind& at(std::size_t kind);

  std::optional<Bytes> budget_;
  std::int64_t num_timed_steps_;
  std::vector<std::string> layers_;
  Tolerance tolerance_;
  std::vector<Kind> kinds_;
  std::vector<LedgerEntry> ledger_;
};

}  // namespace memscale
