#include "memscale/core/replayed_step.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/predicted_tape.h"
#include "memscale/core/storage_holders.h"

namespace memscale {
namespace {

using OpIndices = std::vector<std::vector<std::size_t>>;  // by op

// Whether an ancestor's name: "h" of "h.0", and the model's, "", of all.
bool is_inside(std::string_view name, std::string_view ancestor) {
  return ancestor.empty() ||
         (name.size() > ancestor.size() && name.starts_with(ancestor) &&
          name[ancestor.size()] == '.');
}

bool is_floating(std::string_view dtype) {
  return dtype.find("float") != dtype.npos || dtype.starts_with("complex");
}

// A training step under replay, op by op: runtime/replay.h.
class Prediction final {
 public:
  Prediction(const Trace& plain, std::span<const TapeRules> layers,
             bool on_cpu);
  ReplayedStep run() &&;

 private:
  struct Claim {
    PredictedTape* tape;
    PredictedTape::StateId state;
  };
  // Backward reads this storage in place of that one, for a save.
  struct Stand {
    std::size_t save;
    StorageId of;
    StorageId storage;
  };

  void find_rules();
  void find_ends();
  void find_asks();
  OpId let_go_of(const Storage& storage, OpId last_touched) const;
  bool is_forward(std::size_t op) const {
    return plain_.ops[op].phase == Phase::Forward;
  }

  void change_layer(LayerId layer);
  PredictedTape* open_tape();
  void close_tape();
  void leave();
  void forward(std::size_t op);
  void before_writes(const Op& op);
  void add_history(const Op& op);
  void save(std::size_t save, bool decides);
  void ask(std::size_t op);
  void append(std::size_t op);
  void end(std::size_t op);
  void let_go(std::size_t op, bool returned);

  void count_replayed(std::size_t first);
  void finish_storages();
  void finish_saves();
  void sum_held(const Trace& trace, OpId first_backward,
                Bytes LayerReplay::* held);

  const Trace& plain_;
  const std::span<const TapeRules> layers_;
  ReplayedStep step_;
  Trace& trace_;
  StorageHolders holders_;
  PredictedCall call_;
  std::unordered_map<std::string_view, ReplayRules> rules_;
  std::vector<OpId> moved_;    // by op of the plain step: the same op
  OpIndices saves_at_;         // that an op makes
  OpIndices released_at_;      // saves, after the op
  OpIndices let_go_at_;        // storages, after the op
  OpIndices asks_at_;          // saves, before the op
  std::vector<bool> has_ops_;  // by layer: of its own, in forward
  std::vector<StorageId> returned_;
  LayerId layer_;
  PredictedTape* tape_ = nullptr;
  std::vector<std::unique_ptr<PredictedTape>> tapes_;
  std::unordered_map<StorageId, std::vector<Claim>> claims_;
  std::vector<Stand> stands_;
};

Trace start_of(const Trace& plain) {
  Trace trace;
  trace.layers = plain.layers;
  trace.values = plain.values;
  trace.storages = plain.storages;
  trace.notes = plain.notes;
  trace.ops.reserve(plain.ops.size() + plain.ops.size() / 2);
  for (Storage& storage : trace.storages) {
    if (storage.born.valid()) storage.freed = OpId();
  }
  return trace;
}

Prediction::Prediction(const Trace& plain, std::span<const TapeRules> layers,
                       bool on_cpu)
    : plain_(plain),
      layers_(layers),
      step_{.trace = start_of(plain),
            .layers = std::vector<LayerReplay>(layers.size())},
      trace_(step_.trace),
      holders_(trace_),
      call_{.plain = plain,
            .trace = trace_,
            .holders = holders_,
            .on_cpu = on_cpu,
            .rules = {},
            .versions = std::vector<std::uint32_t>(plain.storages.size()),
            .has_history = std::vector<bool>(plain.storages.size()),
            .lineages = std::vector<Lineage>(plain.saves.size())},
      moved_(plain.ops.size()),
      saves_at_(plain.ops.size()),
      released_at_(plain.ops.size()),
      let_go_at_(plain.ops.size()),
      asks_at_(plain.ops.size()),
      has_ops_(plain.layers.size()) {
  find_rules();
  find_ends();
  find_asks();
}

void Prediction::find_rules() {
  call_.rules.resize(plain_.ops.size());
  for (std::size_t i = 0; i < plain_.ops.size(); ++i) {
    if (!is_forward(i)) continue;
    const Op& op = plain_.ops[i];
    auto [entry, is_new] = rules_.try_emplace(op.name);
    if (is_new) entry->second = find_replay_rules(op.name);
    call_.rules[i] = &entry->second;
    if (op.layer.valid()) has_ops_[op.layer.index()] = true;
  }
}

// When the program, and when autograd, lets go of what.
void Prediction::find_ends() {
  std::vector<OpId> last_touched(plain_.storages.size());
  for (std::size_t i = 0; i < plain_.ops.size(); ++i) {
    if (!is_forward(i)) continue;
    const Op& op = plain_.ops[i];
    for (const auto* values : {&op.inputs, &op.outputs}) {
      for (const ValueId value : *values) {
        const StorageId id = plain_.at(value).storage;
        if (id.valid()) last_touched[id.index()] = OpId(i);
      }
    }
  }
  for (std::size_t i = 0; i < plain_.storages.size(); ++i) {
    const Storage& storage = plain_.storages[i];
    if (storage.returned) returned_.emplace_back(i);
    if (!storage.born.valid()) continue;
    holders_.hold(StorageId(i));
    const OpId end = let_go_of(storage, last_touched[i]);
    if (end.valid()) let_go_at_[end.index()].push_back(i);
  }
  for (std::size_t i = 0; i < plain_.saves.size(); ++i) {
    const Save& saved = plain_.saves[i];
    if (saved.op.valid()) {
      saves_at_[saved.op.index()].push_back(i);
    } else {
      save(i, false);
    }
    if (saved.released.valid()) {
      released_at_[saved.released.index()].push_back(i);
    }
  }
}

OpId Prediction::let_go_of(const Storage& storage, OpId last_touched) const {
  if (!is_forward(storage.born.index())) return storage.freed;
  if (storage.let_go.valid() || !storage.freed.valid()) return storage.let_go;
  // Nobody looked: as if no variable of the program outlived its last use.
  const OpId end = last_touched.valid() ? last_touched : storage.born;
  return std::min(std::max(end, storage.born), storage.freed);
}

// Autograd's node asks for all that it saved before its first op. A node that
// cannot be told by its op (a custom Function's) is the one that ran just
// before it was let go.
void Prediction::find_asks() {
  std::vector<OpId> first_of(plain_.ops.size());
  for (std::size_t i = plain_.ops.size(); i-- > 0;) {
    const OpId forward = plain_.ops[i].forward;
    if (plain_.ops[i].phase == Phase::Backward && forward.valid()) {
      first_of[forward.index()] = OpId(i);
    }
  }
  for (std::size_t i = 0; i < plain_.saves.size(); ++i) {
    const Save& saved = plain_.saves[i];
    if (!saved.op.valid() || !is_forward(saved.op.index())) continue;
    OpId asked = first_of[saved.op.index()];
    if (!asked.valid() || saved.released < asked) {
      if (!saved.released.valid() || is_forward(saved.released.index())) {
        continue;
      }
      std::size_t first = saved.released.index();
      const Op& last = plain_.ops[first];
      while (first > 0 && plain_.ops[first - 1].phase == last.phase &&
             plain_.ops[first - 1].layer == last.layer &&
             plain_.ops[first - 1].forward == last.forward) {
        --first;
      }
      asked = OpId(first);
    }
    asks_at_[asked.index()].push_back(i);
  }
}

ReplayedStep Prediction::run() && {
  std::optional<OpId> first_backward;
  for (std::size_t i = 0; i < plain_.ops.size(); ++i) {
    if (!is_forward(i) && !first_backward) first_backward = OpId(i);
    if (is_forward(i)) change_layer(plain_.ops[i].layer);
    ask(i);
    append(i);
    if (is_forward(i)) {
      forward(i);
    } else {
      for (const std::size_t saved : saves_at_[i]) save(saved, false);
    }
    end(i);
  }
  finish_storages();
  finish_saves();
  const OpId begin = first_backward.value_or(OpId());
  sum_held(plain_, begin, &LayerReplay::held_plain);
  sum_held(trace_, begin, &LayerReplay::held);
  for (const LayerReplay& layer : step_.layers) {
    step_.num_replayed += layer.ops;
  }
  trace_.check();
  return std::move(step_);
}

// ---- a call of the model ----

void Prediction::change_layer(LayerId layer) {
  if (layer == layer_) return;
  const LayerId before = std::exchange(layer_, layer);
  if (tape_ == nullptr) return;
  const auto spans = [&](const TapeRules& rules) {
    return rules.policy == tape_->policy() && tape_->spans_layers();
  };
  // Between two layers runs the one that calls both: the innermost around them
  // that has ops.
  std::optional<std::size_t> around;
  for (std::size_t i = 0; i < plain_.layers.size(); ++i) {
    const std::string& name = plain_.layers[i].name;
    if (i != before.index() && i != layer.index() &&
        (name.empty() || has_ops_[i]) &&
        is_inside(plain_.at(before).name, name) &&
        is_inside(plain_.at(layer).name, name)) {
      around = i;  // parents come before their children
    }
  }
  if (spans(layers_[layer.index()]) && (!around || spans(layers_[*around]))) {
    tape_->cross_border();
  } else {
    close_tape();
  }
}

PredictedTape* Prediction::open_tape() {
  if (!layer_.valid()) return nullptr;
  const TapeRules& rules = layers_[layer_.index()];
  if (rules.keeps_all()) return nullptr;
  if (tape_ == nullptr) {
    tapes_.push_back(std::make_unique<PredictedTape>(rules, call_));
    tape_ = tapes_.back().get();
  }
  return tape_;
}

void Prediction::close_tape() {
  PredictedTape* const tape = std::exchange(tape_, nullptr);
  if (tape == nullptr) return;
  for (const auto& [storage, state] : tape->close()) {
    claims_[storage].push_back({tape, state});
  }
}

void Prediction::leave() {
  if (tape_ != nullptr) {
    for (const StorageId storage : returned_) tape_->add_output(storage);
    tape_->decide_again();
  }
  close_tape();
  layer_ = LayerId();
}

void Prediction::forward(std::size_t index) {
  const Op& op = plain_.ops[index];
  for (const ValueId input : op.inputs) {
    const Value& value = plain_.at(input);
    if (!value.storage.valid()) continue;
    std::uint32_t& version = call_.versions[value.storage.index()];
    version = std::max(version, value.version);
  }
  before_writes(op);
  PredictedTape* const tape = open_tape();
  if (tape != nullptr) tape->begin_op(OpId(index));
  // A custom Function's saves come when it is through.
  if (!op.in_function) {
    for (const std::size_t saved : saves_at_[index]) save(saved, true);
  }
  for (const ValueId output : op.outputs) {
    const Value& value = plain_.at(output);
    if (value.storage.valid()) {
      call_.versions[value.storage.index()] = value.version;
    }
  }
  add_history(op);
  if (tape != nullptr) tape->end_op();
  if (op.in_function) {
    for (const std::size_t saved : saves_at_[index]) save(saved, true);
  }
}

void Prediction::before_writes(const Op& op) {
  if (!op.mutates || claims_.empty()) return;
  for (const ValueId output : op.outputs) {
    const Value& value = plain_.at(output);
    if (!value.storage.valid() ||
        value.version <= call_.versions[value.storage.index()]) {
      continue;
    }
    const auto found = claims_.find(value.storage);
    if (found == claims_.end()) continue;
    for (const Claim& claim : found->second) {
      claim.tape->before_write(claim.state);
    }
    claims_.erase(found);
  }
}

// Whether autograd differentiates what the op made. Frozen parameters are taken
// for trained ones: a trace does not tell.
void Prediction::add_history(const Op& op) {
  const bool differentiates =
      std::ranges::any_of(op.inputs, [&](ValueId input) {
        const StorageId id = plain_.at(input).storage;
        return id.valid() && (call_.has_history[id.index()] ||
                              plain_.at(id).category == Category::Parameter);
      });
  if (!differentiates) return;
  for (const ValueId output : op.outputs) {
    const Value& value = plain_.at(output);
    if (value.storage.valid() && plain_.at(value.storage).born.valid() &&
        is_floating(value.dtype)) {
      call_.has_history[value.storage.index()] = true;
    }
  }
}

void Prediction::save(std::size_t index, bool decides) {
  const StorageId storage = plain_.at(plain_.saves[index].value).storage;
  if (!storage.valid()) return;
  holders_.hold(storage);
  if (!decides || tape_ == nullptr || !layer_.valid() ||
      !tape_->decide(index)) {
    return;
  }
  const auto found = claims_.find(storage);
  if (found == claims_.end()) return;
  for (const Claim& claim : found->second) claim.tape->offer(claim.state);
}

void Prediction::ask(std::size_t op) {
  const std::size_t first = trace_.ops.size();
  for (const std::size_t saved : asks_at_[op]) {
    const Lineage& lineage = call_.lineages[saved];
    if (lineage.tape == nullptr) continue;
    const StorageId of = plain_.at(plain_.saves[saved].value).storage;
    stands_.push_back({saved, of, lineage.tape->materialise(lineage.state)});
  }
  count_replayed(first);
}

void Prediction::append(std::size_t index) {
  moved_[index] = OpId(trace_.ops.size());
  Op& op = trace_.ops.emplace_back(plain_.ops[index]);
  if (op.forward.valid()) op.forward = moved_[op.forward.index()];
  if (stands_.empty()) return;
  const auto stand_in = [&](ValueId id) {
    const Value& value = plain_.at(id);
    const auto found = std::ranges::find(stands_, value.storage, &Stand::of);
    if (!value.storage.valid() || found == stands_.end() ||
        found->storage == value.storage) {
      return id;
    }
    Value other = value;
    other.storage = found->storage;
    trace_.values.push_back(std::move(other));
    return ValueId(trace_.values.size() - 1);
  };
  std::ranges::transform(op.inputs, op.inputs.begin(), stand_in);
  std::ranges::transform(op.outputs, op.outputs.begin(), stand_in);
}

// Before the next op begins.
void Prediction::end(std::size_t op) {
  let_go(op, false);
  const bool is_last = op + 1 == plain_.ops.size() || !is_forward(op + 1) ||
                       !plain_.ops[op + 1].layer.valid();
  if (is_forward(op) && layer_.valid() && is_last) leave();
  let_go(op, true);
  for (const std::size_t saved : released_at_[op]) {
    const StorageId storage = plain_.at(plain_.saves[saved].value).storage;
    if (!storage.valid()) continue;
    const Lineage& lineage = call_.lineages[saved];
    if (lineage.tape == nullptr) {
      holders_.drop(storage);
      continue;
    }
    lineage.tape->release(lineage.state);
    std::erase_if(stands_, [&](const Stand& s) { return s.save == saved; });
  }
}

void Prediction::let_go(std::size_t op, bool returned) {
  for (const std::size_t i : let_go_at_[op]) {
    if (plain_.storages[i].returned == returned) holders_.drop(StorageId(i));
  }
}

// ---- the result ----

void Prediction::count_replayed(std::size_t first) {
  for (std::size_t i = first; i < trace_.ops.size(); ++i) {
    const Op& op = trace_.ops[i];
    LayerReplay& layer = step_.layers[op.layer.index()];
    layer.ops += op.opaque ? 0 : 1;  // unpacking is not an op of torch's
    layer.flops += op.flops;
    layer.moved += op.moved;
  }
}

void Prediction::finish_storages() {
  std::vector<bool> is_dropped(plain_.storages.size());
  for (std::size_t i = 0; i < plain_.saves.size(); ++i) {
    if (call_.lineages[i].tape == nullptr) continue;
    is_dropped[plain_.at(plain_.saves[i].value).storage.index()] = true;
  }
  const auto moved = [&](OpId op) {
    return op.valid() ? moved_[op.index()] : op;
  };
  for (std::size_t i = 0; i < plain_.storages.size(); ++i) {
    const Storage& plain = plain_.storages[i];
    Storage& storage = trace_.storages[i];
    storage.born = moved(plain.born);
    storage.let_go = moved(plain.let_go);
    // Something in backward may hold what a save gave it for longer.
    if (!is_dropped[i]) {
      storage.freed = plain.freed.valid() && storage.freed.valid()
                          ? std::max(storage.freed, moved(plain.freed))
                          : moved(plain.freed);
    }
    storage.let_go = std::min(storage.let_go, storage.freed);
  }
  const auto is_backward = [](const Op& op) {
    return op.phase != Phase::Forward;
  };
  const OpId first_backward(static_cast<std::size_t>(
      std::ranges::find_if(trace_.ops, is_backward) - trace_.ops.begin()));
  for (Storage& storage : trace_.storages) {
    if (storage.category == Category::Activation &&
        storage.freed < first_backward) {
      storage.category = Category::Transient;
    }
  }
}

void Prediction::finish_saves() {
  for (std::size_t i = 0; i < plain_.saves.size(); ++i) {
    if (call_.lineages[i].tape != nullptr) continue;
    Save& saved = trace_.saves.emplace_back(plain_.saves[i]);
    for (OpId* const op : {&saved.op, &saved.released}) {
      if (op->valid()) *op = moved_[op->index()];
    }
  }
}

void Prediction::sum_held(const Trace& trace, OpId first_backward,
                          Bytes LayerReplay::* held) {
  for (const Storage& storage : trace.storages) {
    if (storage.category == Category::Activation && storage.layer.valid() &&
        storage.born < first_backward && first_backward <= storage.freed) {
      step_.layers[storage.layer.index()].*held +=
          storage.bytes * storage.count;
    }
  }
}

}  // namespace

ReplayedStep replayed_step(const Trace& plain,
                           std::span<const TapeRules> layers, bool on_cpu) {
  plain.check();
  if (!plain.saves_known) {
    throw TraceError(
        "what replay would do is not known of a step whose saves are not");
  }
  if (layers.size() != plain.layers.size()) {
    throw TraceError(str("rules must be given for each of ",
                         plain.layers.size(), " layers, got ", layers.size()));
  }
  return Prediction(plain, layers, on_cpu).run();
}

}  // namespace memscale
