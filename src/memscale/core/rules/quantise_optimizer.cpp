#include <memory>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/optimizer_bits.h"
#include "memscale/core/rules/recompute_layers.h"
#include "memscale/core/rules/rule.h"

namespace memscale {

// Holds Adam's moments in 8 bits: always if that was asked for; if the mode
// allows it, for the smallest peak, or under a budget that no exact plan meets.
// It takes no longer than
// torch's own step (it moves fewer bytes), so it has no price in time; it is
// lossy.
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
  apply_forecast(
      question, forecast(question, uniform_rules(question, ReplayPolicy::Keep)),
      plan);
  context.say(str("optimizer state in 8 bits: ", before, " -> ", after));
  return true;
}

}  // namespace memscale
