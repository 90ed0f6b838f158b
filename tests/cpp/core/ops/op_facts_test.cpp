#include "memscale/core/ops/op_facts.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/ops/workspace/workspace.h"

namespace memscale {
namespace {

using Sizes = std::vector<std::int64_t>;

ValueId add_value(Trace& trace, StorageId storage, const Sizes& sizes) {
  Value value{.storage = storage,
              .dtype = Dtype::Float32,
              .sizes = sizes,
              .strides = sizes};
  std::int64_t next = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    value.strides[d] = next;
    next *= sizes[d];
  }
  trace.values.push_back(std::move(value));
  return ValueId(trace.values.size() - 1);
}

// In a storage of its own.
ValueId add_tensor(Trace& trace, const Sizes& sizes) {
  const StorageId id(trace.storages.size());
  trace.storages.push_back({});
  const ValueId value = add_value(trace, id, sizes);
  trace.storages[id.index()].bytes = Bytes(4 * trace.at(value).numel());
  return value;
}

Op& add_op(Trace& trace, std::string name, std::vector<ValueId> inputs,
           std::vector<ValueId> outputs) {
  Op op;
  op.name = std::move(name);
  op.inputs = std::move(inputs);
  op.outputs = std::move(outputs);
  trace.ops.push_back(std::move(op));
  return trace.ops.back();
}

TEST(OpFacts, AnOpThatReturnsItsInputIsAView) {
  Trace trace;
  const ValueId a = add_tensor(trace, {4, 4});
  const ValueId b = add_tensor(trace, {4, 4});
  const ValueId row = add_value(trace, trace.at(a).storage, {4});
  const ValueId of_b = add_value(trace, trace.at(b).storage, {4});
  const ValueId unknown = add_value(trace, {}, {4});
  add_op(trace, "aten::select.int", {a}, {row});
  add_op(trace, "aten::unbind.int", {b, a}, {row, of_b});
  add_op(trace, "aten::relu_", {a}, {a}).mutates = true;
  add_op(trace, "aten::exp", {a}, {b});
  add_op(trace, "aten::max.dim", {a}, {row, of_b});  // one of them is new
  add_op(trace, "aten::wait", {a}, {}).view = true;  // not for lack of outputs
  add_op(trace, "aten::detach", {unknown}, {unknown});
  add_op_facts(trace, 1);
  const std::vector<bool> expected = {true,  true,  false, false,
                                      false, false, false};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(trace.ops[i].view, expected[i]) << trace.ops[i].name;
  }
  // A view costs nothing; that is seen only if it is told before the cost.
  EXPECT_EQ(trace.ops[0].flops, 0);
  EXPECT_EQ(trace.ops[0].moved, 0_B);
  EXPECT_TRUE(trace.ops[0].workspace_known);
  EXPECT_EQ(trace.ops[3].flops, 16);
  EXPECT_EQ(trace.ops[3].moved, 128_B);
}

TEST(OpFacts, CostIsFilledIn) {
  Trace trace;
  const ValueId a = add_tensor(trace, {3, 5});
  const ValueId b = add_tensor(trace, {5, 7});
  const ValueId c = add_tensor(trace, {3, 7});
  Op& op = add_op(trace, "aten::mm", {a, b}, {c});
  op.flops = 1;
  op.moved = 1_B;
  add_op_facts(trace, 1);
  EXPECT_EQ(trace.ops[0].flops, 210);
  EXPECT_EQ(trace.ops[0].moved, Bytes(4 * (15 + 35 + 21)));
}

Op& add_attention(Trace& trace) {
  const ValueId q = add_tensor(trace, {4, 8, 128, 64});
  const ValueId k = add_tensor(trace, {4, 8, 128, 64});
  const ValueId v = add_tensor(trace, {4, 8, 128, 64});
  const ValueId out = add_tensor(trace, {4, 8, 128, 64});
  const ValueId sums = add_tensor(trace, {4, 8, 128});
  return add_op(trace, "aten::_scaled_dot_product_flash_attention_for_cpu",
                {q, k, v}, {out, sums});
}

TEST(OpFacts, WorkspaceIsThatOfTheKernelAndItsThreads) {
  Bytes bytes[2];
  for (const int threads : {1, 2}) {
    Trace trace;
    add_attention(trace);
    add_op_facts(trace, threads);
    const Op& op = trace.ops[0];
    EXPECT_TRUE(op.workspace_known);
    EXPECT_EQ(op.workspace, workspace(trace, op, threads));
    bytes[threads - 1] = op.workspace;
  }
  EXPECT_GT(bytes[0], 0_B);
  EXPECT_GT(bytes[1], bytes[0]);
}

TEST(OpFacts, WhatWasSeenIsNotGuessed) {
  Trace trace;
  Op& op = add_attention(trace);
  op.workspace = 123_B;
  op.workspace_known = true;
  add_op_facts(trace, 2);
  EXPECT_EQ(trace.ops[0].workspace, 123_B);
  EXPECT_TRUE(trace.ops[0].workspace_known);
}

TEST(OpFacts, AnOpOutsideOfTheTableHasNoKnownWorkspace) {
  Trace trace;
  const ValueId a = add_tensor(trace, {4});
  const ValueId b = add_tensor(trace, {4});
  add_op(trace, "aten::no_such_op", {a}, {b});
  add_op_facts(trace, 1);
  EXPECT_FALSE(trace.ops[0].workspace_known);
  EXPECT_EQ(trace.ops[0].workspace, 0_B);
  EXPECT_EQ(
      trace.notes,
      std::vector<std::string>{
          "workspaces that are not known, and left out: aten::no_such_op"});
  EXPECT_NO_THROW(trace.check());
}

TEST(OpFacts, OpaqueKernelsAreNotedOnceEach) {
  Trace trace;
  trace.notes = {"before"};
  const ValueId a = add_tensor(trace, {4});
  const ValueId b = add_tensor(trace, {4});
  for (const char* name : {"lib::two", "lib::one", "lib::two", "lib::seen"}) {
    add_op(trace, name, {a}, {b}).opaque = true;
  }
  trace.ops[3].workspace_known = true;
  // Its name is in the table, its kernel is another.
  add_op(trace, "aten::exp", {a}, {b}).opaque = true;
  add_op_facts(trace, 1);
  EXPECT_EQ(trace.notes,
            (std::vector<std::string>{
                "before",
                "workspaces that are not known, and left out: aten::exp, "
                "lib::one, lib::two"}));
  EXPECT_FALSE(trace.ops[0].workspace_known);
  EXPECT_TRUE(trace.ops[3].workspace_known);
}

TEST(OpFacts, SomeLossesKeepTheBytesOfTheUnreducedOnes) {
  Trace trace;
  const ValueId input = add_tensor(trace, {8, 4});
  const ValueId target = add_tensor(trace, {8, 4});
  const ValueId loss = add_tensor(trace, {});
  add_op(trace, "aten::mse_loss", {input, target}, {loss});
  add_op_facts(trace, 1);
  EXPECT_EQ(trace.at(trace.at(loss).storage).bytes, 128_B);
  EXPECT_EQ(trace.ops[0].workspace, 0_B);
}

// A layer whose fourth output is this one.
Trace lstm(const Sizes& reserve) {
  Trace trace;
  const std::int64_t steps = 20, batch = 6, features = 48, hidden = 64;
  const ValueId input = add_tensor(trace, {steps, batch, features});
  const ValueId w0 = add_tensor(trace, {4 * hidden, features});
  const ValueId w1 = add_tensor(trace, {4 * hidden, hidden});
  const ValueId b0 = add_tensor(trace, {4 * hidden});
  const ValueId b1 = add_tensor(trace, {4 * hidden});
  const ValueId h = add_tensor(trace, {1, batch, hidden});
  const ValueId c = add_tensor(trace, {1, batch, hidden});
  const ValueId out = add_tensor(trace, {steps, batch, hidden});
  const ValueId h1 = add_tensor(trace, {1, batch, hidden});
  const ValueId c1 = add_tensor(trace, {1, batch, hidden});
  const ValueId kept = add_tensor(trace, reserve);
  add_op(trace, "aten::mkldnn_rnn_layer", {input, w0, w1, b0, b1, h, c},
         {out, h1, c1, kept});
  return trace;
}

TEST(OpFacts, TheReserveOfAnLstmIsAdded) {
  Trace trace = lstm({0});
  const std::vector<Storage> before = trace.storages;
  add_op_facts(trace, 1);
  EXPECT_EQ(trace.storages.back().bytes, Bytes(491520));
  for (std::size_t i = 0; i + 1 < before.size(); ++i) {
    EXPECT_EQ(trace.storages[i], before[i]);
  }
  // A real tensor that is larger is believed.
  trace = lstm({200000});
  add_op_facts(trace, 1);
  EXPECT_EQ(trace.storages.back().bytes, Bytes(800000));
  // One without a storage is left alone.
  trace = lstm({0});
  trace.values[trace.ops[0].outputs[3].index()].storage = StorageId();
  add_op_facts(trace, 1);
  EXPECT_EQ(trace.storages, before);
}

TEST(OpFacts, OnNoThreadIsABug) {
  Trace trace;
  add_attention(trace);
  EXPECT_THROW(add_op_facts(trace, 0), InternalError);
}

}  // namespace
}  // namespace memscale
