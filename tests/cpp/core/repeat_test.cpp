#include "memscale/core/repeat.h"

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
          {"dtype", input(2, 0, [](Value& v, Call) { v.dtype = "int8"; }), 2},
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

// Two layers, of which the first is traced up to its backward, and the second
// is to be a copy. Each reads its input, makes one storage, saves both.
struct Pair {
  TraceBuilder builder;
  LayerCall model;
  LayerCall copy;
  StorageId input = resident(Category::Input);
  StorageId other_input = resident(Category::Input);
  StorageId shared = resident(Category::Buffer);

  Pair() {
    model.layer = builder.add_layer("0");
    copy.layer = builder.add_layer("1");
    model.parameters = {resident(Category::Parameter)};
    copy.parameters = {resident(Category::Parameter)};
    model.inputs = {input, StorageId()};
    copy.inputs = {other_input, StorageId()};
    builder.set_layer(model.layer);
    const Trace& trace = builder.trace();
    model.forward.storages.begin = trace.storages.size();
    run("aten::mul", {input, model.parameters[0], shared, StorageId()});
    const StorageId result = make();
    for (const StorageId id : {input, result}) builder.add_save(value(id));
    model.forward.ops = {0, 1};
    model.forward.storages.end = trace.storages.size();
    model.forward.saves = {0, 2};
  }

  StorageId resident(Category category) {
    return builder.add_resident(8_B, Place::Device, category, {});
  }
  StorageId make() { return builder.add_storage(8_B, Place::Device); }
  ValueId value(StorageId storage) {
    return builder.add_value(
        {.storage = storage, .dtype = "int8", .sizes = {8}, .strides = {1}});
  }
  void run(std::string name, const std::vector<StorageId>& inputs) {
    Op op;
    op.name = std::move(name);
    for (const StorageId id : inputs) op.inputs.push_back(value(id));
    builder.begin_op(std::move(op));
    builder.end_op({});
  }
  // Of the model, which is the last to need its input.
  void backward() {
    builder.set_phase(Phase::Backward);
    builder.set_layer({});
    run("aten::ones_like", {});
    const StorageId gradient = make();
    builder.set_layer(model.layer);
    run("aten::mul_backward", {gradient, input});
    make();
    builder.free(gradient);
    builder.free(input);
    for (const std::size_t save : {0, 1}) builder.release_save(save);
    find_backward(builder.trace(), model);
  }
};

TEST(RepeatForward, CopiesWhatTheLayerAdded) {
  Pair pair;
  pair.builder.mutable_trace().ops[0].workspace = 3_B;
  pair.builder.mutable_trace().ops[0].workspace_known = true;
  // What the model's are in the end is not known of the copies yet.
  pair.builder.set_category(StorageId(pair.model.forward.storages.begin),
                            Category::Activation);
  repeat_forward(pair.builder, pair.model, pair.copy);
  const Trace& trace = pair.builder.trace();
  EXPECT_EQ(pair.copy.forward.ops, (IdRange{1, 2}));
  EXPECT_EQ(pair.copy.forward.storages,
            (IdRange{trace.storages.size() - 1, trace.storages.size()}));
  EXPECT_EQ(pair.copy.forward.saves, (IdRange{2, 4}));
  EXPECT_FALSE(pair.copy.backward);
  const Op& op = trace.ops[1];
  EXPECT_EQ(op.name, "aten::mul");
  EXPECT_EQ(op.layer, pair.copy.layer);
  EXPECT_EQ(op.workspace, 3_B);
  ASSERT_EQ(op.inputs.size(), 4u);
  EXPECT_EQ(trace.at(op.inputs[0]).storage, pair.other_input);
  EXPECT_EQ(trace.at(op.inputs[1]).storage, pair.copy.parameters[0]);
  EXPECT_EQ(op.inputs[2], trace.ops[0].inputs[2]);  // the same for all
  // Of unknown storage: not known to be the same.
  EXPECT_EQ(trace.at(op.inputs[3]).storage, StorageId());
  EXPECT_NE(op.inputs[3], trace.ops[0].inputs[3]);
  EXPECT_EQ(trace.storages.back().layer, pair.copy.layer);
  EXPECT_EQ(trace.storages.back().born, OpId(1));
  EXPECT_EQ(trace.storages.back().freed, OpId());
  EXPECT_EQ(trace.saves[2].op, OpId(1));
  EXPECT_EQ(trace.at(trace.saves[2].value).storage, pair.other_input);
  EXPECT_EQ(trace.at(trace.saves[3].value).storage,
            StorageId(pair.copy.forward.storages.begin));
  EXPECT_EQ(trace.storages.back().category, Category::Transient);
  // The builder knows the new values.
  EXPECT_EQ(pair.value(pair.copy.parameters[0]), op.inputs[1]);
}

TEST(RepeatBackward, TellsWhatTheLayerIsTheLastToNeed) {
  Pair pair;
  repeat_forward(pair.builder, pair.model, pair.copy);
  pair.backward();
  const auto needs = repeat_backward(pair.builder, pair.model, pair.copy,
                                     pair.model.gradient_out);
  const Trace& trace = pair.builder.trace();
  ASSERT_EQ(needs.size(), 2u);
  EXPECT_EQ(needs[0].storage, pair.model.gradient_out);
  EXPECT_EQ(needs[0].op, OpId(4));
  EXPECT_EQ(needs[1].storage, pair.other_input);
  EXPECT_EQ(needs[1].op, OpId(4));
  EXPECT_EQ(trace.at(pair.other_input).freed, OpId());  // it is only told
  EXPECT_EQ(pair.copy.gradient_in, pair.model.gradient_out);
  EXPECT_EQ(pair.copy.gradient_out, StorageId(trace.storages.size() - 1));
  for (const std::size_t save : {2, 3}) {
    EXPECT_EQ(trace.saves[save].released, OpId(4));
  }
}

TEST(RepeatBackward, AnInputMustNotBeGone) {
  Pair pair;
  repeat_forward(pair.builder, pair.model, pair.copy);
  pair.backward();
  pair.builder.free(pair.other_input);
  try {
    repeat_backward(pair.builder, pair.model, pair.copy,
                    pair.model.gradient_out);
    FAIL();
  } catch (const TraceError& error) {
    EXPECT_STREQ(error.what(), "an input of 1 is gone before its backward");
  }
}

TEST(RepeatBackward, ParameterGradientsAreGradients) {
  Pair pair;
  repeat_forward(pair.builder, pair.model, pair.copy);
  pair.backward();
  // The one storage that backward made is the parameter's gradient.
  pair.model.parameter_gradients = {pair.model.gradient_out, StorageId()};
  pair.model.gradient_out = pair.model.gradient_in;
  const StorageId gradient = pair.make();
  repeat_backward(pair.builder, pair.model, pair.copy, gradient);
  const Trace& trace = pair.builder.trace();
  const StorageId last(trace.storages.size() - 1);
  EXPECT_EQ(pair.copy.parameter_gradients, (std::vector{last, StorageId()}));
  EXPECT_EQ(trace.at(last).category, Category::Gradient);
  EXPECT_EQ(pair.copy.gradient_out, gradient);
}

TEST(CloseRepeat, LetsGoWhereTheModelDid) {
  Pair pair;
  repeat_forward(pair.builder, pair.model, pair.copy);
  const StorageId made(pair.model.forward.storages.begin);
  const StorageId copied(pair.copy.forward.storages.begin);
  close_repeat(pair.builder, pair.model, pair.copy);
  EXPECT_EQ(pair.builder.trace().at(copied).freed, OpId());
  pair.run("aten::sum", {});
  pair.builder.free(made);
  close_repeat(pair.builder, pair.model, pair.copy);
  EXPECT_EQ(pair.builder.trace().at(copied).freed, OpId(2));
  // What was let go already stays as it is.
  pair.builder.mutable_trace().storages[made.index()].freed = OpId(1);
  close_repeat(pair.builder, pair.model, pair.copy);
  EXPECT_EQ(pair.builder.trace().at(copied).freed, OpId(2));
}

}  // namespace
}  // namespace memscale
