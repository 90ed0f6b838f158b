#include "memscale/core/plan/question.h"

#include <gtest/gtest.h>

#include "decision_samples.h"
#include "memscale/core/hardware/known_devices.h"
#include "memscale/core/plan/technique.h"

namespace memscale {
namespace {

const Technique& technique(std::string_view name) {
  return *find_technique(name);
}

Question asked(const Config& config, const Target& target = {},
               const StepFacts& facts = {}) {
  static const Trace trace = stack_of(2);
  return Question::of(shared(trace), config, target, facts);
}

TEST(Question, WishesComeFromModeAndFields) {
  Config config;
  EXPECT_EQ(asked(config).wish(technique("optimizer_state")), Wish::Off);
  EXPECT_EQ(asked(config).wish(technique("recompute")), Wish::Allowed);
  EXPECT_EQ(asked(config).wish(technique("use_cache")), Wish::Allowed);
  config.mode = OptimizationMode::Aggressive;
  EXPECT_EQ(asked(config).wish(technique("optimizer_state")), Wish::Allowed);
  config.use_8bit_optimizer = true;
  EXPECT_EQ(asked(config).wish(technique("optimizer_state")), Wish::Asked);
  config.use_8bit_optimizer = false;
  config.enable_checkpointing = false;
  EXPECT_EQ(asked(config).wish(technique("optimizer_state")), Wish::Off);
  EXPECT_EQ(asked(config).wish(technique("recompute")), Wish::Off);
}

TEST(Question, TheTargetDecidesWhatDependsOnIt) {
  Target target;
  target.type = "cpu";
  target.memory = 7_GiB;
  const Question on_cpu = asked(Config(), target);
  EXPECT_TRUE(on_cpu.on_cpu);
  EXPECT_EQ(on_cpu.granularity, 1_B);
  EXPECT_EQ(on_cpu.device_memory, 7_GiB);
  EXPECT_EQ(on_cpu.min_bytes, kDefaultMinBytes);
  EXPECT_EQ(on_cpu.limit(), Bytes(static_cast<std::int64_t>(
                                0.85 * static_cast<double>((7_GiB).count()))));

  target.type = "sim";  // the trace is made there, the card is elsewhere
  target.card = DeviceSpec();
  target.card->vendor = "AMD";
  const Question on_card = asked(Config(), target);
  EXPECT_FALSE(on_card.on_cpu);
  EXPECT_TRUE(on_card.target.on_cuda);
  EXPECT_EQ(on_card.granularity, 512_B);
  EXPECT_EQ(on_card.device_memory, std::nullopt);  // the card's, unknown
  target.card->memory = {3_GiB, Source::Known};
  EXPECT_EQ(asked(Config(), target).device_memory, 3_GiB);
  EXPECT_NE(on_card.cost.nanoseconds(*on_card.trace),
            on_cpu.cost.nanoseconds(*on_card.trace));
}

TEST(Question, SizesOfOtherLayersAreLeftOut) {
  StepFacts facts;
  facts.parameter_bytes = {1_B, 2_B, 3_B};
  EXPECT_EQ(asked(Config(), {}, facts).step.parameter_bytes.size(), 3u);
  facts.parameter_bytes.pop_back();
  EXPECT_TRUE(asked(Config(), {}, facts).step.parameter_bytes.empty());
}

}  // namespace
}  // namespace memscale
