#include "memscale/core/trace/repeat.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>

#include "memscale/base/error.h"
#include "synthetic_step.h"

namespace memscale {
namespace {

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
    return builder.add_value({.storage = storage,
                              .dtype = Dtype::Int8,
                              .sizes = {8},
                              .strides = {1}});
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
