#include "memscale/core/time/op_times.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <tuple>

namespace memscale {
namespace {

// Ops of one name that do as much as each other.
using Work = std::tuple<std::string_view, std::int64_t, Bytes>;

Work work_of(const Op& op) { return {op.name, op.flops, op.moved}; }

}  // namespace

void OpTimes::add_call(std::span<const TimedOp> ops) {
  std::map<std::size_t, Layer> call;
  for (const TimedOp& op : ops) {
    Layer& layer = call[op.layer];
    layer.names.push_back(op.name);
    layer.nanoseconds.push_back(std::max<std::int64_t>(op.nanoseconds, 1));
  }
  const std::lock_guard lock(mutex_);
  for (auto& [index, layer] : call) {
    const auto [known, is_new] = layers_.try_emplace(index, layer);
    if (is_new) continue;
    Layer& all = known->second;
    if (all.names != layer.names) {
      all.varies = true;
      continue;
    }
    std::ranges::transform(all.nanoseconds, layer.nanoseconds,
                           all.nanoseconds.begin(),
                           [](auto a, auto b) { return std::min(a, b); });
  }
}

// By op; 0: not known.
std::vector<std::int64_t> OpTimes::measured(
    const Trace& trace, std::span<const std::string> layers) const {
  std::map<std::string_view, std::vector<std::size_t>> ops_of;
  for (std::size_t i = 0; i < trace.ops.size(); ++i) {
    const Op& op = trace.ops[i];
    if (op.phase == Phase::Forward && op.layer.valid()) {
      ops_of[trace.at(op.layer).name].push_back(i);
    }
  }
  std::vector<std::int64_t> times(trace.ops.size());
  const std::lock_guard lock(mutex_);
  for (const auto& [index, layer] : layers_) {
    if (layer.varies || index >= layers.size()) continue;
    const auto found = ops_of.find(layers[index]);
    if (found == ops_of.end() ||
        !std::ranges::equal(layer.names, found->second, {}, {},
                            [&](std::size_t i) { return trace.ops[i].name; })) {
      continue;
    }
    for (std::size_t k = 0; k < found->second.size(); ++k) {
      times[found->second[k]] = layer.nanoseconds[k];
    }
  }
  return times;
}

Trace OpTimes::applied_to(const Trace& trace, const CostModel& cost,
                          std::span<const std::string> layers) const {
  const std::vector<std::int64_t> times = measured(trace, layers);
  std::map<Work, std::int64_t> shortest;
  double sum = 0;
  double sum_by_cost = 0;
  for (std::size_t i = 0; i < times.size(); ++i) {
    const Op& op = trace.ops[i];
    if (times[i] == 0 || op.view) continue;
    const auto [known, is_new] = shortest.try_emplace(work_of(op), times[i]);
    if (!is_new) known->second = std::min(known->second, times[i]);
    sum += static_cast<double>(times[i]);
    sum_by_cost += static_cast<double>(cost.nanoseconds(trace, op));
  }
  Trace timed = trace;
  if (shortest.empty()) return timed;
  for (std::size_t i = 0; i < times.size(); ++i) {
    Op& op = timed.ops[i];
    if (op.view) continue;
    const auto known = shortest.find(work_of(op));
    op.nanoseconds =
        known != shortest.end()
            ? known->second
            : std::llround(
                  std::max(static_cast<double>(cost.nanoseconds(trace, op)) *
                               (sum / sum_by_cost),
                           1.0));
  }
  return timed;
}

}  // namespace memscale
