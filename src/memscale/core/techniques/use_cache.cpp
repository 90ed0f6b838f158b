#include <array>
#include <string_view>

#include "memscale/base/error.h"
#include "memscale/core/plan/forecast.h"
#include "memscale/core/plan/question.h"
#include "memscale/core/plan/rules/rule.h"
#include "memscale/core/techniques/table.h"

// A step is recorded with what it caches let go as soon as each layer returns,
// if nothing reads it again: see python/memscale/techniques/use_cache.py. So
// the step under this technique is the step as it was recorded.

namespace memscale {
namespace {

constexpr std::string_view kName = "use_cache";
constexpr std::array<std::string_view, 1> kChoices = {"forget"};

Bytes forgotten_bytes(const Trace& recorded) {
  Bytes bytes;
  for (const Storage& storage : recorded.storages) {
    if (storage.plain_freed.valid()) bytes += storage.bytes;
  }
  return bytes;
}

std::optional<std::string> why_not(const Question& question) {
  if (forgotten_bytes(*question.trace) == 0_B) return "";
  return std::nullopt;
}

bool forget_cache(RuleContext& context) {
  Choice choice;
  choice.technique = kName;
  choice.choice = kChoices[0];
  choice.bytes = forgotten_bytes(*context.asked.trace);
  choice.reason =
      str("keys and values that the model caches and training "
          "does not read, ",
          choice.bytes, ", are let go as each layer returns");
  context.say(choice.reason);
  context.plan().choices.push_back(std::move(choice));
  context.set_step(context.asked.trace);
  return true;
}

Trace predict(const Trace& step, const Plan& plan, const Question& question) {
  return find_choice(plan.choices, kName) != nullptr ? *question.trace : step;
}

// Without a trace nobody knows whether a layer reads what another cached.
std::optional<Choice> fallback(const Question&) { return std::nullopt; }

std::string describe(const Choice&) { return "caches are let go"; }

}  // namespace

Technique use_cache_technique() {
  return {.name = kName,
          .rule = "forget_cache",
          .stage = Stage::Free,
          .field = {},
          .is_on = nullptr,
          .off = {},
          .choices = kChoices,
          .with_keep_set = {},
          .why_not = &why_not,
          .decide = &forget_cache,
          .predict = &predict,
          .fallback = &fallback,
          .describe = &describe};
}

}  // namespace memscale
