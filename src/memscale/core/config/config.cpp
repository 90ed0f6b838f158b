#include "memscale/core/config/config.h"

#include <array>
#include <cmath>
#include <limits>

#include "memscale/core/config/field_set_impl.h"

namespace memscale {
namespace detail {
namespace {

constexpr Bounds kAny{};
constexpr Bounds kPositive{.low = 0, .low_open = true};
constexpr Bounds kNotNegative{.low = 0};
constexpr Bounds kFromOne{.low = 1};
constexpr Bounds kShare{.low = 0, .high = 1, .low_open = true};
constexpr Bounds kPort{.low = 1, .high = 65535};

template <auto Member>
auto field(std::string_view name, Bounds bounds, std::string_view doc) {
  return row_of<Member>(Member, name, bounds, false, doc);
}
template <auto Member>
auto field_by_mode(std::string_view name, std::string_view doc) {
  return row_of<Member>(Member, name, kAny, true, doc);
}

}  // namespace

template <>
const FieldTable<AsyncOffloadConfig>& field_table() {
  using C = AsyncOffloadConfig;
  static const FieldTable<C> table(
      "AsyncOffloadConfig",
      {
          field<&C::pinned_pool_bytes>(
              "pinned_pool_bytes", kPositive,
              "Pinned host memory that copies pass through; when it is full, "
              "saves stay on the device or are recomputed."),
          field<&C::prefetch_depth>(
              "prefetch_depth", kFromOne,
              "How many layers ahead of their use, in backward, saves start "
              "their way back to the device."),
          field<&C::debug>("debug", kAny,
                           "Wait for each copy before going on, to tell a "
                           "wrong overlap from "
                           "a wrong model; slow."),
      });
  return table;
}

template <>
const FieldTable<Config>& field_table() {
  using C = Config;
  static const FieldTable<C> table(
      "Config",
      {
          field<&C::mode>(
              "mode", kAny,
              "What may be spent to save memory; a field that is set overrides "
              "what the mode would choose."),
          field<&C::budget>(
              "budget", kPositive,
              "Hard limit of allocated device bytes; the cheapest plan under "
              "it is taken, and if there is none the error names the smallest "
              "budget that works."),
          field<&C::plan>(
              "plan", kAny,
              "A saved plan to follow instead of deciding: a Plan, its JSON, "
              "or the path of a file that holds it."),
          field<&C::target_gpu_utilization>(
              "target_gpu_utilization", kShare,
              "Share of the device's memory to plan for when there is no "
              "budget."),
          field_by_mode<&C::enable_checkpointing>(
              "enable_checkpointing",
              "Drop activations and recompute them in backward; exact."),
          field_by_mode<&C::enable_offloading>(
              "enable_offloading",
              "Move activations and optimizer state to host memory; exact."),
          field_by_mode<&C::enable_tiling>(
              "enable_tiling",
              "Compute attention, MLP and loss in tiles; exact up to the order "
              "of summation."),
          field_by_mode<&C::use_mixed_precision>(
              "use_mixed_precision",
              "Compute in bf16, or in fp16 with loss scaling where the device "
              "has no bf16; lossy."),
          field_by_mode<&C::use_8bit_optimizer>(
              "use_8bit_optimizer",
              "Hold the optimizer's state in 8 bits, block by block; lossy."),
          field<&C::max_cpu_offload_gb>(
              "max_cpu_offload_gb", kNotNegative,
              "Most host memory to use, in GB (10^9 bytes); None is what is "
              "available."),
          field<&C::force_optimize>(
              "force_optimize", kAny,
              "Plan even for a model so small that it would be left alone."),
          field<&C::use_static_profiling>(
              "use_static_profiling", kAny,
              "Trace the model with fake tensors, which allocates nothing."),
          field<&C::use_empirical_fallback>(
              "use_empirical_fallback", kAny,
              "Where the static trace fails, record a real step: one of its "
              "own "
              "for memscale.estimate, the loop's first one for wrap."),
          field<&C::warmup_steps>(
              "warmup_steps", kNotNegative,
              "How many steps after the first one are measured beside the "
              "prediction."),
          field<&C::async_offload>(
              "async_offload", kAny,
              "Copy to and from the host on a side stream, while the device "
              "computes."),
          field<&C::async_config>(
              "async_config", kAny,
              "An AsyncOffloadConfig or a dict of its fields; None is its "
              "defaults."),
          field<&C::auto_policy>(
              "auto_policy", kAny,
              "Let the learned policy propose mode and techniques before the "
              "rules decide."),
          field<&C::verify_correctness>(
              "verify_correctness", kAny,
              "Check one step against the plain model, and that every "
              "trainable parameter got its gradient."),
          field<&C::enable_logging>("enable_logging", kAny,
                                    "Write to the logger 'memscale'."),
          field<&C::log_file>("log_file", kAny,
                              "A file that gets the log as well."),
          field<&C::observability_port>(
              "observability_port", kPort,
              "Port on which metrics are served for Prometheus; None serves "
              "none."),
      });
  return table;
}

}  // namespace detail

template class FieldSet<AsyncOffloadConfig>;
template class FieldSet<Config>;

namespace {

struct ModeRow {
  OptimizationMode mode;
  bool checkpointing;
  bool offloading;
  bool tiling;
  bool mixed_precision;
  bool eight_bit;
  std::optional<double> slowdown_limit;
  bool stops_at_knee;
};

constexpr std::array kModes = {
    ModeRow{OptimizationMode::Conservative, true, false, false, false, false,
            0.05, false},
    ModeRow{OptimizationMode::Balanced, true, true, false, false, false, 0.25,
            true},
    ModeRow{OptimizationMode::Aggressive, true, true, true, true, true,
            std::nullopt, false},
};
static_assert(kModes.size() == EnumNames<OptimizationMode>::kTable.size());

Bytes decimal_gb(double gb) {
  const double bytes = std::floor(gb * 1e9);
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  return bytes >= static_cast<double>(kMax)
             ? Bytes(kMax)
             : Bytes(static_cast<std::int64_t>(bytes));
}

bool choose(const Setting<bool>& field, bool by_mode) {
  return field.is_set() ? field.get() : by_mode;
}

}  // namespace

EffectiveConfig Config::resolve() const {
  validate();
  const ModeRow& row = kModes[static_cast<std::size_t>(mode.get())];
  EffectiveConfig result{
      .mode = mode,
      .enable_checkpointing = choose(enable_checkpointing, row.checkpointing),
      .enable_offloading = choose(enable_offloading, row.offloading),
      .enable_tiling = choose(enable_tiling, row.tiling),
      .use_mixed_precision = choose(use_mixed_precision, row.mixed_precision),
      .use_8bit_optimizer = choose(use_8bit_optimizer, row.eight_bit),
      .slowdown_limit = row.slowdown_limit,
      .stops_at_knee = row.stops_at_knee,
      .budget = budget,
      .host_limit = std::nullopt,
  };
  if (const auto& gb = max_cpu_offload_gb.get()) {
    result.host_limit = decimal_gb(*gb);
  }
  return result;
}

}  // namespace memscale
