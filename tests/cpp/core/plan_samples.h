#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "memscale/base/error.h"
#include "memscale/core/plan/plan.h"

namespace memscale {

// What the PlanError says that `call` throws.
inline std::string plan_error_of(const std::function<void()>& call) {
  try {
    call();
    return "no error";
  } catch (const PlanError& error) {
    return error.what();
  }
}

inline Choice made_choice(std::string_view technique, std::string_view choice) {
  Choice made;
  made.technique = technique;
  made.choice = choice;
  return made;
}

// Every field has a value that no other has: three layers, one of each kind.
inline Plan small_plan() {
  Plan plan;
  plan.model = "Net";
  plan.fingerprint = "00ff00ff00ff00ff";
  plan.call = "x=float32[4, 8]";
  plan.device = "sim";
  plan.optimizer = "adamw";
  plan.mode = OptimizationMode::Aggressive;
  plan.budget = 6_MiB;
  plan.verdicts = {{"weigh_memory", "little"}, {"recompute_layers", "some"}};
  plan.choices = {made_choice("optimizer_state", "8bit")};
  plan.choices[0].bytes = 3_KiB;
  plan.choices[0].nanoseconds = 1;
  plan.choices[0].reason = "smaller";
  LayerPlan all;
  all.layer = "";
  all.plain_bytes = 1_KiB;
  all.held_bytes = 1_KiB;
  LayerPlan cheap;
  cheap.layer = "a";
  cheap.choices = {made_choice("recompute", "cheap")};
  cheap.choices[0].bytes = 3_MiB;
  cheap.choices[0].nanoseconds = 1'499;
  cheap.choices[0].reason = "frees 3.00 MiB";
  cheap.plain_bytes = 4_MiB;
  cheap.held_bytes = 1_MiB;
  LayerPlan chosen = cheap;
  chosen.layer = "b.0";
  chosen.choices[0].choice = "chosen";
  chosen.choices[0].keep_set =
      KeepSet{{"aten::mm", "aten::tanh"}, {{0, 0}, {1, 2}}};
  chosen.choices[0].nanoseconds = 2'500;
  chosen.parameter_bytes = 256_KiB;
  plan.layers = {all, cheap, chosen};
  plan.plain_peak = 10_MiB;
  plan.peak = 5_MiB;
  plan.host_peak = 7_B;
  plan.plain_nanoseconds = 40'000;
  plan.nanoseconds = 3'999;
  return plan;
}

}  // namespace memscale
