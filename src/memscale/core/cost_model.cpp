#include "memscale/core/cost_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "memscale/core/op_cost.h"

namespace memscale {
namespace {

// Real kernels reach about this much of a data sheet's peaks.
constexpr double kComputeShare = 0.5;
constexpr double kBandwidthShare = 0.8;

// Of a card of which nothing is known.
constexpr double kSomeFlops = 15e12;
constexpr double kSomeHalfFlops = 60e12;
constexpr double kSomeBandwidth = 500e9;

// Picoseconds an element on one core, where that is more than the bytes take.
struct Slow {
  std::string_view name;  // without "aten::" and overload
  std::int64_t picoseconds;
};
constexpr std::array kSlow = {
    Slow{"tanh", 2600},
    Slow{"erf", 1400},
    Slow{"exp", 900},
    Slow{"log", 900},
    Slow{"sin", 1300},
    Slow{"cos", 1300},
    Slow{"gelu", 600},
    Slow{"mish", 3900},
    Slow{"softplus", 1500},
    Slow{"_softmax", 700},
    Slow{"pow", 1500},
    Slow{"bernoulli_", 6000},
    Slow{"max_pool2d_with_indices", 34000},
    Slow{"avg_pool2d", 7300},
    Slow{"native_batch_norm", 2000},
    Slow{"native_layer_norm", 1000},
    Slow{"uniform_", 5000},
    Slow{"normal_", 9000},
    Slow{"native_dropout", 7000},
};

std::string_view base_name(std::string_view name) {
  const std::size_t colons = name.rfind("::");
  if (colons != name.npos) name.remove_prefix(colons + 2);
  return name.substr(0, name.find('.'));
}

bool is_half(const Trace& trace, const Op& op) {
  return std::ranges::any_of(op.inputs, [&](ValueId id) {
    const std::string& dtype = trace.at(id).dtype;
    return dtype == "bfloat16" || dtype == "float16";
  });
}

// Those that torch gives to cuBLAS, and to cuDNN.
bool is_matmul(std::string_view name) {
  constexpr std::array<std::string_view, 8> kNames = {
      "mm",     "bmm",     "addmm",    "addmm_",
      "linear", "baddbmm", "baddbmm_", "_addmm_activation"};
  return std::ranges::find(kNames, name) != kNames.end();
}

bool is_of_cudnn(std::string_view name) {
  return name.find("convolution") != name.npos ||
         name.starts_with("_cudnn_rnn") || name == "lstm" || name == "gru";
}

std::int64_t elements_of_largest(const Trace& trace, const Op& op) {
  std::int64_t most = 0;
  for (const ValueId id : op.outputs) {
    most = std::max(most, trace.at(id).numel());
  }
  return most;
}

std::int64_t rounded(double nanoseconds) {
  // Longer than any op; keeps sums of many within int64.
  constexpr double kMost = 1e15;
  return std::llround(std::min(nanoseconds, kMost));
}

}  // namespace

CostModel CostModel::of_cpu() {
  CostModel model;
  model.flops_ = model.half_flops_ = 80e9;
  model.matmul_flops_ = model.convolution_flops_ = model.flops_;
  model.bandwidth_ = 12e9;
  model.call_ = 1'500;
  model.is_cpu_ = true;
  return model;
}

CostModel CostModel::of(const DeviceSpec& device, const Tf32& tf32) {
  const auto rate = [](const Figure<double>& figure, double otherwise) {
    return figure.known() ? figure.value : otherwise;
  };
  CostModel model;
  model.flops_ = kComputeShare * rate(device.fp32_flops, kSomeFlops);
  const double by_tf32 =
      std::max(model.flops_, kComputeShare * rate(device.tf32_flops, 0));
  model.matmul_flops_ = tf32.matmuls ? by_tf32 : model.flops_;
  model.convolution_flops_ = tf32.convolutions ? by_tf32 : model.flops_;
  model.half_flops_ = kComputeShare * rate(device.half_flops, kSomeHalfFlops);
  model.bandwidth_ =
      kBandwidthShare * rate(device.memory_bandwidth, kSomeBandwidth);
  model.call_ = 4'000;
  return model;
}

double CostModel::rate(const Trace& trace, const Op& op) const {
  if (is_half(trace, op)) return half_flops_;
  if (matmul_flops_ == flops_ && convolution_flops_ == flops_) return flops_;
  const bool is_single = std::ranges::any_of(
      op.inputs, [&](ValueId id) { return trace.at(id).dtype == "float32"; });
  const std::string_view name = base_name(op.name);
  if (is_single && is_matmul(name)) return matmul_flops_;
  if (is_single && is_of_cudnn(name)) return convolution_flops_;
  return flops_;
}

std::int64_t CostModel::nanoseconds(const Trace& trace, const Op& op) const {
  if (op.view) return 0;
  if (op.nanoseconds > 0) return op.nanoseconds;
  const double compute = 1e9 * static_cast<double>(op.flops) / rate(trace, op);
  const double memory =
      1e9 * static_cast<double>(op.moved.count()) / bandwidth_;
  std::int64_t least = 0;
  if (is_cpu_) {
    const std::string_view name = base_name(op.name);
    const auto found = std::ranges::find(kSlow, name, &Slow::name);
    if (found != kSlow.end()) {
      const std::int64_t elements = elements_of_largest(trace, op);
      least = rounded(static_cast<double>(elements) *
                      static_cast<double>(found->picoseconds) / 1000);
    }
  }
  return std::max(rounded(std::max(compute, memory)), least) + call_;
}

std::int64_t CostModel::nanoseconds(const ElementPass& pass) const {
  const auto count = static_cast<double>(pass.elements);
  const auto call = static_cast<double>(call_);
  if (is_cpu_) {
    return rounded(count * pass.cpu_picoseconds / 1000 + pass.cpu_calls * call);
  }
  return rounded(1e9 * count * pass.card_bytes / bandwidth_ +
                 pass.card_calls * call);
}

std::int64_t CostModel::nanoseconds(const Trace& trace) const {
  std::int64_t sum = 0;
  for (const Op& op : trace.ops) sum += nanoseconds(trace, op);
  return sum;
}

}  // namespace memscale
