#include <cstdint>
#include <utility>

#include "memscale/base/bytes.h"
#include "memscale/base/error.h"
#include "memscale/core/json_fields.h"
#include "memscale/core/plan.h"

namespace memscale {

// As in trace_json.cpp: all members, in the order they are written.
using json::Is;

static void each_field(Is<KeepSet> auto& keep_set, auto&& field) {
  auto& [ops, kept] = keep_set;
  field("ops", ops);
  field("kept", kept);
}

static void each_field(Is<LayerPlan> auto& plan, auto&& field) {
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

static void each_field(Is<Verdict> auto& verdict, auto&& field) {
  auto& [rule, text] = verdict;
  field("rule", rule);
  field("text", text);
}

static void each_field(Is<Plan> auto& plan, auto&& field) {
  auto& [model, fingerprint, call, device, optimizer, mode, budget, verdicts,
         layers, optimizer_bits, plain_peak, peak, host_peak, plain_nanoseconds,
         nanoseconds, optimizer_nanoseconds] = plan;
  field("model", model);
  field("fingerprint", fingerprint);
  field("call", call);
  field("device", device);
  field("optimizer", optimizer);
  field("mode", mode);
  field("budget", budget);
  field("verdicts", verdicts);
  field("layers", layers);
  field("optimizer_bits", optimizer_bits);
  field("plain_peak", plain_peak);
  field("peak", peak);
  field("host_peak", host_peak);
  field("plain_nanoseconds", plain_nanoseconds);
  field("nanoseconds", nanoseconds);
  field("optimizer_nanoseconds", optimizer_nanoseconds, json::kMayBeMissing);
}

namespace {

// Ours is 6: plan, layers, layer, keep set, kept, pair.
constexpr json::Form<PlanError> kForm = {"memscale-plan", 1, "a plan", 8};

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
  json::Reader<PlanError>(kForm).read_document(text, plan);
  plan.check();
  return plan;
}

}  // namespace memscale
