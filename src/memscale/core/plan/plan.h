#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/core/config/config.h"
#include "memscale/core/plan/choice.h"
#include "memscale/core/trace/trace.h"

// What each layer of a model is to do, why, and what that is predicted to come
// to. Plain values: copyable, comparable, no torch, no threads.

namespace memscale {

// One layer's part.
struct LayerPlan {
  std::string layer;  // as named_modules() has it
  // What techniques do in it; empty: it runs as without MemScale.
  std::vector<Choice> choices;
  // Of the model that it was made for; not known of plans from before 0.1.
  std::optional<Bytes> parameter_bytes;
  // Activations that its forward made and the start of backward finds held.
  Bytes plain_bytes;
  Bytes held_bytes;

  bool recomputes() const;
  // "keep", "recompute (cheap)", "recompute (keeps 24 results of 31 ops)".
  std::string technique() const;
  // The price of all choices, for each step.
  std::int64_t nanoseconds() const;
  // Why, for people; empty: there is nothing to say.
  std::string reason() const;

  bool operator==(const LayerPlan&) const = default;
};

// What one rule decided.
struct Verdict {
  std::string rule;
  std::string text;

  bool operator==(const Verdict&) const = default;
};

struct Plan {
  // What it was made for.
  std::string model;        // class
  std::string fingerprint;  // of its layers and ops, see fingerprint_of()
  std::string call;         // "input_ids=int64[2, 32]"
  std::string device;
  std::string optimizer;
  // What was asked for.
  OptimizationMode mode = OptimizationMode::Balanced;
  std::optional<Bytes> budget;
  // What was decided.
  std::vector<Verdict> verdicts;
  std::vector<Choice> choices;    // of techniques for the whole step
  std::vector<LayerPlan> layers;  // all of the trace's, in its order
  // What is predicted.
  Bytes plain_peak;
  Bytes peak;
  Bytes host_peak;
  std::int64_t plain_nanoseconds = 0;
  std::int64_t nanoseconds = 0;  // of calling ops again, all layers

  // The price of the choices for the whole step.
  std::int64_t step_nanoseconds() const;
  // 0.25: a step takes 25 % longer, all choices included.
  double slowdown() const;
  // Throws PlanError naming what is out of range, empty or there twice.
  void check() const;
  // Throws PlanError saying what differs, unless it was made for these layers
  // with so many bytes of parameters each; none: those are not compared.
  void check_fits(const std::vector<std::string>& layer_names,
                  const std::vector<Bytes>& parameter_bytes = {}) const;

  // Reasons, rule by rule and layer by layer, for people.
  std::string explain() const;
  // Line by line what `other` does differently; empty if nothing.
  std::string diff(const Plan& other) const;

  bool operator==(const Plan&) const = default;
};

// Sixteen hexadecimal digits that change when layers or forward ops do.
std::string fingerprint_of(const Trace& trace);

// The plan as JSON, the same bytes for equal plans, and back; files of version
// 1 can be read, too. The text may come from anywhere: PlanError names the
// place of whatever is wrong with it.
std::string to_json(const Plan& plan);
Plan plan_from_json(std::string_view text);

}  // namespace memscale
