#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "memscale/base/error.h"
#include "memscale/core/decision.h"
#include "memscale/core/layer_choices.h"
#include "memscale/core/replayed_step.h"
#include "memscale/core/timeline.h"
#include "tiny_program.h"

namespace memscale {

inline constexpr std::int64_t kRows = 64;
inline constexpr std::int64_t kWidth = 256;
inline constexpr Bytes kBlock{4 * kRows * kWidth};  // one of its activations

// A stack of equal layers: two products, two cheap functions, a residual.
inline Trace stack_of(std::size_t num_layers) {
  TinyProgram program;
  const LayerId model = program.layer("");
  program.enter(model);
  const std::vector<std::int64_t> sizes = {kRows, kWidth};
  const Value batch = program.batch(sizes);
  Value x = program.call("aten::mul.Tensor", {batch}, sizes);
  program.save(batch);
  for (std::size_t i = 0; i < num_layers; ++i) {
    program.enter(program.layer(str("layers.", i)));
    const Value first = program.parameter({kWidth, kWidth});
    const Value second = program.parameter({kWidth, kWidth});
    const Value h = program.call("aten::mm", {x, first}, sizes);
    program.save(x);
    program.save(first);
    const Value g = program.call("aten::gelu", {h}, sizes);
    program.save(h);
    program.let_go(h);
    const Value y = program.call("aten::mm", {g, second}, sizes);
    program.save(g);
    program.save(second);
    program.let_go(g);
    const Value t = program.call("aten::tanh", {y}, sizes);
    program.save(t);
    program.let_go(y);
    const Value z = program.call("aten::add.Tensor", {x, t}, sizes);
    program.let_go(t);
    program.let_go(x);
    x = z;
  }
  program.enter(model);
  const Value loss = program.call("aten::sum", {x}, {1});
  program.let_go(x);
  program.let_go(loss);
  Trace trace = program.finish();
  for (Op& op : trace.ops) {
    if (op.name.starts_with("aten::mm")) {
      op.flops = 2 * kRows * kWidth * kWidth;
    }
  }
  return trace;
}

inline Question question_of(const Trace& trace,
                            const Config& config = Config()) {
  Question question;
  question.trace = &trace;
  question.config = config.resolve();
  question.force = true;
  question.granularity = 512_B;
  question.model = "Stack";
  question.call = "x=float32[64, 256]";
  question.device = "sim";
  question.optimizer = "sgd";
  return question;
}

inline Question with_budget(Question question, Bytes budget) {
  question.config.budget = budget;
  return question;
}

inline std::vector<TapeRules> rules_of(const Question& question,
                                       const Plan& plan) {
  std::vector<TapeRules> rules;
  for (const LayerPlan& layer : plan.layers) {
    TapeRules& rule = rules.emplace_back(
        TapeRules{layer.policy, nullptr,
                  static_cast<std::size_t>(question.min_bytes.count())});
    if (layer.keep_set) {
      rule.keep_set = std::make_shared<const KeepSet>(*layer.keep_set);
    }
  }
  return rules;
}

// What the step is predicted to hold under the plan's rules, found anew.
inline Bytes replayed_peak(const Question& question, const Plan& plan) {
  const ReplayedStep step =
      replayed_step(*question.trace, rules_of(question, plan), question.on_cpu);
  const auto peak =
      Timeline(step.trace, Place::Device, question.granularity).peak();
  return peak ? peak->bytes : Bytes();
}

}  // namespace memscale
