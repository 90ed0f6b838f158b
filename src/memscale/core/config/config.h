#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "memscale/base/bytes.h"
#include "memscale/base/enum_names.h"
#include "memscale/core/config/field_set.h"
#include "memscale/core/config/setting.h"

namespace memscale {

// What may be spent to save memory. See Config::resolve.
enum class OptimizationMode { Conservative, Balanced, Aggressive };

template <>
struct EnumNames<OptimizationMode> {
  static constexpr std::string_view kWhat = "optimization mode";
  static constexpr OptimizationMode kLast = OptimizationMode::Aggressive;
  static constexpr std::array kTable = {
      EnumName{OptimizationMode::Conservative, "conservative"},
      EnumName{OptimizationMode::Balanced, "balanced"},
      EnumName{OptimizationMode::Aggressive, "aggressive"},
  };
};

// How activations travel to the host and back while the device computes.
struct AsyncOffloadConfig final : FieldSet<AsyncOffloadConfig> {
  Setting<Bytes> pinned_pool_bytes{256_MiB};
  Setting<std::int64_t> prefetch_depth{2};
  Setting<bool> debug{false};
};

// What a mode comes to once the fields that the user set have had their say.
struct EffectiveConfig final {
  OptimizationMode mode;
  bool enable_checkpointing;
  bool enable_offloading;
  bool enable_tiling;
  bool use_mixed_precision;
  bool use_8bit_optimizer;
  // How much longer than the plain step a step may take, as a fraction of it
  // (0.25 = 25 %). None: no limit.
  std::optional<double> slowdown_limit;
  // Whether less is spent where a further percent of time takes less than a
  // percent off the peak and the step fits the device: see plan/knee.h.
  bool stops_at_knee;
  // Hard limit of allocated bytes on the device. None: device memory times
  // target_gpu_utilization.
  std::optional<Bytes> budget;
  // Most host memory that may be taken. None: what is available.
  std::optional<Bytes> host_limit;
};

// All that a user can say. The members' sentences are in the table in
// config.cpp, from which docs/config.md is made.
//   Config config;
//   config.mode = OptimizationMode::Aggressive;
//   config.set("budget", "6GiB");
//   EffectiveConfig effective = config.resolve();
struct Config final : FieldSet<Config> {
  Setting<OptimizationMode> mode{OptimizationMode::Balanced};
  Setting<std::optional<Bytes>> budget;
  Setting<std::optional<std::string>> plan;
  Setting<double> target_gpu_utilization{0.85};
  Setting<bool> enable_checkpointing{true};
  Setting<bool> enable_offloading{true};
  Setting<bool> enable_tiling{false};
  Setting<bool> use_mixed_precision{false};
  Setting<bool> use_8bit_optimizer{false};
  Setting<std::optional<double>> max_cpu_offload_gb;
  Setting<bool> force_optimize{false};
  Setting<bool> use_static_profiling{true};
  Setting<bool> use_empirical_fallback{true};
  Setting<std::int64_t> warmup_steps{2};
  Setting<bool> async_offload{false};
  Setting<Box<AsyncOffloadConfig>> async_config;
  Setting<bool> auto_policy{false};
  Setting<bool> verify_correctness{false};
  Setting<bool> enable_logging{true};
  Setting<std::optional<std::string>> log_file;
  Setting<std::optional<std::int64_t>> observability_port;

  // Validates, then applies the mode to the fields that are not set. The
  // config itself stays as the user wrote it. Throws ConfigError.
  EffectiveConfig resolve() const;
};

}  // namespace memscale
