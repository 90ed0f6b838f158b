#include <gtest/gtest.h>

#include <string>

#include "memscale/core/plan/plan.h"
#include "plan_samples.h"

// Plans of version 1, which had a field for each technique, can be read.

namespace memscale {
namespace {

// What version 1 wrote for small_plan(), with caches let go beside.
std::string earlier(std::string optimizer_bits = "8",
                    std::string optimizer_nanoseconds = "1") {
  return R"({"format":"memscale-plan","version":1,"model":"Net",)"
         R"("fingerprint":"00ff00ff00ff00ff","call":"x=float32[4, 8]",)"
         R"("device":"sim","optimizer":"adamw","mode":"aggressive",)"
         R"("budget":6291456,"verdicts":[)"
         R"({"rule":"forget_cache","text":"let go"},)"
         R"({"rule":"recompute_layers","text":"some"}],"layers":[)"
         R"({"layer":"","policy":"keep","keep_set":null,)"
         R"("plain_bytes":1024,)"
         R"("held_bytes":1024,"nanoseconds":0,"reason":""},)"
         R"({"layer":"a","policy":"cheap","keep_set":null,)"
         R"("parameter_bytes":null,"plain_bytes":4194304,)"
         R"("held_bytes":1048576,"nanoseconds":1499,)"
         R"("reason":"frees 3.00 MiB"},)"
         R"({"layer":"b.0","policy":"keep","keep_set":{)"
         R"("ops":["aten::mm","aten::tanh"],"kept":[[0,0],[1,2]]},)"
         R"("parameter_bytes":262144,"plain_bytes":4194304,)"
         R"("held_bytes":1048576,"nanoseconds":2500,)"
         R"("reason":"frees 3.00 MiB"}],"optimizer_bits":)" +
         optimizer_bits +
         R"(,"plain_peak":10485760,"peak":5242880,)"
         R"("host_peak":7,"plain_nanoseconds":40000,"nanoseconds":3999)" +
         (optimizer_nanoseconds.empty()
              ? ""
              : R"(,"optimizer_nanoseconds":)" + optimizer_nanoseconds) +
         "}";
}

std::string error_of(const std::string& text) {
  return plan_error_of([&] { plan_from_json(text); });
}

TEST(PlanJsonVersion1, IsReadAsTheSamePlan) {
  Plan plan = small_plan();
  plan.verdicts[0] = {"forget_cache", "let go"};
  Choice cache = made_choice("use_cache", "forget");
  cache.reason = "let go";
  Choice state = made_choice("optimizer_state", "8bit");
  state.nanoseconds = 1;
  plan.choices = {cache, state};
  const Plan read = plan_from_json(earlier());
  EXPECT_EQ(read, plan);
  EXPECT_EQ(plan_from_json(to_json(read)), plan);
  EXPECT_EQ(read.slowdown(), (3'999.0 + 1.0) / 40'000.0);

  plan.choices = {cache};
  EXPECT_EQ(plan_from_json(earlier("32", "")), plan);
}

TEST(PlanJsonVersion1, IsCheckedLikeAnyPlan) {
  EXPECT_EQ(error_of(earlier("16")), "optimizer_bits must be 8 or 32, got 16");
  EXPECT_EQ(error_of(earlier("8", "-1")),
            "choices[1].nanoseconds must be >= 0, got -1");
  EXPECT_EQ(error_of(earlier("true")),
            "optimizer_bits must be an integer of 64 bits, got true");
  std::string text = earlier();
  text.replace(text.find(R"("held_bytes":1048576)"), 20, R"("held_bytes":-1)");
  EXPECT_EQ(error_of(text), "layers[1].held_bytes must be >= 0, got -1");
}

}  // namespace
}  // namespace memscale
