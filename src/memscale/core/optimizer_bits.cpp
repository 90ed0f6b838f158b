#include "memscale/core/optimizer_bits.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace memscale {
namespace {

constexpr std::int64_t kFloat = 4;  // bytes

// Of temporaries for each element of a piece (see
// runtime/optimizer_backend.h).
constexpr std::int64_t kBytesWith8Bits = 24;
constexpr std::int64_t kBytesWith32Bits = 16;
constexpr std::int64_t kBytesOfHalves = 4;  // more, for parameters of 16 bits

// 0: not a type that can be held in 8 bits; it stays as it is.
std::int64_t width_of(Dtype dtype) {
  if (dtype == Dtype::Float32) return kFloat;
  return is_half(dtype) ? 2 : 0;
}

Bytes workspace_of(std::int64_t largest, std::int64_t width, int bits,
                   bool on_cpu) {
  if (on_cpu) return Bytes();
  const std::int64_t each = (bits == 8 ? kBytesWith8Bits : kBytesWith32Bits) +
                            (width < kFloat ? kBytesOfHalves : 0);
  return Bytes(std::min(largest, kStatePiece) * each);
}

// What a state's elements take now, by its bytes: a state that stands for the
// others of its kind has values, the others have none. Of several that it may
// be, the one that leaves most bytes.
std::map<Bytes, std::int64_t> widths_of_states(const Trace& trace) {
  std::map<Bytes, std::int64_t> widths;
  for (const Value& value : trace.values) {
    if (!value.storage.valid()) continue;
    const Storage& storage = trace.at(value.storage);
    if (storage.category == Category::OptimizerState) {
      const std::int64_t width = width_of(value.dtype);
      const auto [known, is_new] = widths.emplace(storage.bytes, width);
      if (!is_new) known->second = std::min(known->second, width);
    }
  }
  return widths;
}

// The trace up to its optimizer's step, and the states that this made.
Trace without_optimizer_ops(const Trace& trace) {
  const auto first_op =
      std::ranges::find(trace.ops, Phase::Optimizer, &Op::phase);
  const OpId end(static_cast<std::size_t>(first_op - trace.ops.begin()));
  const auto is_gone = [&](const Storage& storage) {
    return storage.born.valid() && storage.born >= end;
  };
  Trace result = trace;
  result.ops.assign(trace.ops.begin(), first_op);
  result.storages.clear();
  result.values.clear();
  std::vector<StorageId> storage_now(trace.storages.size());
  for (std::size_t i = 0; i < trace.storages.size(); ++i) {
    if (is_gone(trace.storages[i])) continue;
    storage_now[i] = StorageId(result.storages.size());
    Storage& storage = result.storages.emplace_back(trace.storages[i]);
    for (OpId* last : {&storage.freed, &storage.let_go, &storage.plain_freed}) {
      if (!last->valid()) continue;
      // The one op that follows; but what goes with the optimizer's first one,
      // which only makes a counter, is gone before it.
      *last = *last == end && end.index() > 0 ? OpId(end.index() - 1)
                                              : std::min(*last, end);
    }
  }
  std::vector<ValueId> value_now(trace.values.size());
  for (std::size_t i = 0; i < trace.values.size(); ++i) {
    const Value& value = trace.values[i];
    if (value.storage.valid() && is_gone(trace.at(value.storage))) continue;
    value_now[i] = ValueId(result.values.size());
    Value& now = result.values.emplace_back(value);
    if (value.storage.valid()) {
      now.storage = storage_now[value.storage.index()];
    }
  }
  const auto renumber = [&](std::vector<ValueId>& ids) {
    for (ValueId& id : ids) id = value_now[id.index()];
  };
  for (Op& op : result.ops) {
    renumber(op.inputs);
    renumber(op.outputs);
  }
  for (Save& save : result.saves) {
    save.value = value_now[save.value.index()];
    if (save.released.valid()) save.released = std::min(save.released, end);
  }
  return result;
}

}  // namespace

Trace with_8bit_state(const Trace& trace, bool on_cpu) {
  const std::map<Bytes, std::int64_t> widths = widths_of_states(trace);
  Trace result = without_optimizer_ops(trace);
  Bytes moved;
  std::int64_t most = 0;  // elements of the largest state
  std::int64_t narrowest = kFloat;
  std::vector<Storage> scales;
  for (Storage& storage : result.storages) {
    if (storage.category != Category::OptimizerState) continue;
    const auto known = widths.find(storage.bytes);
    const std::int64_t width = known == widths.end() ? kFloat : known->second;
    if (width == 0) continue;
    const std::int64_t elements = storage.bytes.count() / width;
    if (elements < kMin8BitElements) {
      storage.bytes = Bytes(elements * kFloat);
    } else {
      storage.bytes = Bytes(elements);
      scales.push_back(storage);
      scales.back().bytes =
          Bytes((elements + kStateBlock - 1) / kStateBlock * kFloat);
    }
    most = std::max(most, elements);
    narrowest = std::min(narrowest, width);
    // Read and written; of the parameter and its gradient, half each.
    moved +=
        (storage.bytes * 2 + Bytes(elements * 3 * width / 2)) * storage.count;
  }
  result.storages.insert(result.storages.end(), scales.begin(), scales.end());
  Op& step = result.ops.emplace_back();
  step.name = "memscale::adam8_";
  step.phase = Phase::Optimizer;
  step.moved = moved;
  step.workspace_known = true;
  step.workspace = workspace_of(most, narrowest, 8, on_cpu);
  return result;
}

std::optional<Bytes> optimizer_op_workspace(const Trace& trace, const Op& op,
                                            bool on_cpu) {
  if (!op.name.starts_with("memscale::adam")) return std::nullopt;
  std::int64_t largest = 0;
  std::int64_t width = kFloat;
  for (const ValueId id : op.inputs) {
    const Value& value = trace.at(id);
    largest = std::max(largest, value.numel());
    if (width_of(value.dtype) == 2) width = 2;
  }
  const int bits = op.name.starts_with("memscale::adam8") ? 8 : 32;
  return workspace_of(largest, width, bits, on_cpu);
}

std::int64_t StepTimes::extra() const {
  return std::max<std::int64_t>(with_8bit - plain, 0);
}

std::int64_t StepTimes::times() const {
  const std::int64_t base = std::max<std::int64_t>(plain, 1);
  return std::max<std::int64_t>((with_8bit + base / 2) / base, 1);
}

StepTimes optimizer_step_times(const Trace& plain, const CostModel& cost,
                               bool in_pieces) {
  const std::map<Bytes, std::int64_t> widths = widths_of_states(plain);
  std::vector<bool> is_traced(plain.storages.size());
  for (const Value& value : plain.values) {
    if (value.storage.valid()) is_traced[value.storage.index()] = true;
  }
  // Of both moments.
  std::int64_t elements = 0;
  std::int64_t pieces = 0;
  std::int64_t traced = 0;
  for (std::size_t i = 0; i < plain.storages.size(); ++i) {
    const Storage& storage = plain.storages[i];
    if (storage.category != Category::OptimizerState) continue;
    const auto known = widths.find(storage.bytes);
    const std::int64_t width = known == widths.end() ? kFloat : known->second;
    if (width == 0) continue;
    const std::int64_t each = storage.bytes.count() / width;
    if (each <= 1) continue;  // counters of steps
    elements += each * storage.count;
    pieces += (each + kStatePiece - 1) / kStatePiece * storage.count;
    if (is_traced[i]) traced += each;
  }
  StepTimes times;
  for (const Op& op : plain.ops) {
    if (op.phase == Phase::Optimizer)
      times.plain += cost.nanoseconds(plain, op);
  }
  // One parameter of each kind was traced, for all of its kind.
  if (traced > 0) {
    times.plain = static_cast<std::int64_t>(static_cast<double>(times.plain) *
                                            static_cast<double>(elements) /
                                            static_cast<double>(traced));
  }
  times.with_8bit = in_pieces
                        ? cost.of_8bit_step_in_pieces(elements / 2, pieces / 2)
                        : cost.of_8bit_step(elements / 2);
  return times;
}

Bytes optimizer_state_bytes(const Trace& trace) {
  Bytes sum;
  for (const Storage& storage : trace.storages) {
    if (storage.category == Category::OptimizerState &&
        storage.place == Place::Device) {
      sum += storage.bytes * storage.count;
    }
  }
  return sum;
}

}  // namespace memscale
