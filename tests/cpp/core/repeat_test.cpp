#include "memscale/core/trace/repeat.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "memscale/base/error.h"
#include "synthetic_step.h"

namespace memscale {
namespace {

// Per layer: forward ops op0 (two results, the second dies at once), op1 (a
// view of the first), op2; storages op0's two and op2's; saves the input and
// the parameter of op0, the input of op2 and the mask.
LayerSpec layer_spec() {
  LayerSpec spec;
  spec.ops = {
      {.numel = 4, .parameter = true, .saves_input = true, .scratch = true},
      {.returns = Returns::View},
      {.numel = 2, .mask = true, .saves_input = true}};
  return spec;
}

struct Traced {
  Trace trace;
  std::vector<LayerCall> calls;
};

Traced traced(const LayerSpec& spec = layer_spec(),
              std::size_t num_layers = 5) {
  SyntheticStep step(spec, num_layers, false);
  Traced result{step.run(), {}};
  result.calls = step.calls();
  return result;
}

// A value of its own for one argument, to be changed.
Value& own(Trace& trace, ValueId& argument) {
  trace.values.push_back(trace.at(argument));
  argument = ValueId(trace.values.size() - 1);
  return trace.values.back();
}

// What differs between two layers is described by where it is.
std::string at_op(const Traced& step, const IdRange& a, const IdRange& b,
                  std::size_t i) {
  const auto place = [&](std::size_t op) {
    return str("op ", op, " (", step.trace.ops[op].name, ")");
  };
  return str(place(a.begin + i), " against ", place(b.begin + i));
}

TEST(Difference, EqualLayersHaveNone) {
  const Traced step = traced();
  for (const LayerCall& a : step.calls) {
    for (const LayerCall& b : step.calls) {
      EXPECT_EQ(difference(step.trace, a, b), std::nullopt);
    }
  }
}

struct Mutation {
  std::string what;
  std::function<void(Trace&, LayerCall&)> apply;  // to the other layer
  // Where it is seen: the op of the section, or else a text.
  std::optional<std::size_t> op;
  std::string text = {};
};

Op& op_of(Trace& trace, const Section& section, std::size_t i) {
  return trace.ops[section.ops.begin + i];
}

// The second layer against the third, which is changed.
void check_mutations(const std::vector<Mutation>& mutations, bool backward) {
  for (const Mutation& mutation : mutations) {
    SCOPED_TRACE(mutation.what);
    Traced step = traced();
    const LayerCall& a = step.calls[1];
    LayerCall& b = step.calls[2];
    mutation.apply(step.trace, b);
    const IdRange& a_ops = backward ? a.backward->ops : a.forward.ops;
    const IdRange& b_ops = backward ? b.backward->ops : b.forward.ops;
    const std::string where = backward ? "backward: " : "forward: ";
    const std::string expected =
        mutation.op ? where + at_op(step, a_ops, b_ops, *mutation.op)
                    : mutation.text;
    EXPECT_EQ(difference(step.trace, a, b), expected);
    EXPECT_NE(difference(step.trace, b, a), std::nullopt);
  }
}

TEST(Difference, OfTheForward) {
  const auto input = [](std::size_t op, std::size_t k, auto change) {
    return [=](Trace& trace, LayerCall& call) {
      change(own(trace, op_of(trace, call.forward, op).inputs[k]), call);
    };
  };
  const auto output = [](std::size_t op, std::size_t k, auto change) {
    return [=](Trace& trace, LayerCall& call) {
      change(own(trace, op_of(trace, call.forward, op).outputs[k]), call);
    };
  };
  using Call = const LayerCall&;
  check_mutations(
      {
          {"name",
           [](Trace& trace, LayerCall& call) {
             op_of(trace, call.forward, 1).name = "aten::transpose";
           },
           1},
          {"shape", input(0, 0, [](Value& v, Call) { v.sizes[0] = 9; }), 0},
          {"stride", input(0, 0, [](Value& v, Call) { v.strides[0] = 2; }), 0},
          {"dtype", input(2, 0, [](Value& v, Call) { v.dtype = Dtype::Int8; }),
           2},
          {"offset", output(1, 0, [](Value& v, Call) { v.offset = 3; }), 1},
          {"shape of an output",
           output(2, 0, [](Value& v, Call) { v.sizes[0] = 9; }), 2},
          {"another result of the layer",
           input(2, 0,
                 [](Value& v, Call call) {
                   v.storage = StorageId(call.forward.storages.begin + 1);
                 }),
           2},
          {"another layer's input",
           input(0, 0,
                 [](Value& v, Call call) {
                   v.storage = StorageId(call.inputs[0].index() - 1);
                 }),
           0},
          {"another parameter",
           input(0, 2,
                 [](Value& v, Call call) { v.storage = call.parameters[1]; }),
           0},
          {"another mask",
           input(2, 2, [](Value& v, Call call) { v.storage = call.inputs[0]; }),
           2},
          {"unknown storage",
           input(0, 0, [](Value& v, Call) { v.storage = StorageId(); }), 0},
          {"results the other way round",
           [](Trace& trace, LayerCall& call) {
             auto& outputs = op_of(trace, call.forward, 0).outputs;
             own(trace, outputs[0]).storage =
                 StorageId(call.forward.storages.begin + 1);
           },
           0},
          {"fewer inputs",
           [](Trace& trace, LayerCall& call) {
             op_of(trace, call.forward, 2).inputs.pop_back();
           },
           2},
          {"fewer outputs",
           [](Trace& trace, LayerCall& call) {
             op_of(trace, call.forward, 0).outputs.pop_back();
           },
           0},
          {"number of ops",
           [](Trace&, LayerCall& call) { --call.forward.ops.end; },
           {},
           "forward: 3 ops, 3 storages and 4 saves against 2, 3 and 4"},
          {"number of storages",
           [](Trace&, LayerCall& call) { --call.forward.storages.end; },
           {},
           "forward: 3 ops, 3 storages and 4 saves against 3, 2 and 4"},
          {"number of saves",
           [](Trace&, LayerCall& call) { --call.forward.saves.end; },
           {},
           "forward: 3 ops, 3 storages and 4 saves against 3, 3 and 3"},
      },
      false);
}

TEST(Difference, OfTheBackward) {
  check_mutations(
      {
          {"name",
           [](Trace& trace, LayerCall& call) {
             op_of(trace, *call.backward, 2).name = "aten::neg";
           },
           2},
          {"shape",
           [](Trace& trace, LayerCall& call) {
             own(trace, op_of(trace, *call.backward, 0).outputs[0]).sizes[0]++;
           },
           0},
          {"reads another of forward's results",
           [](Trace& trace, LayerCall& call) {
             own(trace, op_of(trace, *call.backward, 0).inputs[1]).storage =
                 StorageId(call.forward.storages.begin + 1);
           },
           0},
          {"reads a gradient of its own instead of the incoming one",
           [](Trace& trace, LayerCall& call) {
             own(trace, op_of(trace, *call.backward, 0).inputs[0]).storage =
                 StorageId(call.backward->storages.begin);
           },
           0},
          {"number of ops",
           [](Trace&, LayerCall& call) { --call.backward->ops.end; },
           {},
           "forward: save 0 is another"},
          {"number of storages",
           [](Trace&, LayerCall& call) { --call.backward->storages.end; },
           {},
           "backward: 3 ops, 5 storages and 0 saves against 3, 4 and 0"},
      },
      true);
}

TEST(Difference, OfTheTimeThatBackwardHoldsWhatForwardMade) {
  const auto freed = [](std::size_t place, auto op) {
    return [=](Trace& trace, LayerCall& call) {
      trace.storages[call.forward.storages.begin + place].freed = op(call);
    };
  };
  const auto text = [](std::size_t i) {
    return str("forward: storage ", i,
               " has another size or is held for another time");
  };
  check_mutations(
      {
          {"one op longer",
           freed(0,
                 [](const LayerCall& call) {
                   return OpId(call.backward->ops.begin + 1);
                 }),
           {},
           text(0)},
          {"beyond the backward",
           freed(0,
                 [](const LayerCall& call) {
                   return OpId(call.backward->ops.end);
                 }),
           {},
           text(0)},
          {"for good",
           freed(0, [](const LayerCall&) { return OpId(); }),
           {},
           text(0)},
          {"into the backward",
           freed(1,
                 [](const LayerCall& call) {
                   return OpId(call.backward->ops.begin);
                 }),
           {},
           text(1)},
      },
      true);
}

TEST(Difference, IsLookedForInTheForwardAloneIfOneHasNoBackward) {
  Traced step = traced();
  op_of(step.trace, *step.calls[2].backward, 0).name = "aten::neg";
  EXPECT_TRUE(difference(step.trace, step.calls[1], step.calls[2]));
  step.calls[2].backward.reset();
  EXPECT_FALSE(difference(step.trace, step.calls[1], step.calls[2]));
  EXPECT_FALSE(difference(step.trace, step.calls[2], step.calls[1]));
  op_of(step.trace, step.calls[2].forward, 0).name = "aten::neg";
  EXPECT_TRUE(difference(step.trace, step.calls[1], step.calls[2]));
}

TEST(FindBackward, TakesTheOpsOfTheLayer) {
  Traced step = traced();
  LayerCall call = step.calls[1];
  call.backward.reset();
  call.gradient_in = call.gradient_out = StorageId();
  find_backward(step.trace, call);
  ASSERT_TRUE(call.backward);
  ASSERT_EQ(call.backward->ops.size(), 3u);
  EXPECT_EQ(op_of(step.trace, *call.backward, 0).name, "op2_backward");
  EXPECT_EQ(op_of(step.trace, *call.backward, 2).name, "op0_backward");
  // Three gradients, that of the parameter, and scratch.
  EXPECT_EQ(call.backward->storages.size(), 5u);
  EXPECT_EQ(call.gradient_in, step.calls[2].gradient_out);
  EXPECT_EQ(call.gradient_out, step.calls[0].gradient_in);
  EXPECT_TRUE(call.backward->storages.contains(call.gradient_out.index()));
}

TEST(FindBackward, AGradientMayPassThrough) {
  LayerSpec spec = layer_spec();
  for (LayerOp& op : spec.ops) op.gradient_in_place = true;
  const Traced step = traced(spec);
  for (const LayerCall& call : step.calls) {
    EXPECT_EQ(call.gradient_in, step.calls[0].gradient_in);
    EXPECT_EQ(call.gradient_out, call.gradient_in);
  }
}

// The message that finding the second layer's backward throws.
std::string refusal(const std::function<void(Trace&, LayerCall&)>& change) {
  Traced step = traced();
  LayerCall call = step.calls[1];
  change(step.trace, call);
  call.backward.reset();
  try {
    find_backward(step.trace, call);
  } catch (const TraceError& error) {
    EXPECT_FALSE(call.backward);
    return error.what();
  }
  return "none";
}

TEST(FindBackward, SaysWhyItCannotBeFound) {
  EXPECT_EQ(refusal([](Trace&, LayerCall&) {}), "none");
  EXPECT_EQ(refusal([](Trace& trace, LayerCall& call) {
              op_of(trace, *call.backward, 1).layer = LayerId(0);
            }),
            "the backward of layers.1 is not in one piece");
  EXPECT_EQ(refusal([](Trace& trace, LayerCall& call) {
              for (std::size_t i = 0; i < 3; ++i) {
                op_of(trace, *call.backward, i).layer = LayerId();
              }
            }),
            "layers.1 has no backward");
  EXPECT_EQ(refusal([](Trace& trace, LayerCall& call) {
              for (std::size_t i = 0; i < 3; ++i) {
                op_of(trace, *call.backward, i).phase = Phase::Optimizer;
              }
            }),
            "layers.1 has no backward");
  EXPECT_EQ(refusal([](Trace& trace, LayerCall& call) {
              // As an earlier layer's gradient that two layers add to.
              const StorageId other(call.gradient_in.index() - 1);
              own(trace, op_of(trace, *call.backward, 2).inputs[0]).storage =
                  other;
            }),
            "the backward of layers.1 takes more than one gradient");
  EXPECT_EQ(refusal([](Trace& trace, LayerCall& call) {
              op_of(trace, *call.backward, 0).inputs.clear();
            }),
            "the backward of layers.1 takes no gradient");
  EXPECT_EQ(refusal([](Trace&, LayerCall& call) {
              call.parameter_gradients.clear();
            }),
            "the backward of layers.1 gives more than one gradient");
}

}  // namespace
}  // namespace memscale
