#pragma once

#include <memory>
#include <string>
#include <vector>

#include "memscale/base/error.h"
#include "memscale/core/plan/decision.h"
#include "memscale/core/plan/layer_choices.h"
#include "memscale/core/plan/technique.h"
#include "memscale/core/trace/timeline.h"
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

// A trace of a test's, which outlives the question.
inline std::shared_ptr<const Trace> shared(const Trace& trace) {
  return {std::shared_ptr<void>(), &trace};
}

inline Question question_of(const Trace& trace,
                            const Config& config = Config()) {
  Target target;
  target.name = target.type = "sim";
  StepFacts facts;
  facts.model = "Stack";
  facts.call = "x=float32[64, 256]";
  facts.optimizer = "sgd";
  Question question = Question::of(shared(trace), config, target, facts);
  question.force = true;
  question.utilization = 1;
  question.min_bytes = 0_B;
  return question;
}

inline Question with_budget(Question question, Bytes budget) {
  question.config.budget = budget;
  return question;
}

// What the step is predicted to hold under the plan's choices, found anew.
inline Bytes replayed_peak(const Question& question, const Plan& plan) {
  const Trace step = step_under(question, plan);
  const auto peak = Timeline(step, Place::Device, question.granularity).peak();
  return peak ? peak->bytes : Bytes();
}

}  // namespace memscale
