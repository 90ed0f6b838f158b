#include "memscale/core/predict/replayed_step.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/predict/storage_holders.h"
#include "memscale/core/predict/trace_tape.h"
#include "memscale/core/predict/trace_uses.h"
#include "memscale/core/tape/model_call.h"
#include "memscale/core/trace/step_schedule.h"

namespace memscale {
namespace {

// A training step under replay, op by op: what runtime/replay/replay.h does
// with tensors.
class Prediction final {
 public:
  Prediction(const Trace& plain, std::span<const TapeRules> layers, bool on_cpu,
             const ReplayTarget& target);
  ReplayedStep run() &&;

 private:
  // Backward reads this storage in place of that one, for a save.
  struct Stand {
    std::size_t save;
    StorageId of;
    StorageId storage;
  };

  void find_holders();
  void hold(std::size_t save);
  bool is_forward(std::size_t op) const {
    return plain_.ops[op].phase == Phase::Forward;
  }

  // Events that come before this op.
  void tell_events(std::size_t op);
  void tell(const Event& event);
  void enter_layer(const Event& event);
  void leave_layer();
  void run_forward(std::size_t op);
  TraceTape* open_tape();
  void decide(std::size_t save);

  void ask(std::size_t op);
  void append(std::size_t op);
  void end(std::size_t op);
  void let_go(std::size_t op, bool returned);

  void count_replayed(std::size_t first);
  void finish_storages();
  void finish_saves();
  void finish_events();
  void sum_held(const Trace& trace, OpId first_backward,
                Bytes LayerReplay::* held);

  const Trace& plain_;
  const StepSchedule schedule_;
  ReplayedStep step_;
  Trace& trace_;
  StorageHolders holders_;
  PredictedStep predicted_;
  TraceUses uses_;
  const std::vector<TapeRules> rules_;  // by layer
  std::vector<std::shared_ptr<TraceTape>> tapes_;
  Claims<TraceTape> claims_;
  std::optional<ModelCall<TraceTape>> call_;
  // Of the layers that were entered: what leaving them ends.
  struct Entered {
    bool began_call;
    bool is_layer_of_call;
  };
  std::vector<Entered> entered_;
  std::size_t next_event_ = 0;
  std::vector<OpId> moved_;  // by op of the plain step: the same op
  std::vector<StorageKey> returned_;
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
                       bool on_cpu, const ReplayTarget& target)
    : plain_(plain),
      schedule_(plain),
      step_{.trace = start_of(plain),
            .layers = std::vector<LayerReplay>(layers.size())},
      trace_(step_.trace),
      holders_(trace_),
      predicted_{.plain = plain,
                 .trace = trace_,
                 .holders = holders_,
                 .versions = TraceVersions(plain),
                 .lineages = std::vector<Lineage>(plain.saves.size()),
                 .ended = std::vector<bool>(plain.saves.size())},
      uses_(plain, on_cpu, target),
      rules_(layers.begin(), layers.end()),
      moved_(plain.ops.size()) {
  find_holders();
}

// The program holds all that the step makes, until it lets go.
void Prediction::find_holders() {
  for (std::size_t i = 0; i < plain_.storages.size(); ++i) {
    if (plain_.storages[i].returned) {
      returned_.push_back(TraceUses::key(StorageId(i)));
    }
    if (plain_.storages[i].born.valid()) holders_.hold(StorageId(i));
  }
  for (std::size_t i = 0; i < plain_.saves.size(); ++i) {
    if (!plain_.saves[i].op.valid()) hold(i);
  }
}

void Prediction::hold(std::size_t save) {
  const StorageId storage = plain_.at(plain_.saves[save].value).storage;
  if (storage.valid()) holders_.hold(storage);
}

ReplayedStep Prediction::run() && {
  std::optional<OpId> first_backward;
  for (std::size_t i = 0; i < plain_.ops.size(); ++i) {
    if (!is_forward(i) && !first_backward) first_backward = OpId(i);
    if (i == 0) tell_events(0);
    ask(i);
    append(i);
    if (is_forward(i)) {
      run_forward(i);
    } else {
      for (const std::size_t save : schedule_.saves[i]) hold(save);
    }
    end(i);
  }
  finish_storages();
  finish_saves();
  finish_events();
  const OpId begin = first_backward.value_or(OpId());
  sum_held(plain_, begin, &LayerReplay::held_plain);
  sum_held(trace_, begin, &LayerReplay::held);
  for (const LayerReplay& layer : step_.layers) {
    step_.num_replayed += layer.ops;
  }
  trace_.check();
  return std::move(step_);
}

void Prediction::tell_events(std::size_t op) {
  const auto& events = plain_.events;
  while (next_event_ < events.size() && events[next_event_].op <= op) {
    tell(events[next_event_++]);
  }
}

// A custom Function may write what it is given: whoever needs the old bytes
// copies them, and afterwards they are new states.
void Prediction::tell(const Event& event) {
  using Kind = Event::Kind;
  if (event.kind == Kind::EnterLayer) return enter_layer(event);
  if (event.kind == Kind::LeaveLayer) return leave_layer();
  const auto tensors = uses_.values(event.values);
  TraceTape* const tape = call_ ? call_->tape() : nullptr;
  if (event.kind == Kind::EnterFunction) {
    for (const TensorUse& tensor : tensors)
      claims_.before_write(tensor.storage);
    if (tape != nullptr) tape->tape().begin_function(tensors);
    return;
  }
  predicted_.versions.leave_function(tensors);
  if (tape != nullptr) tape->tape().end_function(tensors);
}

// Whatever layer is entered first is where the call begins, if there is
// something to differentiate.
void Prediction::enter_layer(const Event& event) {
  const bool begins = !call_ && !event.no_grad;
  if (begins) call_.emplace(rules_, claims_);
  const bool is_inside = call_.has_value() && event.layer.index() > 0;
  if (is_inside) call_->enter_layer(event.layer.index());
  entered_.push_back({begins, is_inside});
}

void Prediction::leave_layer() {
  if (entered_.empty()) return;
  const Entered entered = entered_.back();
  entered_.pop_back();
  if (!call_) return;
  if (entered.is_layer_of_call) call_->leave_layer();
  if (!entered.began_call) return;
  call_->leave(returned_);
  call_.reset();
}

TraceTape* Prediction::open_tape() {
  if (!call_) return nullptr;
  return call_->open_tape([&](const TapeRules& rules) {
    return tapes_.emplace_back(std::make_shared<TraceTape>(rules, predicted_));
  });
}

void Prediction::run_forward(std::size_t index) {
  const OpId id(index);
  const Op& op = plain_.ops[index];
  const OpUse use = uses_.of(id);
  predicted_.versions.begin_op(use);
  for (const TensorUse& tensor : use.tensors) {
    if (tensor.access != Access::Read) claims_.before_write(tensor.storage);
  }
  TraceTape* const tape = open_tape();
  if (tape != nullptr) {
    tape->bytes().set_op(id);
    tape->tape().begin_op(use);
  }
  // A custom Function's saves come when it is through.
  if (!op.in_function) {
    for (const std::size_t save : schedule_.saves[index]) decide(save);
  }
  predicted_.versions.end_op(id, use);
  if (tape != nullptr) tape->tape().end_op(uses_.results_of(id));
  if (op.in_function) {
    for (const std::size_t save : schedule_.saves[index]) decide(save);
  }
}

void Prediction::decide(std::size_t save) {
  hold(save);
  const StorageId storage = plain_.at(plain_.saves[save].value).storage;
  if (!storage.valid() || plain_.saves[save].by_function || !call_) return;
  const StorageKey key = TraceUses::key(storage);
  TraceTape* const tape = call_->tape();
  if (tape == nullptr || tape->tape().decide(save, key)) claims_.offer(key);
}

void Prediction::ask(std::size_t op) {
  const std::size_t first = trace_.ops.size();
  for (const std::size_t saved : schedule_.asked[op]) {
    const Lineage& lineage = predicted_.lineages[saved];
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
  tell_events(op + 1);  // what the model returns is still held when it does
  let_go(op, true);
  for (const std::size_t saved : schedule_.released[op]) {
    const StorageId storage = plain_.at(plain_.saves[saved].value).storage;
    if (!storage.valid()) continue;
    const Lineage& lineage = predicted_.lineages[saved];
    predicted_.ended[saved] = true;
    if (lineage.tape == nullptr) {
      holders_.drop(storage);
      continue;
    }
    const StateId state = lineage.state;
    lineage.tape->tape().release({&state, 1});
    std::erase_if(stands_, [&](const Stand& s) { return s.save == saved; });
  }
}

void Prediction::let_go(std::size_t op, bool returned) {
  for (const std::size_t i : schedule_.let_go[op]) {
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
    if (predicted_.lineages[i].tape == nullptr) continue;
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
    storage.plain_freed = moved(plain.plain_freed);
  }
  const auto is_backward = [](const Op& op) {
    return op.phase != Phase::Forward;
  };
  const OpId first_backward(static_cast<std::size_t>(
      std::ranges::find_if(trace_.ops, is_backward) - trace_.ops.begin()));
  for (Storage& storage : trace_.storages) {
    if (storage.category != Category::Activation &&
        storage.category != Category::Transient) {
      continue;
    }
    const bool is_left_for_backward =
        storage.born < first_backward && first_backward <= storage.freed;
    storage.category =
        is_left_for_backward ? Category::Activation : Category::Transient;
  }
}

void Prediction::finish_saves() {
  for (std::size_t i = 0; i < plain_.saves.size(); ++i) {
    if (predicted_.lineages[i].tape != nullptr) continue;
    Save& saved = trace_.saves.emplace_back(plain_.saves[i]);
    for (OpId* const op : {&saved.op, &saved.released}) {
      if (op->valid()) *op = moved_[op->index()];
    }
  }
}

void Prediction::finish_events() {
  trace_.events = plain_.events;
  for (Event& event : trace_.events) {
    event.op =
        event.op < moved_.size() ? moved_[event.op].index() : trace_.ops.size();
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
                           std::span<const TapeRules> layers, bool on_cpu,
                           const ReplayTarget& target) {
  plain.check();
  if (!plain.saves_known) {
    throw TraceError(
        "what replay would do is not known of a step whose saves are not");
  }
  if (layers.size() != plain.layers.size()) {
    throw TraceError(str("rules must be given for each of ",
                         plain.layers.size(), " layers, got ", layers.size()));
  }
  return Prediction(plain, layers, on_cpu, target).run();
}

}  // namespace memscale
