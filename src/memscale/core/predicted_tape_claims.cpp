// What becomes of saves, and who needs which state: runtime/tape_saves.cpp and
// runtime/tape_claims.cpp.

#include <utility>

#include "memscale/core/predicted_tape.h"

namespace memscale {

bool PredictedTape::spans_layers() const {
  return rules_.policy == ReplayPolicy::Cheap && rules_.keep_set == nullptr;
}

void PredictedTape::cross_border() {
  ++section_;
  unclaim_all(std::exchange(crossing_, {}));
  const auto let_go = [&](StateId id) {
    State& state = states_[id];
    if (state.readers == 0 && !state.ours) bury(state);
  };
  for (const StateId id : std::exchange(held_here_, {})) let_go(id);
  for (StateId id = first_of_section_; id < states_.size(); ++id) let_go(id);
  first_of_section_ = static_cast<StateId>(states_.size());
}

bool PredictedTape::decide(std::size_t save) {
  const Value& value = step_.plain.at(step_.plain.saves[save].value);
  const auto found = current_.find(value.storage);
  const bool known = found != current_.end();
  if (running_ && (!known || is_written_now(value.storage))) {
    pending_.push_back(save);
    return false;
  }
  if (!known || !is_current(states_[found->second])) return true;
  settle(save, found->second);
  return states_[found->second].why == Why::Outside;
}

void PredictedTape::settle(std::size_t save, StateId id) {
  State& state = states_[id];
  if (state.why != Why::Replayed || !can_claim(id)) {
    state.is_saved = true;
  } else if (state.is_saved || !is_worth_dropping(id)) {
    state.is_saved = true;
    undecided_.emplace_back(save, id);
  } else {
    drop(save, id);
  }
}

void PredictedTape::drop(std::size_t save, StateId id) {
  claim(id);
  step_.lineages[save] = {this, id};
  step_.holders.drop(states_[id].storage);
}

void PredictedTape::add_output(StorageId storage) {
  const auto found = current_.find(storage);
  if (found != current_.end()) states_[found->second].is_output = true;
}

void PredictedTape::decide_again() {
  for (const auto& [save, id] : std::exchange(undecided_, {})) {
    State& state = states_[id];
    state.is_saved = false;
    if (state.held.valid() || !has_original(state) || !can_claim(id) ||
        !is_worth_dropping(id)) {
      state.is_saved = true;
      continue;
    }
    drop(save, id);
  }
}

std::vector<std::pair<StorageId, PredictedTape::StateId>>
PredictedTape::close() {
  open_ = false;
  unclaim_all(std::exchange(crossing_, {}));
  current_.clear();
  std::vector<std::pair<StorageId, StateId>> claims;
  for (StateId id = 0; id < states_.size(); ++id) {
    State& state = states_[id];
    if (state.readers == 0) {
      bury(state);
      state.has_original = false;
    } else if (has_original(state)) {
      claims.emplace_back(state.storage, id);
    }
  }
  for (Node& node : nodes_) {
    if (node.num_needed == 0) clear(node);
  }
  return claims;
}

void PredictedTape::copy_out(State& state) {
  state.has_original = false;
  if (state.readers == 0 || !state.held.valid() || state.ours) return;
  const Storage& storage = step_.plain.at(state.storage);
  const StorageId copy = step_.holders.make(
      storage.bytes, storage.place, Category::Activation, storage.layer);
  bury(state);
  state.held = copy;
  state.ours = true;
}

void PredictedTape::offer(StateId id) {
  State& state = states_[id];
  if (state.readers == 0 || state.held.valid() || !is_current(state) ||
      !has_original(state)) {
    return;
  }
  hold(state, state.storage);
  forget_maker(state);
}

bool PredictedTape::is_there(const State& state) const {
  return state.held.valid() ||
         ((state.maker == kNone || state.is_saved) && !state.lost &&
          is_current(state) && has_original(state));
}

bool PredictedTape::can_claim(StateId id) {
  ++num_searches_;
  std::vector<StateId> path = {id};
  while (!path.empty()) {
    const State& state = states_[path.back()];
    path.pop_back();
    if (state.readers > 0 || is_there(state)) continue;
    if (state.maker == kNone || state.lost || nodes_[state.maker].done) {
      states_[id].lost = true;
      return false;
    }
    Node& node = nodes_[state.maker];
    if (node.num_needed > 0) continue;
    if (std::exchange(node.search, num_searches_) == num_searches_) continue;
    path.insert(path.end(), node.reads.begin(), node.reads.end());
  }
  return true;
}

bool PredictedTape::is_worth_dropping(StateId id) {
  if (states_[id].readers > 0) return true;
  ++num_searches_;
  Bytes more;
  std::vector<StateId> path = {id};
  while (!path.empty()) {
    const State& state = states_[path.back()];
    path.pop_back();
    if (state.readers > 0) continue;
    if (is_there(state)) {
      if (!state.is_saved && !state.is_output && !state.is_leaf) {
        more += bytes_of(state);
      }
      continue;
    }
    Node& node = nodes_[state.maker];
    if (std::exchange(node.search, num_searches_) == num_searches_) continue;
    path.insert(path.end(), node.reads.begin(), node.reads.end());
  }
  return more < bytes_of(states_[id]);
}

void PredictedTape::claim(StateId id) {
  std::vector<StateId> path = {id};
  while (!path.empty()) {
    State& state = states_[path.back()];
    path.pop_back();
    if (state.readers++ > 0 || state.held.valid()) continue;
    if (is_there(state)) {
      hold(state, state.storage);
      continue;
    }
    if (state.maker == kNone) {
      state.lost = true;
      continue;
    }
    state.by_maker = true;
    Node& node = nodes_[state.maker];
    if (node.num_needed++ > 0) continue;
    path.insert(path.end(), node.reads.begin(), node.reads.end());
  }
}

void PredictedTape::unclaim_all(std::vector<StateId> path) {
  while (!path.empty()) {
    State& state = states_[path.back()];
    path.pop_back();
    if (--state.readers > 0) continue;
    if (state.ours || !open_) bury(state);
    if (!std::exchange(state.by_maker, false)) continue;
    Node& node = nodes_[state.maker];
    if (--node.num_needed > 0 || node.done) continue;
    path.insert(path.end(), node.reads.begin(), node.reads.end());
    if (!open_) clear(node);
  }
}

void PredictedTape::forget_maker(State& state) {
  if (!std::exchange(state.by_maker, false)) return;
  Node& node = nodes_[state.maker];
  if (--node.num_needed > 0 || node.done) return;
  unclaim_all(node.reads);
}

void PredictedTape::hold(State& state, StorageId storage) {
  step_.holders.hold(storage);
  state.held = storage;
}

void PredictedTape::bury(State& state) {
  if (state.held.valid()) step_.holders.drop(state.held);
  state.held = StorageId();
}

void PredictedTape::clear(Node& node) {
  if (node.packed.valid()) step_.holders.drop(node.packed);
  node = Node();
}

}  // namespace memscale
