// What becomes of saves, and of states when a layer or the call ends.

#include <utility>

#include "memscale/runtime/op_info.h"
#include "memscale/runtime/saved_tensor.h"
#include "memscale/runtime/tape.h"
#include "memscale/runtime/tape_lock.h"
#include "memscale/runtime/tape_reasons.h"

namespace memscale {

bool Tape::spans_layers() {
  const Locked lock(*this);
  return rules_.policy == ReplayPolicy::Cheap && rules_.keep_set == nullptr &&
         !at_once_;
}

void Tape::cross_border() {
  const Locked lock(*this);
  ++section_;
  unclaim_all(std::exchange(crossing_, {}));
  const auto let_go = [&](StateId id) {
    State& state = states_[id];
    if (state.readers == 0 && !state.ours) bury(state.held);
  };
  for (const StateId id : std::exchange(held_here_, {})) let_go(id);
  for (StateId id = first_of_section_; id < states_.size(); ++id) let_go(id);
  first_of_section_ = static_cast<StateId>(states_.size());
}

bool Tape::decide(const at::Tensor& tensor,
                  const std::shared_ptr<SavedTensor>& save) {
  const Locked lock(*this, std::try_to_lock);
  if (!lock) {
    ++stats_->saves_kept;
    return false;
  }
  const c10::StorageImpl* storage = storage_of(tensor);
  const auto found = current_.find(storage);
  const bool known = found != current_.end();
  if (running_ && (!known || is_written_now(storage))) {
    pending_.push_back(save);
    return false;
  }
  if (!known || !is_current(states_[found->second])) {
    ++stats_->saves_kept;
    return true;
  }
  settle(save, found->second);
  return states_[found->second].why == kOutside;
}

void Tape::settle(const std::shared_ptr<SavedTensor>& save, StateId id) {
  State& state = states_[id];
  const char* why = state.why;
  if (why == nullptr && !can_claim(id)) why = kLost;
  // With one save that holds it, another gains nothing by dropping.
  if (why == nullptr && (state.is_saved || !is_worth_dropping(id))) {
    why = kNoGain;
    undecided_.emplace_back(save, id);
  }
  if (why == nullptr) {
    claim(id);
    ++state.num_saves;
    save->drop(shared_from_this(), id);
    ++stats_->saves_dropped;
    if (!state.counted) stats_->bytes_dropped += state.bytes;
  } else {
    state.is_saved = true;
    ++stats_->saves_kept;
    if (!state.counted) stats_->bytes_kept += state.bytes;
    if (is_notable(why)) {
      stats_->count_reason(state.op == nullptr ? why
                                               : state.op->name + ": " + why);
    }
  }
  state.counted = true;
}

void Tape::add_output(const at::Tensor& tensor) {
  const Locked lock(*this);
  const auto found = current_.find(storage_of(tensor));
  if (found != current_.end()) states_[found->second].is_output = true;
}

void Tape::decide_again() {
  const Locked lock(*this);
  for (const auto& [weak, id] : std::exchange(undecided_, {})) {
    const std::shared_ptr<SavedTensor> save = weak.lock();
    State& state = states_[id];
    state.is_saved = false;
    // Held: others are made from it. Without its original: that was written
    // since, perhaps through .data, and then the save sees the new bytes.
    if (save == nullptr || state.held || state.original.use_count() == 0 ||
        !can_claim(id) || !is_worth_dropping(id)) {
      state.is_saved = true;
      continue;
    }
    if (state.num_saves == 0) {
      stats_->bytes_dropped += state.bytes;
      stats_->bytes_kept -= state.bytes;
    }
    claim(id);
    ++state.num_saves;
    save->drop(shared_from_this(), id);
    ++stats_->saves_dropped;
    --stats_->saves_kept;
  }
}

std::vector<Tape::Claim> Tape::close() {
  const Locked lock(*this);
  open_ = false;
  unclaim_all(std::exchange(crossing_, {}));
  running_.reset();
  stats_->saves_kept += pending_.size();
  pending_.clear();
  current_.clear();
  std::vector<Claim> claims;
  for (StateId id = 0; id < states_.size(); ++id) {
    State& state = states_[id];
    if (state.readers == 0) {
      bury(state.held);
      state.original = WeakStoragePtr(StoragePtr());
    } else if (StoragePtr storage = state.original.lock()) {
      claims.push_back({std::move(storage), id});
    }
  }
  for (Node& node : nodes_) {
    if (node.num_needed == 0) node = Node();
  }
  return claims;
}

bool Tape::needs_original(StateId id) {
  const Locked lock(*this, std::try_to_lock);
  if (!lock) return true;  // it is being replayed
  const State& state = states_[id];
  // Saves that wait see what becomes of the original, even if it was replayed.
  return state.readers > 0 && state.original.use_count() > 0 &&
         (!state.ours || state.num_saves > 0);
}

void Tape::offer(StateId id, const StoragePtr& storage) {
  const Locked lock(*this, std::try_to_lock);
  if (!lock) return;
  State& state = states_[id];
  if (state.readers == 0 || state.held || !is_current(state)) return;
  if (state.original.lock() != storage || !is_whole(state, *storage)) return;
  state.held = storage;
  forget_maker(state);
}

c10::Device Tape::device_of(StateId state) {
  const Locked lock(*this);
  return states_[state].device;
}

}  // namespace memscale
