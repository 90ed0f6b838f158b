#include "memscale/core/trace/accumulation.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "memscale/core/trace/timeline.h"

namespace memscale {
namespace {

// Forward 0; backward 1 makes a gradient of 300 bytes, 2 adds into it, 3 reads
// something else; the optimizer's step is 4. A parameter of 300 bytes.
Trace step() {
  Trace trace;
  trace.ops.resize(5);
  for (const std::size_t i : {1, 2, 3}) trace.ops[i].phase = Phase::Backward;
  trace.ops[4].phase = Phase::Optimizer;
  trace.storages = {
      {300_B, 1, Place::Device, Category::Parameter, {}, {}, {}},
      {300_B, 1, Place::Device, Category::Gradient, {}, OpId(1), {}},
  };
  trace.values.resize(2);
  trace.values[0].storage = StorageId(0);
  trace.values[1].storage = StorageId(1);
  trace.ops[1].outputs = {ValueId(1)};
  trace.ops[2].inputs = {ValueId(1)};
  trace.ops[3].inputs = {ValueId(0)};
  trace.ops[4].inputs = {ValueId(0), ValueId(1)};
  return trace;
}

std::vector<std::int64_t> totals(const Trace& trace) {
  const Timeline timeline(trace, Place::Device, 1_B);
  std::vector<std::int64_t> result;
  for (const Instant& instant : timeline.instants()) {
    result.push_back(instant.bytes.count());
  }
  return result;
}

TEST(Accumulation, GradientsAreThereAllTheTimeAndWhatIsAddedIsLetGo) {
  using Totals = std::vector<std::int64_t>;
  const Trace plain = step();
  EXPECT_EQ(totals(plain), (Totals{300, 600, 600, 600, 600}));
  const Trace onto = accumulating_step(plain);
  EXPECT_EQ(totals(onto), (Totals{600, 900, 900, 600, 600}));
  EXPECT_EQ(Timeline(plain, Place::Device, 1_B).resident(), 300_B);
  EXPECT_EQ(Timeline(onto, Place::Device, 1_B).resident(), 600_B);
  // The optimizer reads the gradient that is there, backward makes another.
  EXPECT_EQ(onto.ops[4].inputs[1], ValueId(1));
  EXPECT_EQ(onto.at(onto.ops[1].outputs[0]).storage, StorageId(2));
  EXPECT_EQ(onto.ops[2].inputs, onto.ops[1].outputs);
}

TEST(Accumulation, AStepThatHasGradientsAlreadyStaysAsItIs) {
  const Trace onto = accumulating_step(step());
  EXPECT_EQ(accumulating_step(onto), onto);
}

}  // namespace
}  // namespace memscale
