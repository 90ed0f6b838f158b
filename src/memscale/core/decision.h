#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/core/config.h"
#include "memscale/core/cost_model.h"
#include "memscale/core/plan.h"
#include "memscale/core/replay_rules.h"
#include "memscale/core/trace.h"

// From a traced step to a plan. The same question gives the same plan, byte for
// byte, on any host.

namespace memscale {

// How the optimizer's state may be held; see rules/quantise_optimizer.cpp.
enum class StateBits : std::uint8_t { Full, EightIfAllowed, Eight };

struct Question {
  // The plain step; must outlive the decision.
  const Trace* trace = nullptr;
  EffectiveConfig config;
  bool force = false;      // plan even for a tiny model
  double utilization = 1;  // share of the device's memory to plan for
  CostModel cost = CostModel::of_cpu();
  bool on_cpu = false;           // the device is the CPU itself
  ReplayTarget target{};         // what can be replayed there
  Bytes granularity = Bytes(1);  // of the device's allocator
  std::optional<Bytes> device_memory;
  Bytes min_bytes;  // smaller storages are kept
  // Predictions were too low by so much, as the first steps showed.
  Bytes margin;
  StateBits state_bits = StateBits::Full;
  bool optimizer_can_be_8bit = false;  // torch's own Adam or AdamW
  // Whether the device has no kernel for a step with 8-bit state: it then goes
  // piece by piece through torch's operators, and takes long.
  bool steps_8bit_in_pieces = false;
  // Of the model's layers, in their order; empty: not known.
  std::vector<Bytes> parameter_bytes;
  std::vector<std::string> disabled_rules;
  // Written into the plan.
  std::string model;
  std::string call;
  std::string device;
  std::string optimizer;

  // What the plan has to stay below, if anything: the budget, else the device's
  // memory times its utilization.
  std::optional<Bytes> limit() const;
};

struct Decision {
  Plan plan;
  // Unless there is a plan under the budget: the smallest that has one, which
  // is then `plan`.
  std::optional<Bytes> smallest_budget;
};

Decision decide(const Question& question);

// Plans from the smallest peak to the fastest, at most so many: peaks rise,
// predicted times fall.
std::vector<Plan> plan_frontier(const Question& question,
                                std::size_t max_plans);

// Names of the rules, in their order.
std::vector<std::string> rule_names();

}  // namespace memscale
