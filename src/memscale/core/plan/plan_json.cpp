#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/base/error.h"
#include "memscale/core/json/json_fields.h"
#include "memscale/core/plan/plan.h"
#include "memscale/core/plan/tape_choice.h"

namespace memscale {

// As in trace_json.cpp: all members, in the order they are written.
using json::Is;

static void each_field(Is<KeepSet> auto& keep_set, auto&& field) {
  auto& [ops, kept] = keep_set;
  field("ops", ops);
  field("kept", kept);
}

static void each_field(Is<Choice> auto& value, auto&& field) {
  auto& [technique, choice, keep_set, bytes, nanoseconds, reason] = value;
  field("technique", technique);
  field("choice", choice);
  field("keep_set", keep_set);
  field("bytes", bytes);
  field("nanoseconds", nanoseconds);
  field("reason", reason);
}

static void each_field(Is<LayerPlan> auto& plan, auto&& field) {
  auto& [layer, choices, parameter_bytes, plain_bytes, held_bytes] = plan;
  field("layer", layer);
  field("choices", choices);
  field("parameter_bytes", parameter_bytes);
  field("plain_bytes", plain_bytes);
  field("held_bytes", held_bytes);
}

static void each_field(Is<Verdict> auto& verdict, auto&& field) {
  auto& [rule, text] = verdict;
  field("rule", rule);
  field("text", text);
}

static void each_field(Is<Plan> auto& plan, auto&& field) {
  auto& [model, fingerprint, call, device, optimizer, mode, budget, verdicts,
         choices, layers, plain_peak, peak, host_peak, plain_nanoseconds,
         nanoseconds] = plan;
  field("model", model);
  field("fingerprint", fingerprint);
  field("call", call);
  field("device", device);
  field("optimizer", optimizer);
  field("mode", mode);
  field("budget", budget);
  field("verdicts", verdicts);
  field("choices", choices);
  field("layers", layers);
  field("plain_peak", plain_peak);
  field("peak", peak);
  field("host_peak", host_peak);
  field("plain_nanoseconds", plain_nanoseconds);
  field("nanoseconds", nanoseconds);
}

namespace {

// Version 1 had a field for each technique that there was.
struct LayerPlan1 {
  std::string layer;
  ReplayPolicy policy = ReplayPolicy::Keep;
  std::optional<KeepSet> keep_set;
  std::optional<Bytes> parameter_bytes;
  Bytes plain_bytes;
  Bytes held_bytes;
  std::int64_t nanoseconds = 0;
  std::string reason;
};

struct Plan1 {
  Plan plan;  // what both versions have
  std::vector<LayerPlan1> layers;
  std::int64_t optimizer_bits = 32;
  std::int64_t optimizer_nanoseconds = 0;
};

void each_field(Is<LayerPlan1> auto& plan, auto&& field) {
  auto& [layer, policy, keep_set, parameter_bytes, plain_bytes, held_bytes,
         nanoseconds, reason] = plan;
  field("layer", layer);
  field("policy", policy);
  field("keep_set", keep_set);
  field("parameter_bytes", parameter_bytes, json::kMayBeMissing);
  field("plain_bytes", plain_bytes);
  field("held_bytes", held_bytes);
  field("nanoseconds", nanoseconds);
  field("reason", reason);
}

void each_field(Is<Plan1> auto& earlier, auto&& field) {
  auto& [plan, layers, optimizer_bits, optimizer_nanoseconds] = earlier;
  field("model", plan.model);
  field("fingerprint", plan.fingerprint);
  field("call", plan.call);
  field("device", plan.device);
  field("optimizer", plan.optimizer);
  field("mode", plan.mode);
  field("budget", plan.budget);
  field("verdicts", plan.verdicts);
  field("layers", layers);
  field("optimizer_bits", optimizer_bits);
  field("plain_peak", plan.plain_peak);
  field("peak", plan.peak);
  field("host_peak", plan.host_peak);
  field("plain_nanoseconds", plan.plain_nanoseconds);
  field("nanoseconds", plan.nanoseconds);
  field("optimizer_nanoseconds", optimizer_nanoseconds, json::kMayBeMissing);
}

LayerPlan from_version_1(LayerPlan1&& earlier) {
  LayerPlan layer;
  layer.layer = std::move(earlier.layer);
  layer.parameter_bytes = earlier.parameter_bytes;
  layer.plain_bytes = earlier.plain_bytes;
  layer.held_bytes = earlier.held_bytes;
  TapeRules rules{earlier.policy};
  if (earlier.keep_set) {
    rules.keep_set =
        std::make_shared<const KeepSet>(*std::move(earlier.keep_set));
  }
  if (rules.keeps_all()) return layer;
  Choice& choice = layer.choices.emplace_back(choice_of(rules));
  if (earlier.held_bytes >= 0_B && earlier.plain_bytes > earlier.held_bytes) {
    choice.bytes = earlier.plain_bytes - earlier.held_bytes;
  }
  choice.nanoseconds = earlier.nanoseconds;
  choice.reason = std::move(earlier.reason);
  return layer;
}

Choice choice_of(std::string_view technique, std::string_view choice) {
  Choice made;
  made.technique = technique;
  made.choice = choice;
  return made;
}

Plan from_version_1(Plan1&& earlier) {
  Plan plan = std::move(earlier.plan);
  for (const Verdict& verdict : plan.verdicts) {
    if (verdict.rule != "forget_cache") continue;  // it said no more than this
    plan.choices.push_back(choice_of("use_cache", "forget"));
    plan.choices.back().reason = verdict.text;
    break;
  }
  if (earlier.optimizer_bits == 8) {
    plan.choices.push_back(choice_of("optimizer_state", "8bit"));
    plan.choices.back().nanoseconds = earlier.optimizer_nanoseconds;
  } else if (earlier.optimizer_bits != 32) {
    throw PlanError(
        str("optimizer_bits must be 8 or 32, got ", earlier.optimizer_bits));
  }
  for (LayerPlan1& layer : earlier.layers) {
    plan.layers.push_back(from_version_1(std::move(layer)));
  }
  return plan;
}

// Ours is 8: plan, layers, layer, choices, choice, keep set, kept, pair.
constexpr json::Form<PlanError> kForm = {"memscale-plan", 2, "a plan", 10};

// More than any plan has, and read in less than a second.
constexpr Bytes kMost = 32_MiB;

}  // namespace

std::string to_json(const Plan& plan) {
  json::Writer<PlanError> writer;
  writer.write_document(kForm, plan);
  return std::move(writer).take();
}

Plan plan_from_json(std::string_view text) {
  if (const Bytes size(static_cast<std::int64_t>(text.size())); size > kMost) {
    throw PlanError(
        str("a plan must not be longer than ", kMost, ", got ", size));
  }
  Plan plan;
  Plan1 earlier;
  if (!json::Reader<PlanError>(kForm).read_document(text, plan, 1, earlier)) {
    plan = from_version_1(std::move(earlier));
  }
  plan.check();
  return plan;
}

}  // namespace memscale
