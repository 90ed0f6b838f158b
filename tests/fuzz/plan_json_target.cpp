#include "plan_json_target.h"

#include <string>

#include "memscale/base/error.h"
#include "memscale/core/plan/plan.h"

namespace memscale {
namespace {

// A message names a place and quotes little: a hundred levels would not fit.
constexpr std::size_t kMaxMessage = 500;

void require(bool holds, const char* what) {
  if (!holds) throw InternalError(what);
}

Plan read(std::string_view text, bool& refused) {
  try {
    return plan_from_json(text);
  } catch (const PlanError& error) {
    refused = true;
    const std::string_view message = error.what();
    require(!message.empty(), "a message is empty");
    require(message.size() <= kMaxMessage, "a message is too long");
    require(message.find('\n') == message.npos, "a message has lines");
    return {};
  }
}

}  // namespace

void try_plan_json(std::string_view text) {
  bool refused = false;
  const Plan plan = read(text, refused);
  if (refused) return;
  plan.check();
  const std::string written = to_json(plan);
  const Plan again = plan_from_json(written);
  require(again == plan, "another plan was read back");
  require(to_json(again) == written, "other bytes for an equal plan");
  require(again.diff(plan).empty(), "equal plans differ");
  require(again.explain() == plan.explain(), "equal plans explain otherwise");
  Plan other = plan;
  other.layers.erase(other.layers.begin());
  plan.diff(other);
  try {
    plan.check_fits({""});
  } catch (const PlanError& error) {
    require(std::string_view(error.what()).size() <= kMaxMessage,
            "a message is too long");
  }
}

}  // namespace memscale
