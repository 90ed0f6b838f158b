#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "memscale/core/trace/repeat.h"
#include "memscale/core/trace/timeline.h"
#include "synthetic_step.h"

namespace memscale {
namespace {

bool maybe() { return *rc::gen::arbitrary<bool>(); }

// The i-th op of a layer.
LayerOp any_op(std::size_t i, bool is_last) {
  LayerOp op;
  op.returns = is_last ? Returns::New
                       : *rc::gen::element(Returns::New, Returns::View,
                                           Returns::Written, Returns::Unknown);
  op.numel = *rc::gen::element<std::int64_t>(0, 1, 100, 128, 129, 1000);
  op.reads = *rc::gen::inRange<std::size_t>(0, i + 1);
  op.kept = *rc::gen::element(Kept::No, Kept::ForForward, Kept::ForStep);
  op.workspace = Bytes(*rc::gen::element<std::int64_t>(0, 1, 600));
  for (bool* flag : {&op.parameter, &op.buffer, &op.mask, &op.saves_input,
                     &op.saves_output, &op.scratch, &op.gradient_in_place}) {
    *flag = maybe();
  }
  return op;
}

LayerSpec any_layer() {
  LayerSpec spec;
  const auto num_ops = *rc::gen::inRange<std::size_t>(1, 6);
  for (std::size_t i = 0; i < num_ops; ++i) {
    spec.ops.push_back(any_op(i, i + 1 == num_ops));
  }
  spec.residual = maybe();
  return spec;
}

// `passing` is a storage whose writes are not counted.
std::vector<Value> read(const Trace& trace, const std::vector<ValueId>& ids,
                        StorageId passing) {
  std::vector<Value> values;
  for (const ValueId id : ids) {
    values.push_back(trace.at(id));
    if (passing.valid() && values.back().storage == passing) {
      values.back().version = 0;
    }
  }
  return values;
}

Op without_values(Op op) {
  op.inputs.clear();
  op.outputs.clear();
  return op;
}

// A value may have one id or several; all else is numbered in the same order.
void check_same(const Trace& copied, const Trace& full, StorageId passing) {
  RC_ASSERT(copied.layers == full.layers);
  RC_ASSERT(copied.storages == full.storages);
  RC_ASSERT(copied.ops.size() == full.ops.size());
  const auto same = [&](const std::vector<ValueId>& ours,
                        const std::vector<ValueId>& theirs) {
    return read(copied, ours, passing) == read(full, theirs, passing);
  };
  for (std::size_t i = 0; i < full.ops.size(); ++i) {
    const Op& ours = copied.ops[i];
    const Op& theirs = full.ops[i];
    RC_ASSERT(without_values(ours) == without_values(theirs));
    RC_ASSERT(same(ours.inputs, theirs.inputs));
    RC_ASSERT(same(ours.outputs, theirs.outputs));
  }
  RC_ASSERT(copied.saves.size() == full.saves.size());
  for (std::size_t i = 0; i < full.saves.size(); ++i) {
    const Save& ours = copied.saves[i];
    const Save& theirs = full.saves[i];
    RC_ASSERT(ours.op == theirs.op);
    RC_ASSERT(ours.released == theirs.released);
    RC_ASSERT(copied.at(ours.value) == full.at(theirs.value));
  }
}

void check_same(const Timeline& copied, const Timeline& full) {
  RC_ASSERT(copied.instants().size() == full.instants().size());
  for (std::size_t i = 0; i < full.instants().size(); ++i) {
    const Instant& ours = copied.instants()[i];
    const Instant& theirs = full.instants()[i];
    RC_ASSERT(ours.op == theirs.op);
    RC_ASSERT(ours.bytes == theirs.bytes);
    RC_ASSERT(ours.by_category == theirs.by_category);
  }
  RC_ASSERT(copied.resident() == full.resident());
}

TEST(RepeatProperty, CopiedLayersAreAsIfTraced) {
  ASSERT_TRUE(rc::check("copied == full, but for the ids of values", [] {
    const LayerSpec spec = any_layer();
    const auto num_layers = *rc::gen::inRange<std::size_t>(5, 9);
    SyntheticStep full(spec, num_layers, false);
    SyntheticStep copied(spec, num_layers, true);
    const Trace expected = full.run();
    const Trace trace = copied.run();
    RC_ASSERT(!full.difference());
    RC_ASSERT(!copied.difference());
    // Copies do not count writes into a gradient that all layers write into.
    const LayerCall& first = full.calls()[0];
    const bool passes = first.gradient_in == first.gradient_out;
    check_same(trace, expected, passes ? first.gradient_in : StorageId());
    check_same(Timeline(trace, Place::Device, 512_B),
               Timeline(expected, Place::Device, 512_B));
    for (std::size_t i = 0; i < num_layers; ++i) {
      const LayerCall& ours = copied.calls()[i];
      const LayerCall& theirs = full.calls()[i];
      RC_ASSERT(ours.backward->ops == theirs.backward->ops);
      RC_ASSERT(ours.gradient_in == theirs.gradient_in);
      RC_ASSERT(ours.gradient_out == theirs.gradient_out);
      RC_ASSERT(ours.parameter_gradients == theirs.parameter_gradients);
    }
  }));
}

}  // namespace
}  // namespace memscale
