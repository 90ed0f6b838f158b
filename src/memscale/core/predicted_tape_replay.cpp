// Backward's half of the tape: runtime/tape_replay.cpp.

#include <algorithm>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/predicted_tape.h"

namespace memscale {

StorageId PredictedTape::materialise(StateId state) {
  ensure(state);
  return states_[state].held;
}

void PredictedTape::ensure(StateId id) {
  if (states_[id].held.valid()) return;
  ++num_searches_;
  std::vector<NodeId> missing;
  std::vector<StateId> path = {id};
  while (!path.empty()) {
    State& state = states_[path.back()];
    path.pop_back();
    if (state.held.valid() || use_original(state)) continue;
    if (state.maker == kNone || nodes_[state.maker].done) {
      throw InternalError(str("storage ", state.storage,
                              " of a step cannot be computed again"));
    }
    Node& node = nodes_[state.maker];
    if (std::exchange(node.search, num_searches_) == num_searches_) continue;
    missing.push_back(state.maker);
    path.insert(path.end(), node.reads.begin(), node.reads.end());
  }
  std::ranges::sort(missing);
  for (const NodeId node : missing) {
    if (nodes_[node].num_needed > 0) run(nodes_[node]);
  }
}

bool PredictedTape::use_original(State& state) {
  if (!is_current(state) || !has_original(state)) return false;
  hold(state, state.storage);
  forget_maker(state);
  return true;
}

// Memory for what the op writes, by reference, held once each; invalid for what
// it only reads.
std::vector<StorageId> PredictedTape::make_targets(const Node& node) {
  std::vector<StorageId> targets(node.references.size());
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const Reference& reference = node.references[i];
    if (reference.access == Access::Read) continue;
    State& old = states_[reference.state];
    const auto same = std::ranges::find_if(
        node.references.begin(), node.references.begin() + std::ssize(targets),
        [&](const Reference& other) { return other.state == reference.state; });
    const auto first = static_cast<std::size_t>(same - node.references.begin());
    if (first < i && targets[first].valid()) {
      targets[i] = targets[first];
      step_.holders.hold(targets[i]);
    } else if (reference.access == Access::Update && old.ours &&
               old.readers == 1) {
      // Nobody else needs the old bytes: they become the new ones.
      targets[i] = std::exchange(old.held, {});
    } else {
      const Storage& storage = step_.plain.at(old.storage);
      targets[i] = step_.holders.make(storage.bytes, storage.place,
                                      Category::Recompute, storage.layer);
    }
  }
  return targets;
}

ValueId PredictedTape::value_over(ValueId id, StorageId storage) {
  if (step_.plain.at(id).storage == storage) return id;
  Value value = step_.plain.at(id);
  value.storage = storage;
  step_.trace.values.push_back(std::move(value));
  return ValueId(step_.trace.values.size() - 1);
}

void PredictedTape::run(Node& node) {
  if (node.packed.valid()) return unpack(node);
  const Op& op = op_of(node);
  step_.trace.ops.push_back(op);
  const std::vector<StorageId> targets = make_targets(node);
  std::vector<ValueId> inputs;
  // What of the plain step is which storage now, among the results.
  std::vector<std::pair<StorageId, StorageId>> results;
  for (std::size_t i = 0; i < node.references.size(); ++i) {
    const Reference& reference = node.references[i];
    const State& state = states_[reference.state];
    const StorageId storage = targets[i].valid() ? targets[i] : state.held;
    inputs.push_back(value_over(reference.value, storage));
    results.emplace_back(state.storage, storage);
  }
  const std::size_t num_inputs = results.size();
  std::vector<ValueId> outputs;
  for (const ValueId output : op.outputs) {
    const StorageId of = step_.plain.at(output).storage;
    if (!of.valid()) {
      outputs.push_back(output);
      continue;
    }
    auto found =
        std::ranges::find(results, of, &std::pair<StorageId, StorageId>::first);
    if (found == results.end()) {
      const Storage& storage = step_.plain.at(of);
      found = results.emplace(
          results.end(), of,
          step_.holders.make(storage.bytes, storage.place, Category::Recompute,
                             storage.layer));
    }
    outputs.push_back(value_over(output, found->second));
  }
  Op& written = step_.trace.ops.back();
  written.phase = Phase::Backward;
  written.forward = node.op;
  written.inputs = std::move(inputs);
  written.outputs = std::move(outputs);

  for (const Made& made : node.writes) adopt(made.state, targets[made.place]);
  for (const Made& made : node.results) {
    const auto found =
        std::ranges::find(results, states_[made.state].storage,
                          &std::pair<StorageId, StorageId>::first);
    adopt(made.state, found->second);
  }
  for (const StorageId target : targets) {
    if (target.valid()) step_.holders.drop(target);
  }
  for (std::size_t i = num_inputs; i < results.size(); ++i) {
    step_.holders.drop(results[i].second);
  }
  finish(node);
}

void PredictedTape::unpack(Node& node) {
  const bool is_write = !node.writes.empty();
  const StateId state = (is_write ? node.writes : node.results).front().state;
  const Storage& storage = step_.plain.at(states_[state].storage);
  const Op& forward = op_of(node);
  Op op;
  op.name = is_write ? "memscale::unpack_bits" : "memscale::widen";
  op.phase = Phase::Backward;
  op.layer = forward.layer;
  op.forward = node.op;
  op.opaque = true;
  op.moved = storage.bytes + step_.trace.at(node.packed).bytes;
  op.workspace_known = true;
  step_.trace.ops.push_back(std::move(op));
  const StorageId made = step_.holders.make(storage.bytes, storage.place,
                                            Category::Recompute, storage.layer);
  const ValueId result = forward.outputs[is_write ? 0 : node.results[0].place];
  const ValueId value = value_over(result, made);
  step_.trace.ops.back().outputs = {value};
  adopt(state, made);
  step_.holders.drop(made);
  finish(node);
}

void PredictedTape::adopt(StateId id, StorageId storage) {
  State& made = states_[id];
  if (made.readers == 0 || made.held.valid()) return;
  hold(made, storage);
  made.ours = true;
}

void PredictedTape::finish(Node& node) {
  node.done = true;
  if (node.packed.valid()) step_.holders.drop(node.packed);
  node.packed = StorageId();
  node.references.clear();
  unclaim_all(std::exchange(node.reads, {}));
}

}  // namespace memscale
