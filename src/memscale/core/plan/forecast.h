#pragma once

#include <cstdint>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/core/plan/plan.h"
#include "memscale/core/plan/question.h"
#include "memscale/core/tape/tape_rules.h"

// What a step comes to under rules for its layers: local prices propose, the
// forecast decides, and it is what plans publish.

namespace memscale {

// The step under some rules, as predicted.
struct Forecast {
  std::vector<TapeRules> rules;  // by LayerId
  Bytes peak;
  Bytes host_peak;
  std::int64_t nanoseconds = 0;  // of ops called again
  struct Layer {
    Bytes plain;
    Bytes held;
    std::int64_t nanoseconds = 0;
  };
  std::vector<Layer> layers;  // by LayerId
};

// If the trace's saves are not known, rules must be of keeping all.
Forecast forecast(const Question& question, std::vector<TapeRules> rules);

// The same rules for every layer.
std::vector<TapeRules> uniform_rules(const Question& question,
                                     ReplayPolicy policy);

// Writes what each layer does, and what is predicted, into the plan.
void apply_forecast(const Question& question, const Forecast& found,
                    Plan& plan);

// How long each layer's ops take, by LayerId.
std::vector<std::int64_t> times_by_layer(const CostModel& cost,
                                         const Trace& trace);

}  // namespace memscale
