#include "memscale/core/trace/trace_builder.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "memscale/base/error.h"

namespace memscale {
namespace {

using Ids = std::vector<ValueId>;

Value flat(StorageId storage, std::int64_t numel = 4) {
  return {.storage = storage,
          .dtype = Dtype::Float32,
          .sizes = {numel},
          .strides = {1}};
}

Op named(std::string name, Ids inputs = {}) {
  Op op;
  op.name = std::move(name);
  op.inputs = std::move(inputs);
  return op;
}

// An op that reads values and makes storages of these bytes.
std::vector<StorageId> run(TraceBuilder& builder, std::string name,
                           Ids inputs = {},
                           const std::vector<Bytes>& made = {}) {
  builder.begin_op(named(std::move(name), std::move(inputs)));
  std::vector<StorageId> storages;
  Ids outputs;
  for (const Bytes bytes : made) {
    storages.push_back(builder.add_storage(bytes, Place::Device));
    outputs.push_back(builder.add_value(flat(storages.back())));
  }
  builder.end_op(outputs);
  return storages;
}

TEST(TraceBuilder, WritesAStepAsItGoesBy) {
  TraceBuilder builder;
  const LayerId layer = builder.add_layer("encoder");
  EXPECT_EQ(builder.last_op(), OpId());
  const StorageId weight =
      builder.add_resident(64_B, Place::Device, Category::Parameter, layer);
  const ValueId weight_value = builder.add_value(flat(weight));

  builder.set_layer(layer);
  EXPECT_FALSE(builder.op_is_running());
  EXPECT_EQ(builder.begin_op(named("aten::exp", {weight_value})), OpId(0));
  EXPECT_TRUE(builder.op_is_running());
  const StorageId made = builder.add_storage(32_B, Place::Host);
  const ValueId made_value = builder.add_value(flat(made));
  builder.set_workspace(12_B);
  builder.end_op({made_value});
  EXPECT_FALSE(builder.op_is_running());
  EXPECT_EQ(builder.add_save(made_value), 0u);

  builder.set_phase(Phase::Backward);
  builder.set_layer({});
  EXPECT_EQ(builder.phase(), Phase::Backward);
  EXPECT_EQ(builder.layer(), LayerId());
  run(builder, "aten::mul", {made_value});
  EXPECT_EQ(builder.last_op(), OpId(1));
  builder.release_save(0);
  builder.free(made);
  builder.add_note("careful");
  builder.set_saves_unknown();

  Trace expected;
  expected.layers = {{"encoder"}};
  expected.ops = {named("aten::exp", {weight_value}),
                  named("aten::mul", {made_value})};
  expected.ops[0].layer = layer;
  expected.ops[0].outputs = {made_value};
  expected.ops[0].workspace = 12_B;
  expected.ops[0].workspace_known = true;
  expected.ops[1].phase = Phase::Backward;
  expected.values = {flat(weight), flat(made)};
  expected.storages = {
      {64_B, 1, Place::Device, Category::Parameter, layer, {}, {}},
      {32_B, 1, Place::Host, Category::Activation, layer, OpId(0), OpId(1),
       OpId(1)}};
  expected.saves = {{OpId(0), made_value, OpId(1)}};
  expected.saves_known = false;
  expected.notes = {"careful"};
  EXPECT_EQ(builder.finish(), expected);

  // It is as new afterwards.
  EXPECT_EQ(builder.phase(), Phase::Forward);
  EXPECT_EQ(builder.last_op(), OpId());
  EXPECT_EQ(builder.finish(), Trace());
}

TEST(TraceBuilder, FinishChecksTheTrace) {
  TraceBuilder builder;
  builder.add_resident(Bytes(-1), Place::Device, Category::Input, {});
  EXPECT_THROW(builder.finish(), TraceError);
}

TEST(TraceBuilder, WhatIsOnlySavedWasLetGoBefore) {
  TraceBuilder builder;
  builder.begin_op({});
  const StorageId made = builder.add_storage(4_B, Place::Device);
  builder.end_op({});
  builder.let_go(made);
  builder.begin_op({});
  builder.end_op({});
  builder.let_go(made);  // the first time counts
  builder.free(made);
  const Trace trace = builder.finish();
  EXPECT_EQ(trace.at(made).let_go, OpId(0));
  EXPECT_EQ(trace.at(made).freed, OpId(1));
}

TEST(TraceBuilder, OpsDoNotNest) {
  TraceBuilder builder;
  EXPECT_THROW(builder.end_op({}), InternalError);
  EXPECT_THROW(builder.cancel_op(), InternalError);
  EXPECT_THROW(builder.set_workspace(1_B), InternalError);
  builder.begin_op(named("aten::outer"));
  EXPECT_THROW(builder.begin_op(named("aten::inner")), InternalError);
  builder.end_op({});
  EXPECT_EQ(builder.trace().ops.size(), 1u);
}

TEST(TraceBuilder, ACancelledOpLeavesNothing) {
  TraceBuilder builder;
  run(builder, "aten::exp");
  builder.begin_op(named("aten::detach"));
  builder.cancel_op();
  EXPECT_FALSE(builder.op_is_running());
  EXPECT_EQ(builder.last_op(), OpId(0));
  run(builder, "aten::log");
  EXPECT_EQ(builder.trace().ops.size(), 2u);
  EXPECT_EQ(builder.trace().ops[1].name, "aten::log");
}

TEST(TraceBuilder, AWorkspaceIsNotNegative) {
  TraceBuilder builder;
  builder.begin_op(named("aten::exp"));
  builder.set_workspace(Bytes(-8));  // an output from before was let go
  EXPECT_EQ(builder.trace().ops[0].workspace, 0_B);
  EXPECT_TRUE(builder.trace().ops[0].workspace_known);
}

TEST(TraceBuilder, EqualValuesHaveOneId) {
  TraceBuilder builder;
  const StorageId a =
      builder.add_resident(16_B, Place::Device, Category::Input, {});
  const StorageId b =
      builder.add_resident(16_B, Place::Device, Category::Input, {});
  const ValueId first = builder.add_value(flat(a));
  const ValueId other = builder.add_value(flat(b));
  const ValueId view = builder.add_value(flat(a, 2));
  EXPECT_NE(first, other);
  EXPECT_NE(first, view);
  EXPECT_EQ(builder.add_value(flat(a)), first);
  EXPECT_EQ(builder.add_value(flat(b)), other);
  EXPECT_EQ(builder.add_value(flat(a, 2)), view);
  // Two of unknown storage are never known to be equal.
  EXPECT_NE(builder.add_value(flat({})), builder.add_value(flat({})));
  EXPECT_EQ(builder.trace().values.size(), 5u);
}

TEST(TraceBuilder, AWriteMakesANewVersion) {
  TraceBuilder builder;
  const StorageId a =
      builder.add_resident(16_B, Place::Device, Category::Buffer, {});
  const StorageId b =
      builder.add_resident(16_B, Place::Device, Category::Buffer, {});
  const ValueId before = builder.add_value(flat(a));
  builder.bump_version(a);
  const ValueId after = builder.add_value(flat(a));
  EXPECT_NE(before, after);
  EXPECT_EQ(builder.trace().at(before).version, 0u);
  EXPECT_EQ(builder.trace().at(after).version, 1u);
  builder.bump_version(b);  // before any value of it
  EXPECT_EQ(builder.trace().at(builder.add_value(flat(b))).version, 1u);
  // The caller's version does not count.
  Value stale = flat(a);
  stale.version = 7;
  EXPECT_EQ(builder.add_value(stale), after);
}

TEST(TraceBuilder, ValuesFromOutsideAreIndexed) {
  TraceBuilder builder;
  const StorageId a =
      builder.add_resident(16_B, Place::Device, Category::Input, {});
  const ValueId first = builder.add_value(flat(a));
  Value written = flat(a);
  written.version = 2;
  auto& values = builder.mutable_trace().values;
  values.insert(values.end(), {written, flat({}), flat(a)});
  builder.index_values_from(1);
  EXPECT_EQ(builder.add_value(flat(a)), ValueId(1));
  builder.bump_version(a);
  const ValueId next = builder.add_value(flat(a));
  EXPECT_EQ(next, ValueId(4));
  EXPECT_EQ(builder.trace().at(next).version, 3u);
  EXPECT_EQ(builder.trace().at(first).version, 0u);
}

TEST(TraceBuilder, AStorageGrowsAndDoesNotShrink) {
  TraceBuilder builder;
  const StorageId id = run(builder, "aten::empty", {}, {8_B})[0];
  builder.grow(id, 24_B);
  EXPECT_EQ(builder.trace().at(id).bytes, 24_B);
  builder.grow(id, 16_B);
  EXPECT_EQ(builder.trace().at(id).bytes, 24_B);
}

TEST(TraceBuilder, AStorageIsFreedOnce) {
  TraceBuilder builder;
  const auto first = run(builder, "aten::exp", {}, {8_B, 8_B, 8_B});
  run(builder, "aten::log");
  builder.free(first[0]);
  EXPECT_EQ(builder.trace().at(first[0]).freed, OpId(1));
  builder.free(first[1], OpId(0));
  EXPECT_EQ(builder.trace().at(first[1]).freed, OpId(0));
  const StorageId late = run(builder, "aten::sin", {}, {8_B})[0];
  builder.free(first[0]);
  builder.free(first[1]);
  EXPECT_EQ(builder.trace().at(first[0]).freed, OpId(1));
  EXPECT_EQ(builder.trace().at(first[1]).freed, OpId(0));
  // Not before it was made, whatever the caller says.
  builder.free(late, OpId(1));
  EXPECT_EQ(builder.trace().at(late).freed, OpId(2));
  EXPECT_EQ(builder.trace().at(first[2]).freed, OpId());
}

TEST(TraceBuilder, ASaveIsReleasedOnce) {
  TraceBuilder builder;
  const StorageId made = run(builder, "aten::exp", {}, {8_B})[0];
  const ValueId value = builder.add_value(flat(made));
  const std::size_t first = builder.add_save(value);
  run(builder, "aten::log");
  const std::size_t second = builder.add_save(value);
  EXPECT_EQ(builder.trace().saves[first].op, OpId(0));
  EXPECT_EQ(builder.trace().saves[second].op, OpId(1));
  builder.release_save(first);
  run(builder, "aten::sin");
  builder.release_save(first);
  EXPECT_EQ(builder.trace().saves[first].released, OpId(1));
  EXPECT_EQ(builder.trace().saves[second].released, OpId());
}

TEST(TraceBuilder, ANoteIsWrittenOnce) {
  TraceBuilder builder;
  for (const char* note : {"a", "b", "a"}) builder.add_note(note);
  EXPECT_EQ(builder.trace().notes, (std::vector<std::string>{"a", "b"}));
}

TEST(TraceBuilder, ActivationsAreWhatBackwardFinds) {
  TraceBuilder builder;
  const StorageId input =
      builder.add_resident(8_B, Place::Device, Category::Input, {});
  const auto forward = run(builder, "aten::exp", {}, {1_B, 2_B, 3_B, 4_B, 5_B});
  run(builder, "aten::log");
  builder.free(forward[0]);  // within forward
  builder.set_phase(Phase::Backward);
  const auto backward = run(builder, "aten::mul", {}, {6_B});
  builder.free(forward[1]);  // by the first op of backward
  builder.set_category(forward[2], Category::Gradient);
  builder.free(forward[3], OpId(1));  // with the last op of forward
  const Trace trace = builder.finish();
  EXPECT_EQ(trace.at(input).category, Category::Input);
  EXPECT_EQ(trace.at(forward[0]).category, Category::Transient);
  EXPECT_EQ(trace.at(forward[1]).category, Category::Activation);
  EXPECT_EQ(trace.at(forward[2]).category, Category::Gradient);
  EXPECT_EQ(trace.at(forward[3]).category, Category::Transient);
  EXPECT_EQ(trace.at(forward[4]).category, Category::Activation);
  EXPECT_EQ(trace.at(backward[0]).category, Category::Transient);
}

TEST(TraceBuilder, WithoutBackwardWhatIsReturnedIsAnActivation) {
  TraceBuilder builder;
  const auto made = run(builder, "aten::exp", {}, {1_B, 2_B});
  builder.free(made[0]);
  const Trace trace = builder.finish();
  EXPECT_EQ(trace.at(made[0]).category, Category::Transient);
  EXPECT_EQ(trace.at(made[1]).category, Category::Activation);
}

// Two layers with a parameter each, of which the first stands for both.
struct Optimizing {
  TraceBuilder builder;
  LayerId first = builder.add_layer("0");
  LayerId second = builder.add_layer("1");
  StorageId a =
      builder.add_resident(40_B, Place::Device, Category::Parameter, first);
  StorageId b =
      builder.add_resident(40_B, Place::Device, Category::Parameter, second);
  StorageId alone =
      builder.add_resident(8_B, Place::Device, Category::Parameter, second);

  Optimizing() {
    builder.set_stands_for(a, {a, b});
    builder.set_phase(Phase::Optimizer);
  }
  Ids read(const std::vector<StorageId>& storages) {
    Ids ids;
    for (const StorageId id : storages) {
      ids.push_back(builder.add_value(flat(id)));
    }
    return ids;
  }
};

TEST(TraceBuilder, StateIsMadeForEachParameter) {
  Optimizing step;
  const auto made =
      run(step.builder, "aten::zeros_like", step.read({step.a}), {40_B, 4_B});
  step.builder.make_state(made[0], step.a);
  step.builder.make_state(made[1], step.alone);
  const Trace trace = step.builder.finish();
  const auto state = [](Bytes bytes, LayerId layer) {
    return Storage{bytes, 1, Place::Device, Category::OptimizerState, layer,
                   {},    {}};
  };
  ASSERT_EQ(trace.storages.size(), 6u);
  EXPECT_EQ(trace.storages[3], state(40_B, step.first));
  EXPECT_EQ(trace.storages[4], state(4_B, step.second));
  EXPECT_EQ(trace.storages[5], state(40_B, step.second));
}

TEST(TraceBuilder, StateThatWasLetGoIsKeptAllTheSame) {
  Optimizing step;
  const StorageId made = run(step.builder, "aten::zeros_like", {}, {40_B})[0];
  step.builder.free(made);
  step.builder.make_state(made, step.a);
  EXPECT_EQ(step.builder.trace().at(made).freed, OpId());
  EXPECT_EQ(step.builder.trace().at(made).born, OpId());
}

TEST(TraceBuilder, StateOfAnUnknownParameterHasItsOwnLayer) {
  Optimizing step;
  step.builder.set_layer(step.second);
  const StorageId made = run(step.builder, "aten::zeros_like", {}, {40_B})[0];
  step.builder.make_state(made, StorageId());
  EXPECT_EQ(step.builder.trace().at(made).layer, step.second);
  EXPECT_EQ(step.builder.trace().at(made).category, Category::OptimizerState);
}

TEST(TraceBuilder, TemporariesOfForeachAreOneForEachParameter) {
  Optimizing step;
  const StorageId gradient = run(step.builder, "aten::detach", {}, {40_B})[0];
  step.builder.set_stands_for(gradient, {step.a, step.b, step.alone});
  const StorageId state = run(step.builder, "aten::zeros_like", {}, {40_B})[0];
  step.builder.make_state(state, step.a);

  const auto first = run(step.builder, "aten::_foreach_mul.Scalar",
                         step.read({step.a, gradient, step.alone, state}),
                         {40_B, 40_B, 8_B, 40_B});
  // What was made for many stands for them in turn.
  const auto second = run(step.builder, "aten::_foreach_sqrt",
                          step.read({first[1], first[2]}), {40_B, 8_B});
  const auto loop =
      run(step.builder, "aten::mul.Scalar", step.read({step.a}), {40_B});
  const Trace trace = step.builder.finish();
  EXPECT_EQ(trace.at(first[0]).count, 2);
  EXPECT_EQ(trace.at(first[1]).count, 3);
  EXPECT_EQ(trace.at(first[2]).count, 1);  // stands for itself alone
  EXPECT_EQ(trace.at(first[3]).count, 2);
  EXPECT_EQ(trace.at(second[0]).count, 3);
  EXPECT_EQ(trace.at(second[1]).count, 1);
  EXPECT_EQ(trace.at(loop[0]).count, 1);
  EXPECT_EQ(trace.at(gradient).count, 1);
  EXPECT_EQ(trace.at(step.a).count, 1);
}

TEST(TraceBuilder, ForeachOutsideOfTheOptimizerIsAnOpLikeAnyOther) {
  Optimizing step;
  step.builder.set_phase(Phase::Backward);
  const auto made = run(step.builder, "aten::_foreach_norm.Scalar",
                        step.read({step.a}), {4_B});
  EXPECT_EQ(step.builder.finish().at(made[0]).count, 1);
}

TEST(TraceBuilder, ForeachInPlaceMakesNothing) {
  Optimizing step;
  const StorageId before =
      run(step.builder, "aten::neg", step.read({step.a}), {40_B})[0];
  const Ids inputs = step.read({step.a, step.a, step.a});
  step.builder.begin_op(named("aten::_foreach_add_.List", inputs));
  step.builder.end_op({inputs[0], step.builder.add_value(flat(before)),
                       step.builder.add_value(flat({}))});
  const Trace trace = step.builder.finish();
  EXPECT_EQ(trace.at(step.a).count, 1);
  EXPECT_EQ(trace.at(before).count, 1);
}

}  // namespace
}  // namespace memscale
