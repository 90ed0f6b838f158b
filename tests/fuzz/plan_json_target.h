#pragma once

#include <string_view>

namespace memscale {

// Any text at all: it is refused with a PlanError, or it is a plan that can be
// shown, compared and written, and reads back as the same. Throws what is a
// bug.
void try_plan_json(std::string_view text);

}  // namespace memscale
