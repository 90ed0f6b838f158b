#include "memscale/base/error.h"
#include "memscale/core/plan/rules/rule.h"

namespace memscale {
namespace {

// A step this small fits every card there is: recomputing would cost time and
// gain nothing that anybody needs.
constexpr Bytes kTiny = 64_MiB;

}  // namespace

bool is_tiny(const RuleContext& context) {
  const Question& question = context.question;
  const Bytes peak = context.plan().plain_peak;
  if (question.force || question.config.budget || peak >= kTiny) return false;
  const auto limit = question.limit();
  return !limit || peak <= *limit;
}

bool skip_tiny_model(RuleContext& context) {
  if (!is_tiny(context)) return true;
  context.say(str(
      "the step needs ", context.plan().plain_peak, ", less than ", kTiny,
      ": layers stay as they are (force_optimize=True plans all the same)"));
  return false;
}

}  // namespace memscale
