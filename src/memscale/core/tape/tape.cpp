#include "memscale/core/tape/tape.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace memscale {

Tape::Tape(TapeRules rules, TapeBytes& bytes)
    : rules_(std::move(rules)),
      bytes_(bytes),
      follows_keep_set_(rules_.keep_set != nullptr) {
  states_.reserve(kExpectedOps);
  nodes_.reserve(kExpectedOps);
}

void Tape::begin_op(const OpUse& op) {
  op_is_running_ = true;
  running_.node.clear();
  running_.written.clear();
  running_.rules = op.rules;
  running_.name = op.name;
  running_.why = op.why;
  running_.expensive = op.expensive;
  running_.depth = 0;
  holds_ = op.holds;
  for (const TensorUse& tensor : op.tensors) add_tensor(tensor, op.is_view);
}

void Tape::add_view(const TensorUse& base, bool holds) {
  holds_ = holds;
  find_state(base);  // held, if it came from outside
}

void Tape::add_tensor(const TensorUse& tensor, bool is_view) {
  if (!op_is_running_) return;
  Running& running = running_;
  Node& node = running.node;
  if (tensor.access != Access::Read) begin_write(tensor);
  if (running.why != Why::Replayed) return;
  if (is_view) {
    find_state(tensor);  // its base is held
    return;
  }
  const StateId state = read_state(tensor);
  if (states_[state].why == Why::Outside && tensor.is_foreign) {
    running.why = Why::Foreign;
    return;
  }
  if ((tensor.access == Access::Read || tensor.access == Access::Update) &&
      std::ranges::find(node.reads, state) == node.reads.end()) {
    node.reads.push_back(state);
  }
  node.references.push_back({state, tensor.access});
}

void Tape::begin_write(const TensorUse& tensor) {
  if (!op_is_running_ || is_written_now(tensor.storage)) return;
  Running& running = running_;
  const StateId old = leave_state(tensor);
  running.written.push_back(
      {tensor, old,
       static_cast<std::uint32_t>(running.node.references.size())});
}

// The state whose bytes are about to change. From here on nobody may count on
// the old ones: an op's own saves come while it runs.
StateId Tape::leave_state(const TensorUse& written) {
  const StateId old = find_state(written);
  change(old);
  lose_bytes(old);
  return old;
}

void Tape::begin_function(std::span<const TensorUse> tensors) {
  for (const TensorUse& tensor : tensors) leave_state(tensor);
}

void Tape::end_function(std::span<const TensorUse> tensors) {
  holds_ = false;
  for (const TensorUse& tensor : tensors) {
    decide_state(new_state(tensor), kNone, Why::GivenToFunction);
  }
}

bool Tape::is_written_now(StorageKey storage) const {
  return op_is_running_ &&
         std::ranges::any_of(running_.written, [&](const auto& w) {
           return w.tensor.storage == storage;
         });
}

// The state that an op is about to read: cut there, if its lineage is too long.
StateId Tape::read_state(const TensorUse& tensor) {
  const StateId id = find_state(tensor);
  State& state = states_[id];
  if (is_written_now(tensor.storage)) return id;
  if (state.why != Why::Replayed) {
    if (!state.held) hold_here(id);
    return id;
  }
  std::uint32_t depth = state.depth;
  if (state.section != section_) {
    ++depth;
    const bool is_claimed = std::ranges::find(crossing_, id) != crossing_.end();
    if (depth > kMaxDepth ||
        (!is_claimed && (!can_claim(id) || !is_worth_dropping(id)))) {
      state.why = Why::Border;
      state.depth = 0;
      hold_here(id);
      forget_maker(id);
      states_[id].maker = kNone;
      return id;
    }
    // What it is made from stays there while this layer may come to need it.
    if (!is_claimed) {
      claim(id);
      crossing_.push_back(id);
    }
  }
  if (op_is_running_) running_.depth = std::max(running_.depth, depth);
  return id;
}

// An earlier section's, and read in this one: held while that lasts.
void Tape::hold_here(StateId id) {
  if (!holds_) return;
  hold(id);
  held_here_.push_back(id);
}

StateId Tape::find_state(const TensorUse& tensor) {
  at_once_ |= tensor.changes_in_backward;
  const StateId found = current_.find(tensor.storage);
  if (found != kNone) {
    if (bytes_.is_current(found)) return found;
    // Changed by something that we did not see.
    lose_original(found);
    lose_bytes(found);
  }
  const StateId id = new_state(tensor);
  states_[id].is_leaf = tensor.is_leaf;
  decide_state(id, kNone, Why::Outside);
  return id;
}

StateId Tape::new_state(const TensorUse& tensor) {
  const auto id = static_cast<StateId>(states_.size());
  State& state = states_.emplace_back();
  state.storage = tensor.storage;
  state.float_bytes = tensor.float_bytes;
  state.on_cpu = tensor.on_cpu;
  state.section = section_;
  state.bytes = bytes_.add_state(id, tensor);
  current_.set(tensor.storage, id);
  return id;
}

void Tape::decide_state(StateId id, NodeId maker, Why why) {
  states_[id].why = why;
  if (why == Why::Replayed) {
    states_[id].maker = maker;
  } else if (holds_) {
    hold(id);
  }
}

Why Tape::why_keep(const Running& running, std::int64_t bytes,
                   std::size_t output) const {
  if (running.why != Why::Replayed) return running.why;
  if (bytes < static_cast<std::int64_t>(rules_.min_bytes)) return Why::Small;
  if (follows_keep_set_) {
    return rules_.keep_set->keeps(running.place, output) ? Why::Chosen
                                                         : Why::Replayed;
  }
  const ReplayPolicy policy =
      rules_.keep_set == nullptr ? rules_.policy : rules_.after_difference;
  if (policy != ReplayPolicy::Cheap || !running.expensive) return Why::Replayed;
  // Indices are kept too, but packed: see keep_packed.
  return running.rules->indices == output ? Why::Replayed : Why::Chosen;
}

void Tape::end_op(std::span<const TensorUse> results, bool raised) {
  if (!std::exchange(op_is_running_, false)) return;
  Running& running = running_;
  if (raised) running.why = Why::Raised;
  // An old state that nobody can make again and nobody needed so far is gone.
  for (const Written& written : running.written) {
    const State& old = states_[written.old];
    if (written.tensor.access == Access::Update && old.maker == kNone &&
        !old.ours && running.why == Why::Replayed) {
      running.why = old.why == Why::Replayed ? Why::Lost : old.why;
    }
  }
  follow_keep_set(results);
  const auto id = static_cast<NodeId>(nodes_.size());
  for (const Written& written : running.written) end_write(written, running);
  Node& node = running.node;
  for (std::uint32_t place = 0; place < results.size(); ++place) {
    const TensorUse& result = results[place];
    // One that is known is a view, or was written.
    if (result.storage == 0 || current_.find(result.storage) != kNone) continue;
    const StateId state = new_state(result);
    const Why why = why_keep(running, states_[state].bytes, place);
    decide_state(state, id, why);
    if (why != Why::Replayed) continue;
    node.results.push_back({place, state});
    states_[state].depth = running.depth;
  }
  if (!node.results.empty() || !node.writes.empty()) {
    nodes_.push_back(std::move(node));
    bytes_.add_node(id);
    if (running.rules->draws_bits || running.rules->indices) {
      keep_packed(id, *running.rules);
    }
  }
  for (const auto& [save, storage] : std::exchange(pending_, {})) {
    const StateId found = current_.find(storage);
    if (!bytes_.is_waiting(save)) continue;  // an exception took it
    if (found != kNone) {
      settle(save, found);
    } else {
      bytes_.keep_save(save, kNone, Why::Outside);
    }
  }
}

void Tape::end_write(const Written& written, Running& running) {
  const Why old = states_[written.old].why;
  const bool was_chosen =
      old == Why::Chosen || old == Why::Small || old == Why::Border;
  const StateId state = new_state(written.tensor);
  Why why = Why::Statistics;
  if (written.tensor.access != Access::Scratch) {
    why = why_keep(running, states_[state].bytes, 0);
    // The bytes were to be kept: now they are these.
    if (why == Why::Replayed && written.tensor.access == Access::Update &&
        was_chosen) {
      why = Why::Chosen;
    }
  }
  decide_state(state, static_cast<NodeId>(nodes_.size()), why);
  if (why != Why::Replayed) return;
  running.node.writes.push_back({written.reference, state});
  states_[state].depth = running.depth;
}

// See Note [Ops of a keep set].
void Tape::follow_keep_set(std::span<const TensorUse> results) {
  if (!follows_keep_set_) return;
  const KeepSet& set = *rules_.keep_set;
  running_.place = set.find(running_.name, next_op_);
  if (running_.place < set.ops.size()) {
    next_op_ = running_.place + 1;
    return;
  }
  const auto is_new = [&](const TensorUse& result) {
    return result.storage != 0 && current_.find(result.storage) == kNone;
  };
  const bool makes_bytes =
      !running_.written.empty() || std::ranges::any_of(results, is_new);
  follows_keep_set_ = !makes_bytes || find_op_row(running_.name).makes_nothing;
}

// Results held in fewer bits, without loss, where making them again is slow.
//
// On the CPU, drawing dropout's zeros and ones again costs as much as a matmul
// of that size (10 ns an element, against 0.5 for this), and a bit is 1/32 of
// the bytes; a max pooling's indices take half. On cards both are cheap to
// make: there they are replayed as any other result.
void Tape::keep_packed(NodeId id, const ReplayRules& rules) {
  Node& node = nodes_[id];
  if (rules.draws_bits && node.writes.size() == 1 && node.results.empty()) {
    const Made& drawn = node.writes.front();
    const State& state = states_[drawn.state];
    if (node.references[drawn.place].access == Access::Overwrite &&
        state.on_cpu && state.float_bytes > 0 && state.bytes > 0) {
      node.packed = bytes_.pack(id, drawn.state, Packing::Bits);
    }
  }
  // Alone: if its other result has to be replayed, so can be the indices.
  if (rules.indices && node.results.size() == 1 &&
      node.results.front().place == *rules.indices) {
    const StateId made = node.results.front().state;
    const State& indexed = states_[node.references.front().state];
    // They index a part of the first argument, so they are less than its bytes.
    if (states_[made].on_cpu && states_[made].bytes > 0 &&
        indexed.bytes <= std::numeric_limits<std::int32_t>::max()) {
      node.packed = bytes_.pack(id, made, Packing::HalfIndices);
      if (node.packed) node.reads.clear();
    }
  }
}

}  // namespace memscale
