// What a write does to the states of a tape: the old one is left, and copied if
// it is needed; a new one begins. See Note [Unseen writes].

#include <algorithm>
#include <utility>

#include "memscale/runtime/op_info.h"
#include "memscale/runtime/tape.h"
#include "memscale/runtime/tape_lock.h"
#include "memscale/runtime/tape_reasons.h"
#include "memscale/runtime/tensor_kinds.h"

namespace memscale {

void Tape::begin_write(const at::Tensor& tensor, Access access) {
  Running& running = *running_;
  if (!is_plain(*tensor.unsafeGetTensorImpl()) ||
      is_written_now(storage_of(tensor))) {
    return;
  }
  const StateId old = leave_state(tensor);
  running.written.push_back(
      {alias_of(tensor), old, access,
       static_cast<std::uint32_t>(running.node.references.size())});
}

// The state whose bytes are about to change. From here on nobody may count on
// the old ones: an op's own saves come while it runs.
Tape::StateId Tape::leave_state(const at::Tensor& written) {
  const StateId old = find_state(written);
  State& state = states_[old];
  change(state, own_storage(written));
  if (!state.ours) {
    bury(state.held);
    state.lost = state.maker == kNone;
  }
  return old;
}

void Tape::begin_function(c10::ArrayRef<at::Tensor> arguments) {
  const Locked lock(*this);
  for (const at::Tensor& tensor : arguments) leave_state(tensor);
}

void Tape::end_function(c10::ArrayRef<at::Tensor> arguments) {
  const Locked lock(*this);
  holds_ = false;
  for (const at::Tensor& tensor : arguments) {
    new_state(tensor, nullptr, kNone, kGivenToFunction);
  }
}

bool Tape::is_written_now(const c10::StorageImpl* storage) const {
  return running_ && std::ranges::any_of(running_->written, [&](const auto& w) {
           return storage_of(w.tensor) == storage;
         });
}

void Tape::end_write(const Written& written, const OpInfo& info,
                     Running& running) {
  const State& old = states_[written.old];
  const bool was_chosen =
      old.why == kChosen || old.why == kSmall || old.why == kBorder;
  const char* why = kStatistics;
  if (written.access != Access::Scratch) {
    why = why_keep(running, storage_of(written.tensor)->nbytes(), 0);
    // The bytes were to be kept: now they are these.
    if (why == nullptr && written.access == Access::Update && was_chosen) {
      why = kChosen;
    }
  }
  const StateId state =
      new_state(written.tensor, &info, static_cast<NodeId>(nodes_.size()), why);
  if (why == nullptr) {
    running.node.writes.push_back({written.reference, state});
    states_[state].depth = running.depth;
  }
}

void Tape::change(State& state, const StoragePtr& written) {
  if (state.num_saves > 0) state.changed = written;
  copy_out(state);
}

void Tape::copy_out(State& state) {
  state.original = WeakStoragePtr(StoragePtr());
  if (state.readers == 0 || !state.held || state.ours) return;
  StoragePtr copy;
  try {
    if (has_bytes(state)) {
      use_here(state);
      copy = clone_storage(state.held);
      state.stream = current_stream(state.device);
    }
  } catch (const std::exception&) {  // no memory for it
  }
  bury(state.held);
  state.held = std::move(copy);
  state.ours = state.held != nullptr;
  state.lost = !state.ours;
  if (state.ours) stats_->bytes_copied += state.bytes;
}

void Tape::before_write(StateId state, const StoragePtr& storage) {
  const Locked lock(*this);
  change(states_[state], storage);
}

void Tape::write_aside(const StoragePtr& storage) {
  const Locked lock(*this);
  const auto found = current_.find(storage.get());
  if (found == current_.end() || is_written_now(storage.get())) return;
  State& state = states_[found->second];
  change(state, storage);
  if (!state.ours) {
    bury(state.held);
    state.lost = state.maker == kNone;
  }
  // Its bytes are anybody's now, and its address may come to be another's.
  current_.erase(found);
}

}  // namespace memscale
