#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "memscale/core/trace/repeat.h"
#include "synthetic_step.h"

namespace memscale {
namespace {

LayerSpec layer_spec() {
  LayerSpec spec;
  spec.ops = {
      {.numel = 4, .parameter = true, .saves_input = true, .scratch = true},
      {.numel = 3},
      {.numel = 2, .reads = 1, .mask = true, .saves_input = true}};
  return spec;
}

using Change = std::function<void(Trace&, const LayerCall&)>;

class DifferenceOf
    : public testing::TestWithParam<std::pair<std::string, Change>> {};

TEST_P(DifferenceOf, IsSeen) {
  SyntheticStep step(layer_spec(), 5, false);
  Trace trace = step.run();
  ASSERT_EQ(difference(trace, step.calls()[1], step.calls()[2]), std::nullopt);
  GetParam().second(trace, step.calls()[2]);
  trace.check();
  EXPECT_NE(difference(trace, step.calls()[1], step.calls()[2]), std::nullopt);
}

Storage& made(Trace& trace, const IdRange& storages, std::size_t i) {
  return trace.storages[storages.begin + i];
}

const std::vector<std::pair<std::string, Change>> kChanges = {
    // Forward: 0 is op0's, 1 op0's scratch, 2 op1's, 3 op2's.
    std::pair{"bytes_of_a_storage",
              Change([](Trace& trace, const LayerCall& c) {
                made(trace, c.forward.storages, 0).bytes = 1_GiB;
              })},
    std::pair{"place_of_a_storage",
              Change([](Trace& trace, const LayerCall& c) {
                made(trace, c.forward.storages, 0).place = Place::Host;
              })},
    std::pair{"freed_by_another_op_of_forward",
              Change([](Trace& trace, const LayerCall& c) {
                made(trace, c.forward.storages, 1).freed =
                    OpId(c.forward.ops.end - 1);
              })},
    std::pair{"freed_in_forward_or_never",
              Change([](Trace& trace, const LayerCall& c) {
                made(trace, c.forward.storages, 1).freed = OpId();
              })},
    std::pair{"freed_by_another_op_of_backward",
              Change([](Trace& trace, const LayerCall& c) {
                made(trace, c.backward->storages, 0).freed =
                    OpId(c.backward->ops.end - 1);
              })},
    std::pair{"input_held_beyond_backward",
              Change([](Trace& trace, const LayerCall& c) {
                trace.storages[c.inputs[0].index()].freed = OpId();
              })},
    std::pair{"save_of_another_value",
              Change([](Trace& trace, const LayerCall& c) {
                trace.saves[c.forward.saves.begin].value =
                    trace.ops[c.forward.ops.begin].outputs[1];
              })},
    std::pair{
        "save_of_another_op", Change([](Trace& trace, const LayerCall& c) {
          trace.saves[c.forward.saves.begin].op = OpId(c.forward.ops.begin + 1);
        })},
    std::pair{"save_never_released",
              Change([](Trace& trace, const LayerCall& c) {
                trace.saves[c.forward.saves.begin].released = OpId();
              })}};

INSTANTIATE_TEST_SUITE_P(Repeat, DifferenceOf, testing::ValuesIn(kChanges),
                         [](const auto& param) { return param.param.first; });

// Layers that all write into the one gradient: each write is a version.
TEST(RepeatBackward, WritesIntoAPassingGradientAreCounted) {
  LayerSpec spec;
  spec.ops = {{.gradient_in_place = true}};
  SyntheticStep full(spec, 5, false);
  SyntheticStep copied(spec, 5, true);
  const Trace expected = full.run();
  const Trace trace = copied.run();
  ASSERT_EQ(trace.ops.size(), expected.ops.size());
  for (std::size_t i = 0; i < trace.ops.size(); ++i) {
    if (trace.ops[i].outputs.empty()) continue;
    EXPECT_EQ(trace.at(trace.ops[i].outputs[0]).version,
              expected.at(expected.ops[i].outputs[0]).version)
        << i << " " << trace.ops[i].name;
  }
}

}  // namespace
}  // namespace memscale
