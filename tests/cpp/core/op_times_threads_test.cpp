#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "memscale/core/time/op_times.h"

namespace memscale {
namespace {

// Under TSAN this is the test of thread-safety; everywhere it checks that the
// shortest call of each thread counts, whatever the others do meanwhile.
TEST(OpTimes, ThreadsAddCallsAtTheSameTime) {
  constexpr std::size_t kThreads = 4;
  constexpr std::int64_t kCalls = 200;
  const CostModel cost = CostModel::of_cpu();
  std::vector<std::string> layers;
  Trace trace;
  for (std::size_t layer = 0; layer < kThreads; ++layer) {
    layers.push_back(std::to_string(layer));
    trace.layers.push_back({layers.back()});
    Op& op = trace.ops.emplace_back();
    op.name = "aten::exp";
    op.layer = LayerId(layer);
    // Ops that do the same work would get the same time.
    op.moved = Bytes(1'000'000 * (static_cast<std::int64_t>(layer) + 1));
  }
  const auto shortest = [](std::size_t layer) {
    return 1000 * (static_cast<std::int64_t>(layer) + 1);
  };

  OpTimes times;
  std::vector<std::thread> threads;
  for (std::size_t layer = 0; layer < kThreads; ++layer) {
    threads.emplace_back([&, layer] {
      for (std::int64_t call = 0; call < kCalls; ++call) {
        // The shortest is neither the first nor the last.
        const std::int64_t longer = (call + kCalls / 2) % kCalls;
        times.add_call(std::vector<TimedOp>{
            {layer, "aten::exp", shortest(layer) + longer}});
        times.applied_to(trace, cost, layers);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Trace timed = times.applied_to(trace, cost, layers);
  for (std::size_t layer = 0; layer < kThreads; ++layer) {
    EXPECT_EQ(timed.ops[layer].nanoseconds, shortest(layer)) << layer;
  }
}

}  // namespace
}  // namespace memscale
