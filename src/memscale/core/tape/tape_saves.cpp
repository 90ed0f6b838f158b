// What becomes of saves, and of states when they are written, when a layer ends
// and when the call does.

#include <utility>

#include "memscale/core/tape/tape.h"

namespace memscale {

bool Tape::spans_layers() const {
  return rules_.policy == ReplayPolicy::Cheap && rules_.keep_set == nullptr &&
         !at_once_;
}

void Tape::cross_border() {
  ++section_;
  unclaim_all(std::exchange(crossing_, {}));
  const auto let_go_unread = [&](StateId id) {
    if (states_[id].readers == 0 && !states_[id].ours) let_go(id);
  };
  for (const StateId id : std::exchange(held_here_, {})) let_go_unread(id);
  for (StateId id = first_of_section_; id < states_.size(); ++id) {
    let_go_unread(id);
  }
  first_of_section_ = static_cast<StateId>(states_.size());
}

bool Tape::decide(SaveKey save, StorageKey storage) {
  const StateId found = current_.find(storage);
  if (op_is_running_ && (found == kNone || is_written_now(storage))) {
    pending_.emplace_back(save, storage);
    return false;
  }
  if (found == kNone || !bytes_.is_current(found)) {
    bytes_.keep_save(save, kNone, Why::Outside);
    return true;
  }
  settle(save, found);
  return states_[found].why == Why::Outside;
}

void Tape::settle(SaveKey save, StateId id) {
  Why why = states_[id].why;
  if (why == Why::Replayed && !can_claim(id)) why = Why::Lost;
  // With one save that holds it, another gains nothing by dropping.
  if (why == Why::Replayed &&
      (states_[id].is_saved || !is_worth_dropping(id))) {
    why = Why::NoGain;
    undecided_.emplace_back(save, id);
  }
  if (why == Why::Replayed) return drop(save, id);
  states_[id].is_saved = true;
  bytes_.keep_save(save, id, why);
}

void Tape::drop(SaveKey save, StateId id) {
  claim(id);
  ++states_[id].num_saves;
  bytes_.drop_save(save, id);
}

void Tape::add_output(StorageKey storage) {
  const StateId found = current_.find(storage);
  if (found != kNone) states_[found].is_output = true;
}

void Tape::decide_again() {
  for (const auto& [save, id] : std::exchange(undecided_, {})) {
    State& state = states_[id];
    state.is_saved = false;
    // Held: others are made from it. Without its original: that was written
    // since, perhaps through .data, and then the save sees the new bytes.
    if (!bytes_.is_waiting(save) || state.held || !state.original ||
        !bytes_.is_alive(id) || !can_claim(id) || !is_worth_dropping(id)) {
      states_[id].is_saved = true;
      continue;
    }
    drop(save, id);
  }
}

std::vector<Tape::Claim> Tape::close() {
  open_ = false;
  unclaim_all(std::exchange(crossing_, {}));
  op_is_running_ = false;
  for (const auto& [save, storage] : std::exchange(pending_, {})) {
    bytes_.keep_save(save, kNone, Why::Outside);
  }
  current_.clear();
  undecided_.clear();
  std::vector<Claim> claims;
  for (StateId id = 0; id < states_.size(); ++id) {
    const State& state = states_[id];
    if (state.readers == 0) {
      let_go(id);
      lose_original(id);
    } else if (state.original && bytes_.is_alive(id)) {
      claims.push_back({state.storage, id});
    }
  }
  for (NodeId id = 0; id < nodes_.size(); ++id) {
    if (nodes_[id].num_needed == 0) clear(id);
  }
  drop_spare_room(states_);
  drop_spare_room(nodes_);
  return claims;
}

void Tape::change(StateId id) {
  if (states_[id].num_saves > 0) bytes_.show_writes(id);
  copy_out(id);
}

void Tape::copy_out(StateId id) {
  lose_original(id);
  State& state = states_[id];
  if (state.readers == 0 || !state.held || state.ours) return;
  const bool copied = has_bytes(id) && bytes_.copy_out(id);
  if (copied) {
    states_[id].ours = true;
  } else {
    let_go(id);
    states_[id].lost = true;
  }
}

void Tape::lose_original(StateId id) {
  if (std::exchange(states_[id].original, false)) bytes_.lose_original(id);
}

// What is not our own is not to be had any more.
void Tape::lose_bytes(StateId id) {
  if (states_[id].ours) return;
  let_go(id);
  states_[id].lost |= states_[id].maker == kNone;
}

void Tape::before_write(StateId id) { change(id); }

void Tape::write_aside(StorageKey storage) {
  const StateId found = current_.find(storage);
  if (found == kNone || is_written_now(storage)) return;
  change(found);
  lose_bytes(found);
  // Its bytes are anybody's now, and its address may come to be another's.
  current_.set(storage, kNone);
}

bool Tape::needs_original(StateId id) const {
  const State& state = states_[id];
  // Saves that wait see what becomes of the original, even if it was replayed.
  return state.readers > 0 && state.original && bytes_.is_alive(id) &&
         (!state.ours || state.num_saves > 0);
}

void Tape::offer(StateId id) {
  const State& state = states_[id];
  if (state.readers == 0 || state.held || !state.original ||
      !bytes_.has_original(id) || !hold(id)) {
    return;
  }
  forget_maker(id);
}

}  // namespace memscale
