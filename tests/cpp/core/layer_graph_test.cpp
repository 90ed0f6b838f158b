#include "memscale/core/cuts/layer_graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/cuts/cuts.h"
#include "memscale/core/ops/replay_rules.h"
#include "memscale/core/trace/trace_builder.h"

namespace memscale {
namespace {

using Kept = std::vector<std::pair<std::size_t, std::size_t>>;
using Values = std::vector<Value>;

Op op_with(bool Op::* flag) {
  Op op;
  op.*flag = true;
  return op;
}

// Steps of two layers, op by op. Tensors are vectors of floats.
class Step {
 public:
  Step() : before_(builder_.add_layer("0")), layer_(builder_.add_layer("1")) {}

  Value resident(std::int64_t numel, Category category) {
    return over(builder_.add_resident(Bytes(4 * numel), Place::Device, category,
                                      layer_),
                numel);
  }
  void enter(bool ours) { builder_.set_layer(ours ? layer_ : before_); }

  Value op(std::string name, const Values& inputs, std::int64_t numel) {
    return op_of_many(std::move(name), inputs, {numel})[0];
  }
  Values op_of_many(std::string name, const Values& inputs,
                    const std::vector<std::int64_t>& numels, Op traced = {}) {
    begin(std::move(name), inputs, std::move(traced));
    Values outputs;
    for (const std::int64_t numel : numels) {
      outputs.push_back(
          over(builder_.add_storage(Bytes(4 * numel), Place::Device), numel));
    }
    end(outputs);
    return outputs;
  }
  Value view(const Value& input) {
    Value output = input;
    output.sizes.insert(output.sizes.begin(), 1);
    output.strides.insert(output.strides.begin(), 1);
    Op traced = op_with(&Op::view);
    traced.aliases = true;
    begin("aten::view", {input}, std::move(traced));
    end({output});
    return output;
  }
  // Writes into the first input.
  Value in_place(std::string name, const Values& inputs) {
    Op traced = op_with(&Op::mutates);
    traced.uses.resize(inputs.size());
    traced.uses[0].access =
        find_replay_rules(name).overwrites ? Access::Overwrite : Access::Update;
    begin(std::move(name), inputs, std::move(traced));
    builder_.bump_version(inputs[0].storage);
    Value output = inputs[0];
    ++output.version;
    end({output});
    return output;
  }
  void save(const Value& value) {
    saves_.push_back(builder_.add_save(builder_.add_value(value)));
  }
  // Saves end, and so do all tensors that the caller does not hold.
  Trace finish(const Values& held = {}) {
    builder_.set_phase(Phase::Backward);
    builder_.set_layer(layer_);
    op("aten::ones_like", {}, 1);
    for (const std::size_t save : saves_) builder_.release_save(save);
    for (std::size_t i = 0; i < builder_.trace().storages.size(); ++i) {
      const Storage& storage = builder_.trace().storages[i];
      const bool is_held = std::ranges::any_of(
          held, [&](const Value& v) { return v.storage == StorageId(i); });
      if (storage.born.valid() && !is_held) builder_.free(StorageId(i));
    }
    return builder_.finish();
  }

  LayerId layer() const { return layer_; }

 private:
  static Value over(StorageId storage, std::int64_t numel) {
    return {.storage = storage,
            .dtype = Dtype::Float32,
            .sizes = {numel},
            .strides = {1}};
  }
  void begin(std::string name, const Values& inputs, Op traced) {
    traced.name = std::move(name);
    for (const Value& input : inputs) {
      traced.inputs.push_back(builder_.add_value(input));
    }
    builder_.begin_op(std::move(traced));
  }
  void end(const Values& outputs) {
    std::vector<ValueId> ids;
    for (const Value& output : outputs) {
      ids.push_back(builder_.add_value(output));
    }
    builder_.end_op(std::move(ids));
  }

  TraceBuilder builder_;
  const LayerId before_;
  const LayerId layer_;
  std::vector<std::size_t> saves_;
};

LayerGraph graph_of(const Trace& trace, LayerId layer,
                    const GraphRules& rules = {}) {
  std::vector<OpId> run;
  std::vector<std::int64_t> nanoseconds;
  for (std::size_t i = 0; i < trace.ops.size(); ++i) {
    const Op& op = trace.ops[i];
    if (op.phase != Phase::Forward || op.layer != layer) continue;
    run.emplace_back(i);
    nanoseconds.push_back(100);
  }
  return layer_graph(trace, run, nanoseconds, rules);
}

TEST(LayerGraph, InputsCostTheirBytesParametersNothing) {
  Step step;
  const Value weight = step.resident(16, Category::Parameter);
  const Value batch = step.resident(8, Category::Input);
  step.enter(false);
  const Value x = step.op("aten::relu", {batch}, 8);
  step.enter(true);
  const Value y = step.op("aten::mm", {x, weight}, 4);
  step.save(x);
  step.save(weight);
  step.op("aten::exp", {y}, 4);
  step.save(y);
  const LayerGraph graph = graph_of(step.finish(), step.layer());
  const Cut all = keep_everything(graph);
  EXPECT_EQ(all.held, Bytes(32 + 16));
  EXPECT_EQ(all.keep_set.kept, (Kept{{0, 0}}));
  const Cut nothing = keep_nothing(graph);
  EXPECT_EQ(nothing.held, 32_B);
  EXPECT_EQ(nothing.nanoseconds, 100);  // exp is not called again
  EXPECT_EQ(nothing.keep_set.ops,
            (std::vector<std::string>{"aten::mm", "aten::exp"}));
}

TEST(LayerGraph, WhatOthersHoldAnywayCostsNothing) {
  const auto held = [](bool earlier_saves, bool caller_holds, bool told) {
    Step step;
    const Value batch = step.resident(8, Category::Input);
    step.enter(true);  // made here, as the run is chosen below
    const Value x = step.op("aten::relu", {batch}, 8);
    step.enter(false);
    step.op("aten::exp", {x}, 8);
    if (earlier_saves) step.save(x);
    step.enter(true);
    step.op("aten::mul.Tensor", {x, x}, 8);
    step.save(x);
    const Trace trace = step.finish(caller_holds ? Values{x} : Values{});
    GraphRules rules;
    const std::vector<StorageId> elsewhere = {x.storage};
    if (told) rules.held_elsewhere = elsewhere;
    const std::vector<OpId> run = {OpId(std::size_t{2})};
    const std::vector<std::int64_t> nanoseconds = {100};
    return keep_everything(layer_graph(trace, run, nanoseconds, rules)).held;
  };
  EXPECT_EQ(held(false, false, false), 32_B);
  EXPECT_EQ(held(true, false, false), 0_B);
  EXPECT_EQ(held(false, true, false), 0_B);
  EXPECT_EQ(held(false, false, true), 0_B);
}

TEST(LayerGraph, ViewsAreTheStateTheyAreOf) {
  Step step;
  const Value batch = step.resident(8, Category::Input);
  step.enter(true);
  const Value x = step.op("aten::relu", {batch}, 8);
  const Value y = step.view(x);
  step.op("aten::exp", {y}, 8);
  step.save(y);
  const Cut all = keep_everything(graph_of(step.finish(), step.layer()));
  EXPECT_EQ(all.held, 32_B);
  EXPECT_EQ(all.keep_set.kept, (Kept{{0, 0}}));
}

TEST(LayerGraph, SmallResultsAreAlwaysKept) {
  Step step;
  const Value batch = step.resident(8, Category::Input);
  step.enter(true);
  const Values norm =
      step.op_of_many("aten::native_layer_norm", {batch}, {8, 1, 1});
  for (const Value& value : norm) step.save(value);
  const Trace trace = step.finish();
  const Cut nothing =
      keep_nothing(graph_of(trace, step.layer(), {.min_bytes = 5_B}));
  EXPECT_EQ(nothing.held, 8_B);
  EXPECT_EQ(nothing.keep_set.kept, (Kept{{0, 1}, {0, 2}}));
  EXPECT_EQ(keep_nothing(graph_of(trace, step.layer())).held, 0_B);
  // As an allocator hands them out.
  const GraphRules rules{.min_bytes = 5_B, .granularity = 512_B};
  EXPECT_EQ(keep_nothing(graph_of(trace, step.layer(), rules)).held, 1_KiB);
}

TEST(LayerGraph, WhatCannotBeCalledTwiceIsKept) {
  const auto kept = [](std::string name, Op traced, const GraphRules& rules) {
    Step step;
    const Value batch = step.resident(8, Category::Input);
    step.enter(true);
    step.save(
        step.op_of_many(std::move(name), {batch}, {8}, std::move(traced))[0]);
    return keep_nothing(graph_of(step.finish(), step.layer(), rules)).held >
           0_B;
  };
  EXPECT_FALSE(kept("aten::relu", {}, {}));
  EXPECT_FALSE(kept("aten::bernoulli", op_with(&Op::random), {}));
  EXPECT_TRUE(kept("aten::relu", op_with(&Op::in_function), {}));
  EXPECT_TRUE(kept("mylib::scale", op_with(&Op::opaque), {}));
  EXPECT_TRUE(kept("aten::empty_like", {}, {}));
  EXPECT_TRUE(kept("aten::index_put", {}, {}));
  EXPECT_FALSE(kept("aten::cumsum", {}, {}));
  EXPECT_TRUE(kept("aten::cumsum", {}, {.on_cuda = true}));
  EXPECT_FALSE(kept("aten::convolution", {}, {.on_cuda = true}));
  EXPECT_TRUE(
      kept("aten::convolution", {}, {.on_cuda = true, .benchmarks = true}));
  // It writes something that it does not return, and that came from outside.
  Op writes = op_with(&Op::mutates);
  writes.uses = {{.access = Access::Update}};
  EXPECT_TRUE(kept("aten::_foreach_add_.Scalar", writes, {}));
  writes.uses = {{.access = Access::Scratch}};
  EXPECT_FALSE(kept("aten::_native_batch_norm_legit", writes, {}));
}

TEST(LayerGraph, UnknownMemoryIsNotReplayedFrom) {
  Step step;
  step.enter(true);
  const Value sparse{
      .storage = {}, .dtype = Dtype::Float32, .sizes = {8}, .strides = {}};
  step.save(step.op("aten::mm", {sparse}, 8));
  EXPECT_EQ(keep_nothing(graph_of(step.finish(), step.layer())).held, 32_B);
}

TEST(LayerGraph, WritesInPlaceMakeNewStates) {
  Step step;
  const Value batch = step.resident(8, Category::Input);
  step.enter(true);
  const Value x = step.op("aten::convolution", {batch}, 8);
  const Value y = step.in_place("aten::relu_", {x});
  step.save(y);
  const LayerGraph graph = graph_of(step.finish(), step.layer());
  const Cut all = keep_everything(graph);
  EXPECT_EQ(all.held, 32_B);
  EXPECT_EQ(all.keep_set.kept, (Kept{{1, 0}}));
  const Cut nothing = keep_nothing(graph);
  EXPECT_EQ(nothing.held, 0_B);
  EXPECT_EQ(nothing.nanoseconds, 200);
  // The old state has no bytes of its own to be kept.
  EXPECT_EQ(pareto_cuts(graph).size(), 2u);
}

// Batch norm writes its running mean, and saves it: that is not its result.
TEST(LayerGraph, StatisticsHaveNoPlaceInAKeepSet) {
  Step step;
  const Value batch = step.resident(8, Category::Input);
  const Value mean = step.resident(8, Category::Buffer);
  step.enter(true);
  Op norm = op_with(&Op::mutates);
  norm.uses = {{}, {.access = Access::Scratch}};
  const Value y = step.op_of_many("aten::_native_batch_norm_legit",
                                  {batch, mean}, {8}, norm)[0];
  step.save(y);
  step.save(mean);
  const Cut nothing = keep_nothing(graph_of(step.finish(), step.layer()));
  EXPECT_EQ(nothing.held, 0_B);
  EXPECT_TRUE(nothing.keep_set.kept.empty());
}

TEST(LayerGraph, AWriteIntoWhatCannotBeMadeAgainCannotEither) {
  for (const bool from_outside : {false, true}) {
    Step step;
    const Value batch = step.resident(8, Category::Input);
    step.enter(!from_outside);
    const Value x = step.op("aten::empty_like", {batch}, 8);
    step.enter(true);
    step.save(step.in_place("aten::add_.Tensor", {x, batch}));
    const Cut nothing = keep_nothing(graph_of(step.finish(), step.layer()));
    EXPECT_EQ(nothing.held, 32_B);
    EXPECT_EQ(nothing.nanoseconds, 0);
  }
}

// Dropout as the CPU has it.
TEST(LayerGraph, DrawsOverwriteAndArePackedOnTheCpu) {
  Step step;
  const Value batch = step.resident(64, Category::Input);
  step.enter(true);
  const Value mask = step.op("aten::empty_like", {batch}, 64);
  const Value drawn = step.in_place("aten::bernoulli_.float", {mask});
  const Value scaled = step.in_place("aten::div_.Scalar", {drawn});
  step.op("aten::mul.Tensor", {batch, scaled}, 64);
  step.save(scaled);
  const Trace trace = step.finish();
  const Cut card = keep_nothing(graph_of(trace, step.layer()));
  EXPECT_EQ(card.held, 0_B);
  EXPECT_EQ(card.nanoseconds, 200);
  const Cut cpu = keep_nothing(graph_of(trace, step.layer(), {.on_cpu = true}));
  EXPECT_EQ(cpu.held, 8_B);
  EXPECT_EQ(cpu.nanoseconds, 132);
}

TEST(LayerGraph, IndicesTakeHalfOnTheCpu) {
  Step step;
  const Value batch = step.resident(64, Category::Input);
  step.enter(true);
  const Values pooled =
      step.op_of_many("aten::max_pool2d_with_indices", {batch}, {16, 32});
  step.save(pooled[1]);
  const LayerGraph graph =
      graph_of(step.finish(), step.layer(), {.on_cpu = true});
  const Cut all = keep_everything(graph);
  EXPECT_EQ(all.held, 64_B);
  // Naming the other result makes the tape pack these.
  EXPECT_EQ(all.keep_set.kept, (Kept{{0, 0}}));
  EXPECT_EQ(keep_nothing(graph).held, 0_B);
}

TEST(LayerGraph, SavesThatEndInForwardDoNotCount) {
  Step step;
  const Value batch = step.resident(8, Category::Input);
  step.enter(true);
  const Value x = step.op("aten::relu", {batch}, 8);
  step.save(x);
  step.op("aten::relu", {x}, 8);
  Trace trace = step.finish();
  trace.saves[0].released = OpId(std::size_t{1});
  EXPECT_EQ(keep_everything(graph_of(trace, step.layer())).held, 0_B);
}

TEST(LayerGraph, RefusesTimesThatAreNotOfTheRun) {
  Step step;
  step.enter(true);
  step.op("aten::ones", {}, 8);
  const Trace trace = step.finish();
  const std::vector<OpId> run = {OpId(std::size_t{0})};
  EXPECT_THROW(layer_graph(trace, run, {}, {}), PlanError);
}

}  // namespace
}  // namespace memscale
