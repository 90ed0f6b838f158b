#include "memscale/core/time/cost_model.h"

#include <algorithm>
#include <cmath>

#include "memscale/core/ops/op_table.h"

namespace memscale {
namespace {

// Real kernels reach about this much of a data sheet's peaks.
constexpr double kComputeShare = 0.5;
constexpr double kBandwidthShare = 0.8;

// Of a card of which nothing is known.
constexpr double kSomeFlops = 15e12;
constexpr double kSomeHalfFlops = 60e12;
constexpr double kSomeBandwidth = 500e9;

bool reads_half(const Trace& trace, const Op& op) {
  return std::ranges::any_of(
      op.inputs, [&](ValueId id) { return is_half(trace.at(id).dtype); });
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
  if (reads_half(trace, op)) return half_flops_;
  if (matmul_flops_ == flops_ && convolution_flops_ == flops_) return flops_;
  const bool is_single = std::ranges::any_of(op.inputs, [&](ValueId id) {
    return trace.at(id).dtype == Dtype::Float32;
  });
  if (!is_single) return flops_;
  switch (find_op_row(op.name).library) {
    case Library::Blas:
      return matmul_flops_;
    case Library::Convolution:
    case Library::Recurrence:
      return convolution_flops_;
    case Library::Other:
      break;
  }
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
    const std::int64_t picoseconds = find_op_row(op.name).cpu_picoseconds;
    if (picoseconds > 0) {
      const std::int64_t elements = elements_of_largest(trace, op);
      least = rounded(static_cast<double>(elements) *
                      static_cast<double>(picoseconds) / 1000);
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
