#include "memscale/core/predicted_tape.h"

#include <algorithm>
#include <limits>

#include "memscale/core/ops/op_cost.h"

namespace memscale {
namespace {

// Whether it is dense and reaches every element of a storage of this size.
bool covers(const Value& value, Bytes bytes) {
  std::int64_t last = 0;  // the farthest element
  for (std::size_t i = 0; i < value.strides.size(); ++i) {
    last += (value.sizes[i] - 1) * value.strides[i];
  }
  const std::int64_t numel = value.numel();
  return value.offset == 0 && last + 1 == numel &&
         numel * itemsize_of(value.dtype) == bytes.count();
}

bool is_packable(Dtype dtype) {
  return is_half(dtype) || dtype == Dtype::Float32 || dtype == Dtype::Float64;
}

}  // namespace

PredictedTape::PredictedTape(const TapeRules& rules, PredictedStep& step)
    : rules_(rules),
      step_(step),
      follows_keep_set_(rules.keep_set != nullptr) {}

PredictedTape::Why PredictedTape::why_not(const Op& op,
                                          const ReplayRules& rules) const {
  if (op.in_function || !rules.never.empty() || rules.is_factory) {
    return Why::Never;
  }
  if (why_not_on(step_.target, rules,
                 is_transposed_convolution(step_.plain, op)) != nullptr) {
    return Why::Never;
  }
  const bool plain = std::ranges::all_of(op.inputs, [&](ValueId input) {
    return step_.plain.at(input).storage.valid();
  });
  return plain ? Why::Replayed : Why::Never;
}

bool PredictedTape::is_expensive(const Op& op, const ReplayRules& rules) const {
  const auto& inputs = op.inputs;
  if (rules.slow_on_cpu && !inputs.empty()) {
    const StorageId first = step_.plain.at(inputs[0]).storage;
    if (first.valid() && is_on_cpu(first)) return true;
  }
  if (rules.work == Work::Little) return false;
  if (rules.work == Work::Much || rules.factor >= inputs.size()) return true;
  const Value& factor = step_.plain.at(inputs[rules.factor]);
  const std::int64_t numel = factor.numel();
  if (factor.sizes.empty() || numel == 0) return true;
  const std::int64_t multiplications = rules.work == Work::Matmul
                                           ? factor.sizes.back()
                                           : numel / factor.sizes.front();
  return is_worth_keeping(multiplications, itemsize_of(factor.dtype));
}

// A trace tells writes by the versions of results. Of running statistics it
// does not: they are the buffers of a normalisation that gives statistics.
PredictedTape::Access PredictedTape::access_of(const Op& op, const Value& value,
                                               const ReplayRules& rules) const {
  const Trace& plain = step_.plain;
  if (op.may_write) return Access::Update;
  if (rules.updates_statistics &&
      plain.at(value.storage).category == Category::Buffer) {
    const bool trains = std::ranges::any_of(
        op.outputs.begin() +
            std::min<std::ptrdiff_t>(1, std::ssize(op.outputs)),
        op.outputs.end(),
        [&](ValueId output) { return plain.at(output).numel() > 0; });
    return trains ? Access::Scratch : Access::Read;
  }
  const bool is_written = std::ranges::any_of(op.outputs, [&](ValueId output) {
    const Value& result = plain.at(output);
    return result.storage == value.storage && result.version > value.version;
  });
  if (!is_written) return Access::Read;
  const auto num_uses = std::ranges::count_if(op.inputs, [&](ValueId input) {
    return plain.at(input).storage == value.storage;
  });
  return rules.overwrites && num_uses == 1 &&
                 covers(value, plain.at(value.storage).bytes)
             ? Access::Overwrite
             : Access::Update;
}

void PredictedTape::begin_op(OpId id) {
  const Op& op = step_.plain.at(id);
  const ReplayRules& rules = rules_of(id);
  Running& running = running_.emplace();
  running.node.op = id;
  running.why = why_not(op, rules);
  running.expensive = is_expensive(op, rules);
  holds_ = !op.no_grad && !op.in_function;
  // By its schema this one returns something new.
  const bool is_view = op.view && op.name != "aten::_unsafe_view";
  for (const ValueId input : op.inputs) {
    const Value& value = step_.plain.at(input);
    if (!value.storage.valid()) continue;
    add_tensor(running, input, access_of(op, value, rules), is_view);
  }
}

void PredictedTape::add_tensor(Running& running, ValueId id, Access access,
                               bool is_view) {
  Node& node = running.node;
  const Value& value = step_.plain.at(id);
  if (access != Access::Read && access != Access::Scratch &&
      !is_written_now(value.storage)) {
    const StateId old = find_state(value);
    State& state = states_[old];
    copy_out(state);
    if (!state.ours) {
      bury(state);
      state.lost = state.maker == kNone;
    }
    running.written.push_back(
        {value.storage, old, access,
         static_cast<std::uint32_t>(node.references.size())});
  }
  if (running.why != Why::Replayed) return;
  if (is_view) {
    find_state(value);  // its base is held
    return;
  }
  const StateId state = read_state(running, value);
  if ((access == Access::Read || access == Access::Update) &&
      std::ranges::find(node.reads, state) == node.reads.end()) {
    node.reads.push_back(state);
  }
  node.references.push_back({id, access, state});
}

PredictedTape::StateId PredictedTape::read_state(Running& running,
                                                 const Value& value) {
  const StateId id = find_state(value);
  State& state = states_[id];
  if (is_written_now(value.storage)) return id;
  if (state.why != Why::Replayed) {
    if (!state.held.valid()) hold_here(id);
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
      forget_maker(state);
      state.maker = kNone;
      return id;
    }
    if (!is_claimed) {
      claim(id);
      crossing_.push_back(id);
    }
  }
  running.depth = std::max(running.depth, depth);
  return id;
}

void PredictedTape::hold_here(StateId id) {
  if (!holds_) return;
  hold(states_[id], states_[id].storage);
  held_here_.push_back(id);
}

bool PredictedTape::is_written_now(StorageId storage) const {
  return running_ && std::ranges::any_of(running_->written, [&](const auto& w) {
           return w.storage == storage;
         });
}

PredictedTape::StateId PredictedTape::find_state(const Value& value) {
  const auto found = current_.find(value.storage);
  if (found != current_.end()) {
    State& state = states_[found->second];
    if (is_current(state)) return found->second;
    copy_out(state);  // a custom Function may have written it
    if (!state.ours) state.lost = state.maker == kNone;
    if (!state.ours) bury(state);
  }
  const StateId state =
      new_state(value.storage, value.version, kNone, Why::Outside);
  states_[state].is_leaf = !step_.has_history[value.storage.index()];
  return state;
}

PredictedTape::StateId PredictedTape::new_state(StorageId storage,
                                                std::uint32_t version,
                                                NodeId maker, Why why) {
  const auto id = static_cast<StateId>(states_.size());
  State& state = states_.emplace_back();
  state.storage = storage;
  state.version = version;
  state.why = why;
  state.section = section_;
  current_[storage] = id;
  if (why == Why::Replayed) {
    state.maker = maker;
  } else if (holds_) {
    hold(state, storage);
  }
  return id;
}

PredictedTape::Why PredictedTape::why_keep(const Running& running,
                                           StorageId storage,
                                           std::size_t output) {
  if (running.why != Why::Replayed) return running.why;
  const Bytes bytes = step_.plain.at(storage).bytes;
  if (bytes.count() < static_cast<std::int64_t>(rules_.min_bytes)) {
    return Why::Small;
  }
  if (follows_keep_set_) {
    return rules_.keep_set->keeps(num_ops_, output) ? Why::Chosen
                                                    : Why::Replayed;
  }
  const bool by_work =
      rules_.policy == ReplayPolicy::Cheap || rules_.keep_set != nullptr;
  if (!by_work || !running.expensive) return Why::Replayed;
  return rules_of(running.node.op).indices == output ? Why::Replayed
                                                     : Why::Chosen;
}

void PredictedTape::end_op() {
  if (!running_) return;
  Running running = std::move(*running_);
  running_.reset();
  Node& node = running.node;
  const Op& op = op_of(node);
  for (const Written& written : running.written) {
    const State& old = states_[written.old];
    if (written.access == Access::Update && old.maker == kNone && !old.ours &&
        running.why == Why::Replayed) {
      running.why = Why::Never;
    }
  }
  follow_keep_set(op);
  const auto id = static_cast<NodeId>(nodes_.size());
  for (const Written& written : running.written) end_write(written, running);
  for (std::uint32_t place = 0; place < op.outputs.size(); ++place) {
    const Value& output = step_.plain.at(op.outputs[place]);
    if (!output.storage.valid() || current_.contains(output.storage)) continue;
    const Why why = why_keep(running, output.storage, place);
    const StateId state = new_state(output.storage, output.version, id, why);
    if (why != Why::Replayed) continue;
    node.results.push_back({place, state});
    states_[state].depth = running.depth;
  }
  if (!node.results.empty() || !node.writes.empty()) {
    keep_packed(node);
    nodes_.push_back(std::move(node));
  }
  ++num_ops_;
  for (const std::size_t save : std::exchange(pending_, {})) {
    const Value& value = step_.plain.at(step_.plain.saves[save].value);
    const auto found = current_.find(value.storage);
    if (found != current_.end()) settle(save, found->second);
  }
}

void PredictedTape::follow_keep_set(const Op& op) {
  if (!follows_keep_set_) return;
  const auto& ops = rules_.keep_set->ops;
  follows_keep_set_ = num_ops_ < ops.size() && ops[num_ops_] == op.name;
}

void PredictedTape::end_write(const Written& written, Running& running) {
  const Why old = states_[written.old].why;
  const bool was_chosen =
      old == Why::Chosen || old == Why::Small || old == Why::Border;
  Why why = why_keep(running, written.storage, 0);
  if (why == Why::Replayed && written.access == Access::Update && was_chosen) {
    why = Why::Chosen;
  }
  const StateId state =
      new_state(written.storage, step_.versions[written.storage.index()],
                static_cast<NodeId>(nodes_.size()), why);
  if (why != Why::Replayed) return;
  running.node.writes.push_back({written.reference, state});
  states_[state].depth = running.depth;
}

void PredictedTape::keep_packed(Node& node) {
  const ReplayRules& rules = rules_of(node.op);
  if (rules.draws_bits && node.writes.size() == 1 && node.results.empty()) {
    const Reference& reference = node.references[node.writes.front().place];
    const State& state = states_[node.writes.front().state];
    const Dtype dtype = step_.plain.at(reference.value).dtype;
    if (reference.access == Access::Overwrite && is_packable(dtype) &&
        is_on_cpu(state.storage) && bytes_of(state) > Bytes()) {
      pack(node, Bytes((bytes_of(state).count() / itemsize_of(dtype) + 7) / 8));
    }
  }
  if (rules.indices && node.results.size() == 1 &&
      node.results.front().place == *rules.indices) {
    const State& state = states_[node.results.front().state];
    const State& indexed = states_[node.references.front().state];
    if (is_on_cpu(state.storage) && bytes_of(state) > Bytes() &&
        bytes_of(indexed).count() <= std::numeric_limits<std::int32_t>::max()) {
      pack(node, bytes_of(state) / 2);
      node.reads.clear();
    }
  }
}

void PredictedTape::pack(Node& node, Bytes bytes) {
  const Storage& storage = step_.plain.at(
      states_[(node.writes.empty() ? node.results : node.writes).front().state]
          .storage);
  node.packed = step_.holders.make(bytes, storage.place, Category::Activation,
                                   storage.layer);
}

}  // namespace memscale
