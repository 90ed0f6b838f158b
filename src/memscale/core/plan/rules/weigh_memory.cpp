#include <cmath>

#include "memscale/base/error.h"
#include "memscale/core/plan/rules/rule.h"

namespace memscale {

// States the memory pressure; decides nothing.
bool weigh_memory(RuleContext& context) {
  const Question& question = context.question;
  const std::optional<Bytes> limit = question.limit();
  if (!limit) {
    context.say("the device's memory is not known, and there is no budget");
    return true;
  }
  const double pressure =
      static_cast<double>(context.plan().plain_peak.count()) /
      static_cast<double>(limit->count());
  context.say(str(
      "the plain step needs ", context.plan().plain_peak, " of ", *limit,
      question.config.budget ? " (budget)" : " that may be used of the device",
      ": pressure ", std::round(pressure * 100) / 100));
  return true;
}

}  // namespace memscale
