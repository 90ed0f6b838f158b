#include "memscale/core/config/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <string>

#include "memscale/base/error.h"

namespace memscale {
namespace {

using namespace std::string_literals;

template <typename Owner = Config>
std::string error_of(std::string_view name, FieldValue value) {
  Owner config;
  try {
    config.set(name, std::move(value));
  } catch (const ConfigError& error) {
    EXPECT_EQ(config, Owner()) << "a rejected value changed the config";
    EXPECT_FALSE(config.is_set(name));
    return error.what();
  }
  return "accepted";
}

TEST(Config, DefaultsAreTheOriginals) {
  const Config config;
  EXPECT_EQ(config.mode, OptimizationMode::Balanced);
  EXPECT_EQ(config.budget.get(), std::nullopt);
  EXPECT_EQ(config.target_gpu_utilization, 0.85);
  EXPECT_TRUE(config.enable_checkpointing);
  EXPECT_TRUE(config.enable_offloading);
  EXPECT_FALSE(config.enable_tiling);
  EXPECT_FALSE(config.use_mixed_precision);
  EXPECT_FALSE(config.use_8bit_optimizer);
  EXPECT_EQ(config.max_cpu_offload_gb.get(), std::nullopt);
  EXPECT_FALSE(config.force_optimize);
  EXPECT_TRUE(config.use_static_profiling);
  EXPECT_TRUE(config.use_empirical_fallback);
  EXPECT_EQ(config.warmup_steps, 2);
  EXPECT_FALSE(config.async_offload);
  EXPECT_FALSE(config.async_config.get());
  EXPECT_FALSE(config.auto_policy);
  EXPECT_FALSE(config.verify_correctness);
  EXPECT_TRUE(config.enable_logging);
  EXPECT_EQ(config.log_file.get(), std::nullopt);
  EXPECT_EQ(config.observability_port.get(), std::nullopt);
  EXPECT_EQ(Config::fields().size(), 21u);
}

TEST(Config, TableIsComplete) {
  std::set<std::string_view> names;
  const Config config;
  for (const FieldSpec& spec : Config::fields()) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
    EXPECT_TRUE(spec.doc.ends_with('.')) << spec.name;
    EXPECT_EQ(spec.default_value, config.get(spec.name)) << spec.name;
    EXPECT_FALSE(config.is_set(spec.name)) << spec.name;
    EXPECT_EQ(spec.optional, spec.default_value.is_none()) << spec.name;
    // Every default obeys its own rule, and every rule can be said.
    EXPECT_NO_THROW(checked(spec, spec.default_value)) << spec.name;
    EXPECT_FALSE(spec.rule().empty()) << spec.name;
  }
}

TEST(Config, SetReadsEveryKind) {
  Config config;
  config.set("mode", "Aggressive");
  config.set("budget", "6GiB");
  config.set("target_gpu_utilization", 1);  // an integer passes for a real
  config.set("enable_tiling", true);
  config.set("max_cpu_offload_gb", 1.5);
  config.set("warmup_steps", 0);
  config.set("log_file", "run.log");
  config.set("observability_port", 65535);
  config.set("async_config", FieldMap{{"pinned_pool_bytes", "1GiB"s}});
  EXPECT_EQ(config.mode, OptimizationMode::Aggressive);
  EXPECT_EQ(config.budget.get(), 6_GiB);
  EXPECT_EQ(config.target_gpu_utilization, 1.0);
  EXPECT_TRUE(config.enable_tiling);
  EXPECT_EQ(config.max_cpu_offload_gb.get(), 1.5);
  EXPECT_EQ(config.warmup_steps, 0);
  EXPECT_EQ(config.log_file.get(), "run.log");
  EXPECT_EQ(config.observability_port.get(), 65535);
  EXPECT_EQ(config.async_config.get()->pinned_pool_bytes, 1_GiB);
  EXPECT_TRUE(config.is_set("budget"));
  EXPECT_FALSE(config.is_set("force_optimize"));

  config.set("budget", 4096);
  EXPECT_EQ(config.get("budget"), FieldValue(4096));
  for (const auto* name : {"budget", "max_cpu_offload_gb", "log_file",
                           "observability_port", "async_config"}) {
    config.set(name, FieldValue());
    EXPECT_TRUE(config.get(name).is_none()) << name;
  }
}

TEST(Config, ErrorsNameFieldRuleAndValue) {
  const double nan = std::nan("");
  const double inf = std::numeric_limits<double>::infinity();
  const std::tuple<std::string_view, FieldValue, std::string_view> cases[] = {
      {"target_gpu_utilization", 1.5,
       "target_gpu_utilization must be in (0, 1], got 1.5"},
      {"target_gpu_utilization", 0,
       "target_gpu_utilization must be in (0, 1], got 0"},
      {"target_gpu_utilization", nan,
       "target_gpu_utilization must be a number in (0, 1], got nan"},
      {"target_gpu_utilization", "0.5"s,
       "target_gpu_utilization must be a number in (0, 1], got '0.5'"},
      {"target_gpu_utilization", true,
       "target_gpu_utilization must be a number in (0, 1], got True"},
      {"target_gpu_utilization", FieldValue(),
       "target_gpu_utilization must be a number in (0, 1], got None"},
      {"warmup_steps", -1, "warmup_steps must be >= 0, got -1"},
      {"warmup_steps", true, "warmup_steps must be an integer >= 0, got True"},
      {"warmup_steps", 2.0, "warmup_steps must be an integer >= 0, got 2.0"},
      {"warmup_steps", 1e30, "warmup_steps must be an integer >= 0, got 1e+30"},
      {"warmup_steps", FieldValue(),
       "warmup_steps must be an integer >= 0, got None"},
      {"max_cpu_offload_gb", -0.5,
       "max_cpu_offload_gb must be None or >= 0, got -0.5"},
      {"max_cpu_offload_gb", inf,
       "max_cpu_offload_gb must be None or a number >= 0, got inf"},
      {"observability_port", 0,
       "observability_port must be None or in [1, 65535], got 0"},
      {"observability_port", 65536,
       "observability_port must be None or in [1, 65535], got 65536"},
      {"observability_port", "80"s,
       "observability_port must be None or an integer in [1, 65535], got "
       "'80'"},
      {"log_file", ""s,
       "log_file must be None or a text that is not empty, got ''"},
      {"log_file", 3,
       "log_file must be None or a text that is not empty, got 3"},
      {"enable_tiling", 1, "enable_tiling must be True or False, got 1"},
      {"enable_tiling", FieldValue(),
       "enable_tiling must be True or False, got None"},
      {"mode", "fast"s,
       "mode must be one of conservative, balanced, aggressive, got 'fast'"},
      {"mode", 1,
       "mode must be one of conservative, balanced, aggressive, got 1"},
      {"budget", 0, "budget must be None or > 0, got 0"},
      {"budget", -1, "budget must be None or > 0, got -1"},
      {"budget", "0 MiB"s, "budget must be None or > 0, got '0 MiB'"},
      {"budget", 1.5,
       "budget must be None or a size > 0, in bytes or like '6GiB', got 1.5"},
      {"budget", true,
       "budget must be None or a size > 0, in bytes or like '6GiB', got True"},
      {"async_config", 3,
       "async_config must be None or a record of fields, got 3"},
      {"async_config", FieldMap{{"prefetch_depth", 0}},
       "prefetch_depth must be >= 1, got 0"},
      {"async_config", FieldMap{{"depth", 1}},
       "unknown AsyncOffloadConfig field 'depth'"},
  };
  for (const auto& [name, value, message] : cases) {
    EXPECT_EQ(error_of(name, value), message);
  }
  const std::string message = error_of("budget", "6 Gigs"s);
  EXPECT_TRUE(message.starts_with("budget: cannot read '6 Gigs' as a size"))
      << message;
  EXPECT_EQ(error_of<AsyncOffloadConfig>("pinned_pool_bytes", 0),
            "pinned_pool_bytes must be > 0, got 0");
}

TEST(Config, UnknownFieldsGetTheNearestName) {
  Config config;
  const auto message = [&](std::string_view name) {
    try {
      config.set(name, 1);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return "accepted"s;
  };
  EXPECT_EQ(message("buget"),
            "unknown Config field 'buget'; did you mean 'budget'?");
  EXPECT_EQ(message("learning_rate"), "unknown Config field 'learning_rate'");
  EXPECT_THROW(config.get("buget"), ConfigError);
  EXPECT_THROW(config.is_set("buget"), ConfigError);
}

TEST(Config, MembersAssignAndAreCheckedOnUse) {
  Config config;
  config.budget = 6_GiB;
  config.log_file = "run.log";
  config.async_config = AsyncOffloadConfig();
  EXPECT_TRUE(config.is_set("budget"));
  EXPECT_NO_THROW(config.validate());
  config.warmup_steps = -1;
  EXPECT_THROW(config.validate(), ConfigError);
  EXPECT_THROW(config.resolve(), ConfigError);
}

TEST(Config, ModesDecideWhatTheUserLeftOpen) {
  Config config;
  config.mode = OptimizationMode::Conservative;
  EffectiveConfig effective = config.resolve();
  EXPECT_TRUE(effective.enable_checkpointing);
  EXPECT_FALSE(effective.enable_offloading);
  EXPECT_FALSE(effective.enable_tiling);
  EXPECT_FALSE(effective.use_mixed_precision);
  EXPECT_FALSE(effective.use_8bit_optimizer);
  EXPECT_EQ(effective.slowdown_limit, 0.05);
  EXPECT_FALSE(effective.stops_at_knee);

  config.mode = OptimizationMode::Balanced;
  effective = config.resolve();
  EXPECT_TRUE(effective.enable_checkpointing);
  EXPECT_TRUE(effective.enable_offloading);
  EXPECT_FALSE(effective.enable_tiling);
  EXPECT_FALSE(effective.use_mixed_precision);
  EXPECT_FALSE(effective.use_8bit_optimizer);
  EXPECT_EQ(effective.slowdown_limit, 0.25);
  EXPECT_TRUE(effective.stops_at_knee);

  config.mode = OptimizationMode::Aggressive;
  effective = config.resolve();
  EXPECT_TRUE(effective.enable_checkpointing);
  EXPECT_TRUE(effective.enable_offloading);
  EXPECT_TRUE(effective.enable_tiling);
  EXPECT_TRUE(effective.use_mixed_precision);
  EXPECT_TRUE(effective.use_8bit_optimizer);
  EXPECT_EQ(effective.slowdown_limit, std::nullopt);
  EXPECT_FALSE(effective.stops_at_knee);
}

TEST(Config, WhatTheUserSetOverridesTheMode) {
  Config config;
  config.mode = OptimizationMode::Aggressive;
  config.enable_tiling = false;  // the default, but said aloud
  config.use_8bit_optimizer = false;
  EXPECT_FALSE(config.resolve().enable_tiling);
  EXPECT_FALSE(config.resolve().use_8bit_optimizer);
  EXPECT_TRUE(config.resolve().use_mixed_precision);

  config = Config();
  config.mode = OptimizationMode::Conservative;
  config.enable_offloading = true;
  config.enable_checkpointing = false;
  EXPECT_TRUE(config.resolve().enable_offloading);
  EXPECT_FALSE(config.resolve().enable_checkpointing);
}

TEST(Config, ResolveCarriesLimits) {
  Config config;
  EXPECT_EQ(config.resolve().host_limit, std::nullopt);
  config.budget = 6_GiB;
  config.max_cpu_offload_gb = 1.5;
  EXPECT_EQ(config.resolve().budget, 6_GiB);
  EXPECT_EQ(config.resolve().host_limit, Bytes(1'500'000'000));
  config.max_cpu_offload_gb = 1e300;
  EXPECT_EQ(config.resolve().host_limit->count(),
            std::numeric_limits<std::int64_t>::max());
}

TEST(Config, EqualityIsAboutValuesAndWhatTheModeMayDecide) {
  Config a, b;
  EXPECT_EQ(a, b);
  a.warmup_steps = 2;  // the default: no difference to anyone
  EXPECT_EQ(a, b);
  a.warmup_steps = 3;
  EXPECT_NE(a, b);
  b.warmup_steps = 3;
  EXPECT_EQ(a, b);
  a.enable_tiling = false;  // a difference as soon as the mode changes
  EXPECT_NE(a, b);
  b.enable_tiling = false;
  a.async_config = AsyncOffloadConfig();
  EXPECT_NE(a, b);
  b.async_config = AsyncOffloadConfig();
  EXPECT_EQ(a, b);
}

TEST(Config, MapsRoundTrip) {
  Config config;
  EXPECT_TRUE(config.to_map().empty());
  EXPECT_EQ(config.to_map(true).size(), Config::fields().size());
  config.mode = OptimizationMode::Aggressive;
  config.enable_tiling = false;
  config.budget = 1_GiB;
  AsyncOffloadConfig async;
  async.prefetch_depth = 5;
  config.async_config = async;
  const Config copy = Config::from_map(config.to_map());
  EXPECT_EQ(copy, config);
  EXPECT_FALSE(copy.resolve().enable_tiling);
  EXPECT_FALSE(copy.is_set("warmup_steps"));
  EXPECT_EQ(copy.async_config.get()->prefetch_depth, 5);
  EXPECT_THROW(Config::from_map({{"nope", 1}}), ConfigError);
}

TEST(Config, CopiesShareNothing) {
  Config a;
  a.async_config = AsyncOffloadConfig();
  const Config b = a;
  a.async_config.get().share()->prefetch_depth = 9;
  EXPECT_EQ(a.async_config.get()->prefetch_depth, 9);
  EXPECT_EQ(b.async_config.get()->prefetch_depth, 2);
}

TEST(Config, ReprShowsModeAndWhatDiffers) {
  Config config;
  EXPECT_EQ(config.repr(), "Config(mode='balanced')");
  config.warmup_steps = 2;
  EXPECT_EQ(config.repr(), "Config(mode='balanced')");
  config.mode = OptimizationMode::Aggressive;
  config.budget = 6_GiB;
  config.enable_tiling = false;
  config.log_file = "it's.log";
  AsyncOffloadConfig async;
  async.pinned_pool_bytes = 1_GiB;
  config.async_config = async;
  EXPECT_EQ(config.repr(),
            "Config(mode='aggressive', budget='6GiB', enable_tiling=False, "
            "async_config=AsyncOffloadConfig(pinned_pool_bytes='1GiB'), "
            "log_file='it\\'s.log')");
  EXPECT_EQ(AsyncOffloadConfig().repr(), "AsyncOffloadConfig()");
}

TEST(Field, TextsForDocs) {
  EXPECT_EQ(Config::field("observability_port").rule(),
            "None or an integer in [1, 65535]");
  EXPECT_EQ(Config::field("observability_port").type(), "int or None");
  const FieldSpec& pool = AsyncOffloadConfig::field("pinned_pool_bytes");
  EXPECT_EQ(pool.text(pool.default_value), "'256MiB'");
  EXPECT_EQ(show(FieldMap{{"a", 2.0}, {"b", FieldValue()}}),
            "{'a': 2.0, 'b': None}");
}

}  // namespace
}  // namespace memscale
