#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "memscale/core/op_times.h"

namespace memscale {
namespace {

// Under TSAN this is the test of thread-safety; everywhere it checks that no
// call is lost.
TEST(OpTimes, CallsOfSeveralThreadsAllCount) {
  constexpr std::int64_t kThreads = 4;
  constexpr std::int64_t kCalls = 200;
  const std::vector<std::string> layers = {"", "a"};
  const CostModel cost = CostModel::of_cpu();
  Trace trace;
  trace.layers = {{""}, {"a"}};
  Op& op = trace.ops.emplace_back();
  op.name = "aten::exp";
  op.layer = LayerId(1);
  op.moved = Bytes(1'000'000);

  OpTimes times;
  std::vector<std::thread> threads;
  for (std::int64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::int64_t call = 0; call < kCalls; ++call) {
        const std::int64_t nanoseconds =
            1000 + kThreads * kCalls - thread - call;
        times.add_call(std::vector<TimedOp>{{1, "aten::exp", nanoseconds}});
        EXPECT_LE(times.applied_to(trace, cost, layers).ops[0].nanoseconds,
                  nanoseconds);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // The shortest is the last call of the last thread.
  EXPECT_EQ(times.applied_to(trace, cost, layers).ops[0].nanoseconds,
            1000 + kThreads * kCalls - (kThreads - 1) - (kCalls - 1));
}

}  // namespace
}  // namespace memscale
