#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "decision_samples.h"
#include "memscale/base/wide.h"
#include "memscale/core/plan/decision.h"
#include "synthetic_step.h"

namespace memscale {
namespace {

bool maybe() { return *rc::gen::arbitrary<bool>(); }

LayerOp any_op(std::size_t i, bool is_last) {
  LayerOp op;
  op.returns = is_last ? Returns::New
                       : *rc::gen::element(Returns::New, Returns::New,
                                           Returns::View, Returns::Written);
  op.numel = *rc::gen::element<std::int64_t>(1, 128, 1000, 5000);
  op.reads = *rc::gen::inRange<std::size_t>(0, i + 1);
  for (bool* flag : {&op.parameter, &op.saves_input, &op.saves_output,
                     &op.scratch, &op.gradient_in_place}) {
    *flag = maybe();
  }
  if (maybe()) op.workspace = 2_KiB;
  return op;
}

// Torch refuses a program that writes to what it saved: such are none.
bool reads_what_it_saved(const Trace& trace) {
  std::vector<std::uint32_t> last(trace.storages.size());
  for (const Value& value : trace.values) {
    if (!value.storage.valid()) continue;
    auto& version = last[value.storage.index()];
    version = std::max(version, value.version);
  }
  return std::ranges::all_of(trace.saves, [&](const Save& save) {
    const Value& value = trace.at(save.value);
    return !value.storage.valid() ||
           value.version == last[value.storage.index()];
  });
}

Trace any_step() {
  LayerSpec spec;
  const auto num_ops = *rc::gen::inRange<std::size_t>(1, 6);
  for (std::size_t i = 0; i < num_ops; ++i) {
    spec.ops.push_back(any_op(i, i + 1 == num_ops));
  }
  spec.residual = maybe();
  Trace trace = SyntheticStep(spec, 3, false).run();
  for (Op& op : trace.ops) {
    if (op.name == "embedding_backward") op.forward = OpId(0);
    if (op.phase != Phase::Forward || !op.layer.valid()) continue;
    const bool much = maybe();
    op.name = much ? "aten::mm" : "aten::relu";
    op.flops = much ? 1'000'000 : 0;
    op.moved = Bytes(*rc::gen::element(0, 1'000, 100'000));
  }
  RC_PRE(reads_what_it_saved(trace));
  return trace;
}

Question any_question(const Trace& trace) {
  Question question = question_of(trace);
  question.granularity = *rc::gen::element(1_B, 512_B);
  question.on_cpu = maybe();
  question.min_bytes = *rc::gen::element(0_B, 1_KiB);
  question.margin = *rc::gen::element(0_B, 100_B);
  return question;
}

Bytes any_budget(const Question& question) {
  const Timeline timeline(*question.trace, Place::Device, question.granularity);
  const std::int64_t most = timeline.peak()->bytes.count();
  return Bytes(*rc::gen::resize(rc::kNominalSize,
                                rc::gen::inRange<std::int64_t>(1, most + 200)));
}

std::vector<Plan> uniform_plans(const Question& question) {
  std::vector<Plan> plans;
  for (const auto policy :
       {ReplayPolicy::Keep, ReplayPolicy::Cheap, ReplayPolicy::Block}) {
    const Forecast found = forecast(question, uniform_rules(question, policy));
    Plan& plan = plans.emplace_back();
    plan.peak = found.peak + question.margin;
    plan.plain_nanoseconds = question.cost.nanoseconds(*question.trace);
    plan.nanoseconds = found.nanoseconds;
  }
  return plans;
}

TEST(DecisionProperty, APlanUnderABudgetIsWhatItSays) {
  RC_ASSERT(rc::check([] {
    const Trace trace = any_step();
    const Question question = any_question(trace);
    const Question limited = with_budget(question, any_budget(question));
    const Decision decision = decide(limited);
    const Plan& plan = decision.plan;
    RC_ASSERT(plan.peak == replayed_peak(limited, plan) + limited.margin);
    RC_ASSERT(to_json(decide(limited).plan) == to_json(plan));
    if (decision.smallest_budget) {
      RC_ASSERT(*decision.smallest_budget > *limited.config.budget);
      RC_ASSERT(plan.peak == *decision.smallest_budget);
      const Decision there =
          decide(with_budget(question, *decision.smallest_budget));
      RC_ASSERT(!there.smallest_budget);
      RC_ASSERT(there.plan.peak <= *decision.smallest_budget);
      RC_ASSERT(there.plan.nanoseconds <= plan.nanoseconds);
    } else {
      RC_ASSERT(plan.peak <= *limited.config.budget);
    }
    for (const Plan& uniform : uniform_plans(limited)) {
      if (uniform.peak > *limited.config.budget) continue;
      RC_ASSERT(!decision.smallest_budget);
      RC_ASSERT(plan.nanoseconds <= uniform.nanoseconds);
    }
  }));
}

TEST(DecisionProperty, ALargerBudgetNeverMakesItSlower) {
  RC_ASSERT(rc::check([] {
    const Trace trace = any_step();
    const Question question = any_question(trace);
    std::vector<Bytes> budgets;
    for (int i = 0; i < 4; ++i) budgets.push_back(any_budget(question));
    std::ranges::sort(budgets);
    std::int64_t last = std::numeric_limits<std::int64_t>::max();
    bool fits = false;
    for (const Bytes budget : budgets) {
      const Decision decision = decide(with_budget(question, budget));
      RC_ASSERT(!fits || !decision.smallest_budget);
      fits = !decision.smallest_budget;
      if (!fits) continue;
      RC_ASSERT(decision.plan.nanoseconds <= last);
      last = decision.plan.nanoseconds;
    }
  }));
}

TEST(DecisionProperty, ModesStayWithinTheirSlowdown) {
  RC_ASSERT(rc::check([] {
    const Trace trace = any_step();
    Question question = any_question(trace);
    question.config.stops_at_knee = false;
    std::vector<Bytes> peaks;
    for (const std::optional<double> limit :
         {std::optional(0.05), std::optional(0.25), std::optional<double>()}) {
      question.config.slowdown_limit = limit;
      const Plan plan = decide(question).plan;
      RC_ASSERT(!limit || plan.slowdown() <= *limit);
      RC_ASSERT(plan.peak == replayed_peak(question, plan) + question.margin);
      peaks.push_back(plan.peak);
    }
    RC_ASSERT(peaks[0] >= peaks[1]);
    RC_ASSERT(peaks[1] >= peaks[2]);
    for (const Plan& uniform : uniform_plans(question)) {
      RC_ASSERT(peaks[2] <= uniform.peak);
    }
  }));
}

TEST(DecisionProperty, NoPlanHasASmallerProductOfTimeAndPeakThanTheKnee) {
  RC_ASSERT(rc::check([] {
    const Trace trace = any_step();
    const Question question = any_question(trace);
    const auto product = [](const Plan& plan) {
      const std::int64_t time = plan.plain_nanoseconds + plan.nanoseconds;
      return Wide{time} * plan.peak.count();
    };
    const Plan knee = decide(question).plan;
    RC_ASSERT(knee.slowdown() <= 0.25);
    RC_ASSERT(knee.peak == replayed_peak(question, knee) + question.margin);
    for (const Plan& uniform : uniform_plans(question)) {
      if (uniform.slowdown() > 0.25) continue;
      RC_ASSERT(product(knee) <= product(uniform));
    }
  }));
}

TEST(DecisionProperty, AFrontierIsOne) {
  RC_ASSERT(rc::check([] {
    const Trace trace = any_step();
    const Question question = any_question(trace);
    const auto most = *rc::gen::inRange<std::size_t>(1, 12);
    const std::vector<Plan> plans = plan_frontier(question, most);
    RC_ASSERT(!plans.empty());
    RC_ASSERT(plans.size() <= most);
    for (std::size_t i = 0; i < plans.size(); ++i) {
      RC_ASSERT(plans[i].peak ==
                replayed_peak(question, plans[i]) + question.margin);
      if (i == 0) continue;
      RC_ASSERT(plans[i - 1].peak < plans[i].peak);
      RC_ASSERT(plans[i - 1].nanoseconds > plans[i].nanoseconds);
    }
    RC_ASSERT(most == 1 || plans.back().nanoseconds == 0);
  }));
}

}  // namespace
}  // namespace memscale
