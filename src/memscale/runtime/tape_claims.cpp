// Who needs which state, and what is let go with its last reader. None of this
// recurses: lineages can be tens of thousands of ops deep.

#include <utility>

#include "memscale/runtime/tape.h"
#include "memscale/runtime/tape_lock.h"

namespace memscale {

// Whether its bytes can be had without replaying anything.
bool Tape::is_there(const State& state) const {
  if (has_bytes(state)) return true;
  if ((state.maker != kNone && !state.is_saved) || state.lost ||
      !is_current(state)) {
    return false;
  }
  const StoragePtr storage = state.original.lock();
  return storage && is_whole(state, *storage);
}

// Whether all that its lineage rests on is still there.
bool Tape::can_claim(StateId id) {
  ++num_searches_;
  std::vector<StateId> path = {id};
  while (!path.empty()) {
    const State& state = states_[path.back()];
    path.pop_back();
    if (state.readers > 0 || is_there(state)) continue;
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
  std::size_t more = 0;
  std::vector<StateId> path = {id};
  while (!path.empty()) {
    const State& state = states_[path.back()];
    path.pop_back();
    if (state.readers > 0) continue;
    if (is_there(state)) {
      if (!state.is_saved && !state.is_output && !state.is_leaf) {
        more += state.bytes;
      }
      continue;
    }
    Node& node = nodes_[state.maker];
    if (std::exchange(node.search, num_searches_) == num_searches_) continue;
    path.insert(path.end(), node.reads.begin(), node.reads.end());
  }
  return more < states_[id].bytes;
}

void Tape::claim(StateId id) {
  std::vector<StateId> path = {id};
  while (!path.empty()) {
    State& state = states_[path.back()];
    path.pop_back();
    if (state.readers++ > 0 || has_bytes(state)) continue;
    if (is_there(state)) state.held = state.original.lock();
    if (has_bytes(state)) continue;
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

void Tape::unclaim_all(std::vector<StateId> path) {
  while (!path.empty()) {
    State& state = states_[path.back()];
    path.pop_back();
    if (--state.readers > 0) continue;
    bury(state.changed);
    // While the tape is open, kept bytes wait for readers to come.
    if (state.ours) {
      state.held.reset();
    } else if (!open_) {
      bury(state.held);
    }
    if (!std::exchange(state.by_maker, false)) continue;
    Node& node = nodes_[state.maker];
    if (--node.num_needed > 0 || node.done) continue;
    path.insert(path.end(), node.reads.begin(), node.reads.end());
    if (!open_) node = Node();
  }
}

// The state is held after all.
void Tape::forget_maker(State& state) {
  if (!std::exchange(state.by_maker, false)) return;
  Node& node = nodes_[state.maker];
  if (--node.num_needed > 0 || node.done) return;
  unclaim_all(node.reads);
}

void Tape::bury(StoragePtr& storage) {
  if (storage) buried_.push_back(std::move(storage));
  storage.reset();
}

void Tape::release(StateId state) noexcept {
  {
    const std::lock_guard lock(queue_mutex_);
    queue_.push_back(state);
    ++num_queued_;
  }
  drain();
}

// Note [Releasing never waits]
// A save ends wherever its last owner does: in any thread, with or without the
// GIL, even inside a replay of this very tape (a kernel in Python lets the
// garbage collector run). So releases are queued; whoever can lock the tape
// does them, and whoever has it locked does them afterwards.
void Tape::drain() noexcept {
  while (num_queued_ > 0 && owner_ != std::this_thread::get_id() &&
         mutex_.try_lock()) {
    owner_ = std::this_thread::get_id();
    std::vector<StateId> released;
    {
      const std::lock_guard lock(queue_mutex_);
      released.swap(queue_);
      num_queued_ -= released.size();
    }
    for (const StateId state : released) --states_[state].num_saves;
    unclaim_all(std::move(released));
    const auto buried = std::exchange(buried_, {});
    owner_ = std::thread::id();
    mutex_.unlock();
  }
}

}  // namespace memscale
