#include <memory>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/optimizer_bits.h"
#include "memscale/core/rules/recompute_layers.h"
#include "memscale/core/rules/rule.h"

namespace memscale {

// Holds Adam's moments in 8 bits: always if that was asked for; if the mode
// allows it, for the smallest peak, or under a budget that no exact plan meets.
// It is lossy. By a kernel it takes no longer than torch's own step, as it
// moves fewer bytes; without one, many times as long: then no mode alone
// chooses it, only a budget, or a device, that is too small for every exact
// plan.
bool quantise_optimizer(RuleContext& context) {
  Question& question = context.question;
  const bool is_asked_for = question.state_bits == StateBits::Eight;
  if (question.state_bits == StateBits::Full) return true;
  if (!is_asked_for && is_tiny(context)) return true;
  if (!question.optimizer_can_be_8bit) {
    context.say(str("the state of ", question.optimizer, " stays as it is"));
    return true;
  }
  if (!is_asked_for && question.config.budget && question.trace->saves_known &&
      fits_budget(question, *question.config.budget - question.margin)) {
    context.say("the budget can be met with the optimizer's state as it is");
    return true;
  }
  const StepTimes times = optimizer_step_times(*question.trace, question.cost,
                                               question.steps_8bit_in_pieces);
  std::string price;
  if (question.steps_8bit_in_pieces && times.extra() > 0) {
    price = str("about ", times.times(),
                " times as long as the optimizer's own step, as this device "
                "has no kernel for it here; on CUDA, install bitsandbytes or "
                "build with CUDA kernels");
  }
  if (!is_asked_for && !price.empty()) {
    const auto limit = question.limit();
    const bool is_needed = limit && question.trace->saves_known &&
                           !fits_budget(question, *limit - question.margin);
    if (!is_needed) {
      context.say(
          str("the optimizer's state stays in 32 bits: a step with 8 "
              "would take ",
              price, "; use_8bit_optimizer=True asks for it"));
      return true;
    }
  }
  auto made = std::make_unique<const Trace>(
      with_8bit_state(*question.trace, question.on_cpu));
  const Bytes before = optimizer_state_bytes(*question.trace);
  const Bytes after = optimizer_state_bytes(*made);
  if (!is_asked_for && after >= before) {
    context.say(
        "optimizer state in 8 bits would gain nothing: all of it is small");
    return true;
  }
  context.trace = std::move(made);
  question.trace = context.trace.get();
  Plan& plan = context.plan();
  plan.optimizer_bits = 8;
  plan.optimizer_nanoseconds = times.extra();
  apply_forecast(
      question, forecast(question, uniform_rules(question, ReplayPolicy::Keep)),
      plan);
  context.say(str("optimizer state in 8 bits: ", before, " -> ", after,
                  price.empty() ? "" : "; a step takes ", price));
  return true;
}

}  // namespace memscale
