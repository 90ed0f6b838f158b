#include <algorithm>
#include <string>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/predict/trace_tape.h"

namespace memscale {

std::int64_t TraceBytes::add_state(StateId /*state*/, const TensorUse& tensor) {
  const StorageId storage = TraceUses::storage(tensor.storage);
  states_.push_back(
      {storage, step_.versions.of(storage), StorageId(), tensor.float_bytes});
  return tensor.bytes;
}

bool TraceBytes::is_current(StateId state) const {
  const State& known = states_[state];
  return step_.versions.of(known.storage) == known.version;
}

bool TraceBytes::is_alive(StateId state) const {
  return step_.holders.is_held(states_[state].storage);
}

bool TraceBytes::has_original(StateId state) const {
  return is_current(state) && is_alive(state);
}

bool TraceBytes::hold(StateId state) {
  adopt(state, states_[state].storage);
  return true;
}

void TraceBytes::adopt(StateId state, StorageId storage) {
  step_.holders.hold(storage);
  states_[state].held = storage;
}

void TraceBytes::let_go(StateId state) {
  step_.holders.drop(std::exchange(states_[state].held, StorageId()));
}

StorageId TraceBytes::make_like(StorageId of, Category category) {
  const Storage& storage = step_.plain.at(of);
  return step_.holders.make(storage.bytes, storage.place, category,
                            storage.layer);
}

bool TraceBytes::copy_out(StateId state) {
  const StorageId copy =
      make_like(states_[state].storage, Category::Activation);
  let_go(state);
  states_[state].held = copy;
  return true;
}

void TraceBytes::add_node(NodeId /*node*/) {
  nodes_.push_back({op_, StorageId()});
}

void TraceBytes::clear_node(NodeId node) {
  const StorageId packed = std::exchange(nodes_[node].packed, StorageId());
  if (packed.valid()) step_.holders.drop(packed);
}

bool TraceBytes::pack(NodeId node, StateId result, Packing packing) {
  const Storage& storage = storage_of(result);
  const Bytes bytes =
      packing == Packing::HalfIndices
          ? storage.bytes / 2
          : Bytes((storage.bytes.count() / states_[result].float_bytes + 7) /
                  8);
  nodes_[node].packed = step_.holders.make(bytes, storage.place,
                                           Category::Activation, storage.layer);
  return true;
}

ValueId TraceBytes::value_over(ValueId id, StorageId storage) {
  if (step_.plain.at(id).storage == storage) return id;
  Value value = step_.plain.at(id);
  value.storage = storage;
  step_.trace.values.push_back(std::move(value));
  return ValueId(step_.trace.values.size() - 1);
}

void TraceBytes::run(NodeId node, std::span<const Destination> targets,
                     std::span<const Made> written,
                     std::span<const Made> results) {
  using Kind = Destination::Kind;
  const OpId id = nodes_[node].op;
  const Op& op = step_.plain.at(id);
  step_.trace.ops.push_back(op);
  // What it is given, by reference: that each storage of the plain step is now.
  // Those that were made for it are held once.
  std::vector<std::pair<StorageId, StorageId>> stands;
  std::vector<StorageId> made;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const StorageId of = step_.plain.at(op.inputs[i]).storage;
    const StateId state = targets[i].state;
    StorageId storage;
    switch (targets[i].kind) {
      case Kind::AsHeld:
        storage = states_[state].held;
        break;
      case Kind::Share:
        break;  // its target may come later: see below
      case Kind::TakeOver:
        storage = std::exchange(states_[state].held, StorageId());
        made.push_back(storage);
        break;
      case Kind::Fresh:
      case Kind::Zeros:
      case Kind::Copy:
        storage = make_like(of, Category::Recompute);
        made.push_back(storage);
        break;
    }
    stands.emplace_back(of, storage);
  }
  std::vector<ValueId> inputs;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].kind == Kind::Share) {
      stands[i].second = stands[targets[i].with].second;
    }
    inputs.push_back(value_over(op.inputs[i], stands[i].second));
  }
  const auto by_storage = &std::pair<StorageId, StorageId>::first;
  std::vector<ValueId> outputs;
  for (const ValueId output : op.outputs) {
    const StorageId of = step_.plain.at(output).storage;
    if (!of.valid()) {
      outputs.push_back(output);
      continue;
    }
    // A storage that is written and read stands twice, as the same.
    auto found = std::ranges::find(stands, of, by_storage);
    if (found == stands.end()) {
      made.push_back(make_like(of, Category::Recompute));
      found = stands.emplace(stands.end(), of, made.back());
    }
    outputs.push_back(value_over(output, found->second));
  }
  Op& repeated = step_.trace.ops.back();
  repeated.phase = Phase::Backward;
  repeated.forward = id;
  repeated.inputs = std::move(inputs);
  repeated.outputs = std::move(outputs);
  repeated.uses.clear();

  for (const Made& each : written) {
    adopt(each.state, stands[each.place].second);
  }
  for (const Made& each : results) {
    adopt(each.state,
          std::ranges::find(stands, states_[each.state].storage, by_storage)
              ->second);
  }
  for (const StorageId storage : made) step_.holders.drop(storage);
}

void TraceBytes::unpack(NodeId node, StateId result) {
  const OpId id = nodes_[node].op;
  const Op& forward = step_.plain.at(id);
  const Storage& storage = storage_of(result);
  const auto value = std::ranges::find_if(forward.outputs, [&](ValueId output) {
    return step_.plain.at(output).storage == states_[result].storage;
  });
  const bool is_drawn = forward.mutates;
  Op op;
  op.name = is_drawn ? "memscale::unpack_bits" : "memscale::widen";
  op.phase = Phase::Backward;
  op.layer = forward.layer;
  op.forward = id;
  op.opaque = true;
  op.moved = storage.bytes + step_.trace.at(nodes_[node].packed).bytes;
  op.workspace_known = true;
  step_.trace.ops.push_back(std::move(op));
  const StorageId made =
      make_like(states_[result].storage, Category::Recompute);
  if (value != forward.outputs.end()) {
    step_.trace.ops.back().outputs = {value_over(*value, made)};
  }
  adopt(result, made);
  step_.holders.drop(made);
}

bool TraceBytes::is_waiting(SaveKey save) const { return !step_.ended[save]; }

void TraceBytes::drop_save(SaveKey save, StateId state) {
  step_.lineages[save] = {&tape_, state};
  step_.holders.drop(states_[state].storage);
}

void TraceBytes::fail(StateId state, Failure /*failure*/) const {
  throw InternalError(str("storage ", states_[state].storage,
                          " of a step cannot be computed again"));
}

}  // namespace memscale
