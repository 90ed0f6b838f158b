#include "memscale/base/error.h"
#include "memscale/core/rules/rule.h"

namespace memscale {
namespace {

// A step this small fits every card there is: recomputing would cost time and
// gain nothing that anybody needs.
constexpr Bytes kTiny = 64_MiB;

}  // namespace

bool skip_tiny_model(RuleContext& context) {
  const Question& question = context.question;
  const Bytes peak = context.plan().plain_peak;
  if (question.force || question.config.budget || peak >= kTiny) return true;
  if (const auto limit = question.limit(); limit && peak > *limit) return true;
  context.say(str("the step needs ", peak, ", less than ", kTiny,
                  ": left as it is (force_optimize=True plans all the same)"));
  return false;
}

}  // namespace memscale
