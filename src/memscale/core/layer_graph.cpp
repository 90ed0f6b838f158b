#include "memscale/core/layer_graph.h"

#include <algorithm>
#include <array>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "memscale/base/error.h"
#include "memscale/core/ops/op_cost.h"
#include "memscale/core/replay_rules.h"
#include "memscale/core/wide.h"

namespace memscale {
namespace {

constexpr auto kMaxSum = static_cast<std::int64_t>(power_of_two(50));

constexpr std::array kPackedTypes = {Dtype::Float16, Dtype::BFloat16,
                                     Dtype::Float32, Dtype::Float64};

// Whether each of the storage's elements is the value's, once.
bool covers(const Value& value, Bytes storage) {
  if (value.offset != 0 || value.strides.size() != value.sizes.size()) {
    return false;
  }
  std::int64_t last = 0;
  for (std::size_t i = 0; i < value.sizes.size(); ++i) {
    last += (value.sizes[i] - 1) * value.strides[i];
  }
  return last + 1 == value.numel() &&
         Bytes(value.numel() * itemsize_of(value.dtype)) == storage;
}

// There before the step and after it, whoever reads it.
bool is_leaf(const Storage& storage) {
  return storage.category != Category::Activation &&
         storage.category != Category::Transient;
}

class Builder {
 public:
  Builder(const Trace& trace, std::span<const OpId> run,
          const GraphRules& rules)
      : trace_(trace), run_(run.begin(), run.end()), rules_(rules) {
    for (const OpId op : run) trace_.at(op);  // throws if it points nowhere
    const auto after_forward = std::ranges::find_if(
        trace_.ops, [](const Op& op) { return op.phase != Phase::Forward; });
    num_forward_ = static_cast<std::size_t>(after_forward - trace_.ops.begin());
    held_.insert(rules.held_elsewhere.begin(), rules.held_elsewhere.end());
    if (!run.empty()) find_held_by_saves(run.front());
  }

  void add_op(OpId id, std::int64_t nanoseconds);
  void add_saves();
  LayerGraph finish();

 private:
  // What an op does to a storage that it writes.
  struct Write {
    StorageId storage;
    ValueId result;     // the new version
    bool reads = true;  // false: all of it is written, whatever was there
  };

  static std::uint64_t key(const Value& value) {
    return (std::uint64_t{value.storage.index()} << 32U) | value.version;
  }

  std::size_t state_of(ValueId id);
  std::vector<Write> writes_of(const Op& op, const ReplayRules& known) const;
  bool can_replay(const Op& op, const ReplayRules& known,
                  const std::vector<Write>& writes) const;
  std::size_t add_state(const Value& value);
  void pack(std::size_t op, const Op& traced, const ReplayRules& known,
            const std::vector<Write>& writes);
  void find_held_by_saves(OpId first);
  bool is_held_anyway(std::size_t state) const;

  const Trace& trace_;
  const std::unordered_set<OpId> run_;
  const GraphRules& rules_;
  std::size_t num_forward_ = 0;  // ops before the first of backward
  std::unordered_set<StorageId> held_;
  std::unordered_map<std::uint64_t, std::size_t> states_;
  std::vector<StorageId> storage_;    // by state
  std::vector<bool> is_overwritten_;  // by state: it is not the last of its
                                      // storage
  LayerGraph graph_;
};

// A save of an earlier layer that did not make the storage itself holds it
// until after this layer's backward. (A later layer's lets go before.)
void Builder::find_held_by_saves(OpId first) {
  for (const Save& save : trace_.saves) {
    if (!save.op.valid() || save.op >= first || run_.contains(save.op)) {
      continue;
    }
    const StorageId id = trace_.at(save.value).storage;
    const LayerId layer = trace_.at(save.op).layer;
    if (!id.valid() || !layer.valid() || layer == trace_.at(id).layer) continue;
    held_.insert(id);
  }
}

std::size_t Builder::add_state(const Value& value) {
  const std::size_t id = graph_.states.size();
  states_[key(value)] = id;
  const Storage& storage = trace_.at(value.storage);
  graph_.states.push_back({.bytes = round_up(storage.bytes, rules_.granularity),
                           .cost = {},
                           .maker = {},
                           .place = {}});
  storage_.push_back(value.storage);
  is_overwritten_.push_back(false);
  return id;
}

std::size_t Builder::state_of(ValueId id) {
  const Value& value = trace_.at(id);
  const auto found = states_.find(key(value));
  return found == states_.end() ? add_state(value) : found->second;
}

std::vector<Builder::Write> Builder::writes_of(const Op& op,
                                               const ReplayRules& known) const {
  std::vector<Write> writes;
  if (!op.mutates) return writes;
  for (const ValueId output : op.outputs) {
    const Value& result = trace_.at(output);
    for (const ValueId input : op.inputs) {
      const Value& old = trace_.at(input);
      if (!result.storage.valid() || old.storage != result.storage ||
          old.version >= result.version) {
        continue;
      }
      const Bytes bytes = trace_.at(old.storage).bytes;
      writes.push_back(
          {old.storage, output, !(known.overwrites && covers(old, bytes))});
      break;
    }
  }
  return writes;
}

// As Tape::why_not and Tape::end_op see it.
bool Builder::can_replay(const Op& op, const ReplayRules& known,
                         const std::vector<Write>& writes) const {
  if (op.in_function || op.may_write || !known.never.empty() ||
      known.is_factory ||
      why_not_on({.on_cuda = rules_.on_cuda, .benchmarks = rules_.benchmarks},
                 known, is_transposed_convolution(trace_, op)) != nullptr) {
    return false;
  }
  const bool all_known = std::ranges::all_of(op.inputs, [&](ValueId input) {
    return trace_.at(input).storage.valid();
  });
  // A keep set has one name for all that an op writes; and what is written
  // without being returned is not known.
  const bool hidden = op.mutates && writes.empty() && !known.updates_statistics;
  if (!all_known || hidden || writes.size() > 1) return false;
  // An old state that nobody can make again is gone.
  return std::ranges::all_of(writes, [&](const Write& write) {
    if (!write.reads) return true;
    return std::ranges::any_of(op.inputs, [&](ValueId input) {
      const Value& old = trace_.at(input);
      if (old.storage != write.storage) return false;
      const auto found = states_.find(key(old));
      return found != states_.end() && graph_.states[found->second].maker;
    });
  });
}

void Builder::add_op(OpId id, std::int64_t nanoseconds) {
  const Op& op = trace_.at(id);
  const ReplayRules known = find_replay_rules(op.name);
  const std::size_t index = graph_.ops.size();
  LineageOp& lineage = graph_.ops.emplace_back();
  lineage.name = op.name;
  lineage.nanoseconds = nanoseconds;
  const std::vector<Write> writes = writes_of(op, known);
  const bool replays = can_replay(op, known, writes);
  for (const ValueId input : op.inputs) {
    const StorageId storage = trace_.at(input).storage;
    if (!storage.valid()) continue;
    const std::size_t state = state_of(input);
    const auto write = std::ranges::find(writes, storage, &Write::storage);
    if (write != writes.end()) {
      is_overwritten_[state] = true;
      if (!write->reads) continue;
      graph_.states[state].can_keep = false;
    }
    auto& reads = graph_.ops[index].reads;
    if (std::ranges::find(reads, state) == reads.end()) reads.push_back(state);
  }
  for (std::size_t k = 0; k < op.outputs.size(); ++k) {
    const Value& value = trace_.at(op.outputs[k]);
    // Known ones are views.
    if (!value.storage.valid() || states_.contains(key(value))) continue;
    const bool is_written = std::ranges::find(writes, value.storage,
                                              &Write::storage) != writes.end();
    const std::size_t state = add_state(value);
    graph_.states[state].place.emplace(index, is_written ? 0 : k);
    const bool is_small = trace_.at(value.storage).bytes < rules_.min_bytes;
    if (replays && !is_small) graph_.states[state].maker = index;
  }
  if (replays && rules_.on_cpu) pack(index, op, known, writes);
}

// See runtime/tape_packed.cpp.
void Builder::pack(std::size_t op, const Op& traced, const ReplayRules& known,
                   const std::vector<Write>& writes) {
  if (known.draws_bits && writes.size() == 1 && !writes[0].reads &&
      traced.outputs.size() == 1) {
    const Value& drawn = trace_.at(writes[0].result);
    if (std::ranges::find(kPackedTypes, drawn.dtype) == kPackedTypes.end()) {
      return;
    }
    // A bit for each element, and half a nanosecond to read it.
    graph_.ops[op].packed =
        round_up(Bytes((drawn.numel() + 7) / 8), rules_.granularity);
    graph_.ops[op].nanoseconds =
        std::min(graph_.ops[op].nanoseconds, drawn.numel() / 2);
  }
  if (known.indices && *known.indices < traced.outputs.size() &&
      !traced.inputs.empty()) {
    const Value& indices = trace_.at(traced.outputs[*known.indices]);
    const Storage& indexed = trace_.at(trace_.at(traced.inputs[0]).storage);
    const auto found = states_.find(key(indices));
    if (found == states_.end() ||
        indexed.bytes > Bytes(std::numeric_limits<std::int32_t>::max())) {
      return;
    }
    // Held in half of their bytes, if the op's other result is kept: then they
    // are not made again either.
    LineageState& state = graph_.states[found->second];
    if (!state.maker) return;
    state.cost = state.bytes / 2;
    state.place.emplace(op, *known.indices == 0 ? 1 : 0);
  }
}

void Builder::add_saves() {
  for (const Save& save : trace_.saves) {
    if (!save.op.valid() || !run_.contains(save.op) ||
        !trace_.at(save.value).storage.valid()) {
      continue;
    }
    // Let go before backward: nobody will ask for it.
    if (save.released.valid() && save.released.index() < num_forward_) continue;
    const std::size_t state = state_of(save.value);
    graph_.states[state].is_saved = true;
    // Autograd itself holds it.
    if (save.by_function) held_.insert(storage_[state]);
  }
}

// By the caller until after backward, by another layer, or for ever.
bool Builder::is_held_anyway(std::size_t state) const {
  const StorageId id = storage_[state];
  const Storage& storage = trace_.at(id);
  if (storage.place == Place::Host) return true;
  if (is_overwritten_[state]) return false;  // a copy of it
  if (is_leaf(storage) || held_.contains(id)) return true;
  if (num_forward_ == trace_.ops.size()) return false;
  return !storage.freed.valid() ||
         trace_.at(storage.freed).phase == Phase::Optimizer;
}

LayerGraph Builder::finish() {
  for (std::size_t i = 0; i < graph_.states.size(); ++i) {
    LineageState& state = graph_.states[i];
    if (is_held_anyway(i)) {
      state.cost = Bytes();
    } else if (state.cost == Bytes()) {
      state.cost = state.bytes;
    }
    if (state.is_saved || !state.maker) state.can_keep = true;
  }
  graph_.check();
  return std::move(graph_);
}

void check_amount(std::string_view array, std::size_t index,
                  std::string_view field, std::int64_t amount,
                  std::int64_t& sum) {
  if (amount < 0 || amount > kMaxSum) {
    throw PlanError(str(array, "[", index, "].", field,
                        " must be from 0 to 2^50, got ", amount));
  }
  sum += amount;
  if (sum > kMaxSum) {
    throw PlanError(
        str("the sum of ", array, "[].", field, " must be at most 2^50"));
  }
}

}  // namespace

void LayerGraph::check() const {
  std::int64_t bytes = 0;
  std::int64_t cost = 0;
  std::int64_t nanoseconds = 0;
  for (std::size_t v = 0; v < states.size(); ++v) {
    check_amount("states", v, "bytes", states[v].bytes.count(), bytes);
    check_amount("states", v, "cost", states[v].cost.count(), cost);
    const auto check_op = [&](std::size_t op) {
      if (op < ops.size()) return;
      throw PlanError(str("states[", v, "] must be made by one of ", ops.size(),
                          " ops, got ", op));
    };
    if (const auto maker = states[v].maker) check_op(*maker);
    if (const auto place = states[v].place) check_op(place->first);
  }
  for (std::size_t i = 0; i < ops.size(); ++i) {
    check_amount("ops", i, "packed", ops[i].packed.count(), cost);
    check_amount("ops", i, "nanoseconds", ops[i].nanoseconds, nanoseconds);
    for (const std::size_t read : ops[i].reads) {
      // Optionals compare as values, and an empty one is the least.
      if (read >= states.size() || states[read].maker >= std::optional(i)) {
        throw PlanError(str("ops[", i, "] must read states made before it, ",
                            "got ", read));
      }
    }
  }
}

LayerGraph layer_graph(const Trace& trace, std::span<const OpId> run,
                       std::span<const std::int64_t> nanoseconds,
                       const GraphRules& rules) {
  if (run.size() != nanoseconds.size()) {
    throw PlanError(str("nanoseconds must be given for each of ", run.size(),
                        " ops, got ", nanoseconds.size()));
  }
  Builder builder(trace, run, rules);
  for (std::size_t i = 0; i < run.size(); ++i) {
    builder.add_op(run[i], nanoseconds[i]);
  }
  builder.add_saves();
  return builder.finish();
}

}  // namespace memscale
