// Backward's half of the tape: which ops are called again, in which order, and
// into which memory.

#include <algorithm>
#include <utility>

#include "memscale/core/tape/tape.h"

namespace memscale {

void Tape::ensure(StateId id) {
  if (has_bytes(id)) return;
  if (at_once_) run_all();
  replay(id);
}

// All that backward will ask for, before it changes a parameter.
void Tape::run_all() {
  for (NodeId id = 0; id < nodes_.size(); ++id) {
    if (nodes_[id].num_needed > 0 && !nodes_[id].done) run(id);
  }
}

void Tape::replay(StateId wanted) {
  if (has_bytes(wanted)) return;
  ++num_searches_;
  std::vector<NodeId> missing;
  std::vector<StateId> path = {wanted};
  while (!path.empty()) {
    const StateId id = path.back();
    path.pop_back();
    if (has_bytes(id) || use_original(id)) continue;
    const State& state = states_[id];
    if (state.held) bytes_.fail(id, Failure::Freed);
    if (state.lost || state.maker == kNone || nodes_[state.maker].done) {
      bytes_.fail(id, Failure::Changed);
    }
    Node& node = nodes_[state.maker];
    if (std::exchange(node.search, num_searches_) == num_searches_) continue;
    missing.push_back(state.maker);
    path.insert(path.end(), node.reads.begin(), node.reads.end());
  }
  std::ranges::sort(missing);  // the order in which they ran
  for (const NodeId node : missing) {
    // Originals that were found may have made it unnecessary.
    if (nodes_[node].num_needed > 0) run(node);
  }
}

// The tensor itself may be alive still: somebody else holds it, as autograd
// would have.
bool Tape::use_original(StateId id) {
  if (!states_[id].original || !bytes_.has_original(id) || !hold(id)) {
    return false;
  }
  forget_maker(id);
  return true;
}

// Memory for the tensors that the op is given, by reference.
std::vector<Destination> Tape::find_targets(const Node& node) const {
  using Kind = Destination::Kind;
  std::vector<Destination> targets(node.references.size());
  // Arguments that share the memory of a written one do so again.
  const auto share = [&](std::uint32_t i) -> std::optional<Destination> {
    const Reference& reference = node.references[i];
    for (std::uint32_t j = 0; j < targets.size(); ++j) {
      const Reference& other = node.references[j];
      if (targets[j].kind != Kind::AsHeld && other.state == reference.state &&
          (other.access == Access::Update ||
           other.access == reference.access)) {
        return Destination{reference.state, Kind::Share, j};
      }
    }
    return std::nullopt;
  };
  for (std::uint32_t i = 0; i < targets.size(); ++i) {
    const Reference& reference = node.references[i];
    targets[i].state = reference.state;
    if (reference.access == Access::Read) continue;
    if (reference.access == Access::Scratch) {
      targets[i].kind = Kind::Zeros;
    } else if (const auto shared = share(i)) {
      targets[i] = *shared;
    } else if (reference.access == Access::Overwrite) {
      targets[i].kind = Kind::Fresh;
    } else {
      // Nobody else needs the old bytes: they become the new ones.
      const State& old = states_[reference.state];
      const bool is_ours_alone = old.held && old.ours && old.readers == 1;
      targets[i].kind = is_ours_alone ? Kind::TakeOver : Kind::Copy;
    }
  }
  for (std::uint32_t i = 0; i < targets.size(); ++i) {
    if (targets[i].kind != Kind::AsHeld) continue;
    if (const auto shared = share(i)) targets[i] = *shared;
  }
  return targets;
}

void Tape::run(NodeId id) {
  const auto needed = [&](const std::vector<Made>& all) {
    std::vector<Made> some;
    for (const Made& made : all) {
      const State& state = states_[made.state];
      if (state.readers > 0 && !state.held) some.push_back(made);
    }
    return some;
  };
  const Node& node = nodes_[id];
  const std::vector<Made> written = needed(node.writes);
  const std::vector<Made> results = needed(node.results);
  if (node.packed) {
    const Made& made =
        node.writes.empty() ? node.results.front() : node.writes.front();
    if (!written.empty() || !results.empty()) bytes_.unpack(id, made.state);
  } else {
    const std::vector<Destination> targets = find_targets(node);
    // What is taken over is gone from its state, even if the op throws.
    for (std::uint32_t i = 0; i < targets.size(); ++i) {
      if (targets[i].kind != Destination::Kind::TakeOver) continue;
      State& taken = states_[node.references[i].state];
      taken.held = false;
      taken.ours = false;
    }
    bytes_.run(id, targets, written, results);
  }
  adopt(written);
  adopt(results);
  finish(id);
}

void Tape::adopt(std::span<const Made> made) {
  for (const Made& each : made) {
    states_[each.state].held = true;
    states_[each.state].ours = true;
  }
}

void Tape::finish(NodeId id) {
  Node& node = nodes_[id];
  node.done = true;
  node.references = {};
  bytes_.clear_node(id);
  unclaim_all(std::exchange(node.reads, {}));
}

}  // namespace memscale
