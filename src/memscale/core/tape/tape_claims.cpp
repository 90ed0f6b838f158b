// Who needs which state, and what is let go with its last reader.

#include <utility>

#include "memscale/core/tape/tape.h"

namespace memscale {

std::vector<StateId>& Tape::start_path(StateId id) {
  path_.clear();
  path_.push_back(id);
  return path_;
}

bool Tape::hold(StateId id) {
  if (!states_[id].held) states_[id].held = bytes_.hold(id);
  return states_[id].held;
}

void Tape::let_go(StateId id) {
  if (!std::exchange(states_[id].held, false)) return;
  bytes_.let_go(id);
  states_[id].ours = false;
}

bool Tape::has_bytes(StateId id) const {
  return states_[id].held && (states_[id].ours || bytes_.is_whole(id));
}

// Whether its bytes can be had without replaying anything.
bool Tape::is_there(StateId id) const {
  if (has_bytes(id)) return true;
  const State& state = states_[id];
  return (state.maker == kNone || state.is_saved) && !state.lost &&
         state.original && bytes_.has_original(id);
}

// Whether all that its lineage rests on is still there.
bool Tape::can_claim(StateId id) {
  if (states_[id].readers > 0) return true;
  ++num_searches_;
  std::vector<StateId>& path = start_path(id);
  while (!path.empty()) {
    const StateId at = path.back();
    path.pop_back();
    const State& state = states_[at];
    if (state.readers > 0 || is_there(at)) continue;
    if (state.maker == kNone || state.lost || nodes_[state.maker].done) {
      states_[id].lost = true;  // not to be searched again
      return false;
    }
    Node& node = nodes_[state.maker];
    if (node.num_needed > 0) continue;
    if (std::exchange(node.search, num_searches_) == num_searches_) continue;
    path.insert(path.end(), node.reads.begin(), node.reads.end());
  }
  return true;
}

// Whether less would be held for it than it takes itself. Parameters, what the
// call returns, and what autograd holds for another save, are there anyway.
bool Tape::is_worth_dropping(StateId id) {
  if (states_[id].readers > 0) return true;
  ++num_searches_;
  std::int64_t more = 0;
  std::vector<StateId>& path = start_path(id);
  while (!path.empty()) {
    const StateId at = path.back();
    path.pop_back();
    const State& state = states_[at];
    if (state.readers > 0) continue;
    if (is_there(at)) {
      if (!state.is_saved && !state.is_output && !state.is_leaf) {
        more += state.bytes;
      }
      continue;
    }
    if (state.maker == kNone) return false;  // somebody has just let it go
    Node& node = nodes_[state.maker];
    if (std::exchange(node.search, num_searches_) == num_searches_) continue;
    path.insert(path.end(), node.reads.begin(), node.reads.end());
  }
  return more < states_[id].bytes;
}

void Tape::claim(StateId id) {
  std::vector<StateId>& path = start_path(id);
  while (!path.empty()) {
    const StateId at = path.back();
    path.pop_back();
    State& state = states_[at];
    if (state.readers++ > 0 || has_bytes(at)) continue;
    if (is_there(at) && hold(at)) continue;
    if (state.maker == kNone) {
      // Another thread has just let it go: backward will say so.
      state.lost = true;
      continue;
    }
    state.by_maker = true;
    Node& node = nodes_[state.maker];
    if (node.num_needed++ > 0) continue;
    path.insert(path.end(), node.reads.begin(), node.reads.end());
  }
}

void Tape::unclaim_all(std::span<const StateId> states) {
  std::vector<StateId>& path = path_;
  path.assign(states.begin(), states.end());
  while (!path.empty()) {
    const StateId id = path.back();
    path.pop_back();
    State& state = states_[id];
    if (--state.readers > 0) continue;
    bytes_.end_state(id);
    // While the tape is open, kept bytes wait for readers to come.
    if (state.ours || !open_) let_go(id);
    if (!std::exchange(state.by_maker, false)) continue;
    Node& node = nodes_[state.maker];
    if (--node.num_needed > 0 || node.done) continue;
    path.insert(path.end(), node.reads.begin(), node.reads.end());
    if (!open_) clear(state.maker);
  }
}

// The state is held after all.
void Tape::forget_maker(StateId id) {
  State& state = states_[id];
  if (!std::exchange(state.by_maker, false)) return;
  Node& node = nodes_[state.maker];
  if (--node.num_needed > 0 || node.done) return;
  const std::vector<StateId> reads = node.reads;
  if (!open_) clear(state.maker);
  unclaim_all(reads);
}

void Tape::clear(NodeId id) {
  if (!nodes_[id].done) bytes_.clear_node(id);
  const bool done = nodes_[id].done;
  nodes_[id] = Node();
  nodes_[id].done = done;
}

void Tape::release(std::span<const StateId> states) {
  for (const StateId id : states) --states_[id].num_saves;
  unclaim_all(states);
}

}  // namespace memscale
