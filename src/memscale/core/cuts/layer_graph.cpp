#include "memscale/core/cuts/layer_graph.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "memscale/base/error.h"
#include "memscale/base/wide.h"
#include "memscale/core/predict/trace_uses.h"
#include "memscale/core/tape/tape.h"

namespace memscale {
namespace {

constexpr auto kMaxSum = static_cast<std::int64_t>(power_of_two(50));

// There before the step and after it, whoever reads it.
bool is_leaf(const Storage& storage) {
  return storage.category != Category::Activation &&
         storage.category != Category::Transient;
}

// TapeBytes without memory: a tape's states become the graph's, with the same
// numbers. It holds whatever it is asked to, and nobody ever reads it.
class GraphBytes final : public TapeBytes {
 public:
  struct State {
    StorageId storage;
    std::uint32_t version;
    std::int64_t bytes;
    std::uint8_t float_bytes;
    bool is_overwritten = false;
  };

  GraphBytes(const TraceVersions& versions, Bytes granularity,
             LayerGraph& graph)
      : versions_(versions), granularity_(granularity), graph_(graph) {}

  const std::vector<State>& states() const { return states_; }
  // By node: the op of the graph that it stands for.
  const std::vector<std::size_t>& nodes() const { return nodes_; }

  std::int64_t add_state(StateId /*state*/, const TensorUse& tensor) override {
    const StorageId storage = TraceUses::storage(tensor.storage);
    states_.push_back(
        {storage, versions_.of(storage), tensor.bytes, tensor.float_bytes});
    graph_.states.push_back(
        {.bytes = round_up(Bytes(tensor.bytes), granularity_)});
    return tensor.bytes;
  }
  bool is_current(StateId state) const override {
    return versions_.of(states_[state].storage) == states_[state].version;
  }
  bool has_original(StateId state) const override { return is_current(state); }
  void lose_original(StateId state) override {
    states_[state].is_overwritten = true;
  }
  void add_node(NodeId /*node*/) override {
    nodes_.push_back(graph_.ops.size() - 1);
  }
  // A bit for each element, and half a nanosecond to read it.
  bool pack(NodeId node, StateId result, Packing packing) override {
    if (packing != Packing::Bits) return false;
    const State& drawn = states_[result];
    const std::int64_t numel = drawn.bytes / drawn.float_bytes;
    LineageOp& op = graph_.ops[nodes_[node]];
    op.packed = round_up(Bytes((numel + 7) / 8), granularity_);
    op.nanoseconds = std::min(op.nanoseconds, numel / 2);
    return true;
  }

  bool is_alive(StateId /*state*/) const override { return true; }
  bool is_whole(StateId /*state*/) const override { return true; }
  bool hold(StateId /*state*/) override { return true; }
  bool copy_out(StateId /*state*/) override { return true; }
  void let_go(StateId /*state*/) override {}
  void show_writes(StateId /*state*/) override {}
  void end_state(StateId /*state*/) override {}
  void clear_node(NodeId /*node*/) override {}
  void unpack(NodeId /*node*/, StateId /*result*/) override {}
  void run(NodeId /*node*/, std::span<const Destination> /*targets*/,
           std::span<const Made> /*written*/,
           std::span<const Made> /*results*/) override {}
  bool is_waiting(SaveKey /*save*/) const override { return true; }
  void drop_save(SaveKey /*save*/, StateId /*state*/) override {}
  void keep_save(SaveKey /*save*/, StateId /*state*/, Why /*why*/) override {}
  [[noreturn]] void fail(StateId /*state*/,
                         Failure /*failure*/) const override {
    throw InternalError("a layer's graph was asked for bytes; it has none");
  }

 private:
  const TraceVersions& versions_;
  const Bytes granularity_;
  LayerGraph& graph_;
  std::vector<State> states_;
  std::vector<std::size_t> nodes_;
};

// Runs a layer's call on a tape that keeps nothing that can be made again, and
// reads the graph off it. The tape is not told of saves: what can be made again
// must not depend on what is chosen.
class Builder {
 public:
  Builder(const Trace& trace, std::span<const OpId> run,
          const GraphRules& rules);
  void add_op(OpId id, std::int64_t nanoseconds);
  LayerGraph finish();

 private:
  void find_saves(std::span<const OpId> run);
  void tell_functions(OpId before);
  // Null: the op that runs does not write it.
  const TensorUse* find_written(StorageId storage) const;
  void name_results(std::size_t first_state, std::span<const ValueId> outputs);
  void halve_indices(const Op& traced, const ReplayRules& known);
  bool is_held_anyway(std::size_t state) const;

  const Trace& trace_;
  const GraphRules& rules_;
  std::size_t num_forward_ = 0;  // ops before the first of backward
  std::unordered_map<OpId, std::vector<StorageId>> saves_;  // of the run's ops
  std::unordered_set<StorageId> held_;
  std::size_t next_event_ = 0;
  LayerGraph graph_;
  TraceVersions versions_;
  TraceUses uses_;
  GraphBytes bytes_;
  Tape tape_;
  std::vector<TensorUse> written_;  // by the op that runs
  std::vector<StateId> updated_;    // states that a write has read
  // Saves of what no op that can be repeated has read or made so far.
  std::set<StorageId> saved_early_;
};

Builder::Builder(const Trace& trace, std::span<const OpId> run,
                 const GraphRules& rules)
    : trace_(trace),
      rules_(rules),
      held_(rules.held_elsewhere.begin(), rules.held_elsewhere.end()),
      versions_(trace),
      uses_(trace, rules.on_cpu,
            {.on_cuda = rules.on_cuda, .benchmarks = rules.benchmarks}),
      bytes_(versions_, rules.granularity, graph_),
      tape_({.policy = ReplayPolicy::Block,
             .min_bytes = static_cast<std::size_t>(rules.min_bytes.count())},
            bytes_) {
  for (const OpId op : run) trace_.at(op);  // throws if it points nowhere
  const auto after_forward = std::ranges::find_if(
      trace_.ops, [](const Op& op) { return op.phase != Phase::Forward; });
  num_forward_ = static_cast<std::size_t>(after_forward - trace_.ops.begin());
  if (!run.empty()) find_saves(run);
}

// Those of the run. And a save of an earlier layer that did not make the
// storage itself holds it until after this layer's backward. (A later layer's
// lets go before.)
void Builder::find_saves(std::span<const OpId> run) {
  for (const OpId op : run) saves_[op];
  for (const Save& save : trace_.saves) {
    const StorageId id = trace_.at(save.value).storage;
    if (!save.op.valid() || !id.valid()) continue;
    const auto own = saves_.find(save.op);
    if (own == saves_.end()) {
      const LayerId layer = trace_.at(save.op).layer;
      if (save.op < run.front() && layer.valid() &&
          layer != trace_.at(id).layer) {
        held_.insert(id);
      }
      continue;
    }
    // Let go before backward: nobody will ask for it.
    if (save.released.valid() && save.released.index() < num_forward_) continue;
    if (save.by_function) {
      held_.insert(id);  // by autograd itself: a tape is not asked
    } else {
      own->second.push_back(id);
    }
  }
  next_event_ = static_cast<std::size_t>(
      std::ranges::upper_bound(trace_.events, run.front().index(), {},
                               &Event::op) -
      trace_.events.begin());
}

void Builder::tell_functions(OpId before) {
  for (; next_event_ < trace_.events.size(); ++next_event_) {
    const Event& event = trace_.events[next_event_];
    if (event.op > before.index()) return;
    if (event.kind == Event::Kind::EnterFunction) {
      tape_.begin_function(uses_.values(event.values));
    } else if (event.kind == Event::Kind::LeaveFunction) {
      const auto tensors = uses_.values(event.values);
      versions_.leave_function(tensors);
      tape_.end_function(tensors);
    }
  }
}

void Builder::add_op(OpId id, std::int64_t nanoseconds) {
  tell_functions(id);
  const Op& op = trace_.at(id);
  graph_.ops.push_back({.name = op.name, .nanoseconds = nanoseconds});
  const OpUse use = uses_.of(id);
  versions_.begin_op(use);
  tape_.begin_op(use);
  written_.clear();
  for (const TensorUse& tensor : use.tensors) {
    if (tensor.access != Access::Read) written_.push_back(tensor);
    const StateId state = tape_.state_of(tensor.storage);
    if (tensor.access == Access::Update) updated_.push_back(state);
  }
  // As Tape::decide has it: of what the op writes or makes, the new state.
  std::vector<StorageId>& saves = saves_.at(id);
  const auto note_saved = [&](StorageId storage) {
    const StateId state = tape_.state_of(TraceUses::key(storage));
    if (state == kNone) return false;
    graph_.states[state].is_saved = true;
    return true;
  };
  std::erase_if(saves, [&](StorageId storage) {
    return find_written(storage) == nullptr && note_saved(storage);
  });
  const std::size_t first_made = graph_.states.size();
  const ReplayRules& known = *use.rules;
  versions_.end_op(id, use);
  tape_.end_op(uses_.results_of(id));
  std::erase_if(saves, note_saved);
  saved_early_.insert(saves.begin(), saves.end());
  name_results(first_made, op.outputs);
  if (rules_.on_cpu) halve_indices(op, known);
}

const TensorUse* Builder::find_written(StorageId storage) const {
  const auto found =
      std::ranges::find(written_, TraceUses::key(storage), &TensorUse::storage);
  return found == written_.end() ? nullptr : &*found;
}

// As a keep set names them: what an op writes is its result 0.
void Builder::name_results(std::size_t first_state,
                           std::span<const ValueId> outputs) {
  const std::size_t op = graph_.ops.size() - 1;
  for (std::size_t i = first_state; i < graph_.states.size(); ++i) {
    const StorageId storage = bytes_.states()[i].storage;
    if (const TensorUse* const written = find_written(storage)) {
      if (written->access != Access::Scratch) {
        graph_.states[i].place.emplace(op, 0);
      }
      continue;
    }
    const auto output = std::ranges::find(
        outputs, storage, [&](ValueId id) { return trace_.at(id).storage; });
    graph_.states[i].place.emplace(op, output - outputs.begin());
  }
}

// See Tape::keep_packed: indices are held in half of their bytes, if the op's
// other result is kept; then they are not made again either.
void Builder::halve_indices(const Op& traced, const ReplayRules& known) {
  if (!known.indices || *known.indices >= traced.outputs.size() ||
      traced.inputs.empty()) {
    return;
  }
  const StorageId of = trace_.at(traced.inputs[0]).storage;
  const StorageId indices = trace_.at(traced.outputs[*known.indices]).storage;
  const StateId id = tape_.state_of(TraceUses::key(indices));
  if (!of.valid() || id == kNone || tape_.maker(id) == kNone ||
      trace_.at(of).bytes > Bytes(std::numeric_limits<std::int32_t>::max())) {
    return;
  }
  LineageState& state = graph_.states[id];
  state.cost = state.bytes / 2;
  state.place.emplace(graph_.ops.size() - 1, *known.indices == 0 ? 1 : 0);
}

// By the caller until after backward, by another layer, or for ever.
bool Builder::is_held_anyway(std::size_t state) const {
  const StorageId id = bytes_.states()[state].storage;
  const Storage& storage = trace_.at(id);
  if (storage.place == Place::Host) return true;
  if (bytes_.states()[state].is_overwritten) return false;  // a copy of it
  if (is_leaf(storage) || held_.contains(id)) return true;
  if (num_forward_ == trace_.ops.size()) return false;
  return !storage.freed.valid() ||
         trace_.at(storage.freed).phase == Phase::Optimizer;
}

LayerGraph Builder::finish() {
  const std::size_t num_taped = graph_.states.size();
  for (const StorageId storage : saved_early_) {
    const auto known = std::ranges::find(bytes_.states(), storage,
                                         &GraphBytes::State::storage);
    if (known != bytes_.states().end()) {  // its first: it came from outside
      graph_.states[static_cast<std::size_t>(known - bytes_.states().begin())]
          .is_saved = true;
      continue;
    }
    const TensorUse use{.storage = TraceUses::key(storage),
                        .bytes = trace_.at(storage).bytes.count()};
    bytes_.add_state(kNone, use);
    graph_.states.back().is_saved = true;
  }
  for (const StateId state : updated_) graph_.states[state].can_keep = false;
  const std::vector<std::size_t>& ops = bytes_.nodes();
  // A keep set has one name for all that an op writes.
  const auto can_repeat = [&](NodeId node) {
    return node != kNone && tape_.num_writes(node) <= 1;
  };
  for (NodeId node = 0; node < ops.size(); ++node) {
    if (!can_repeat(node)) continue;
    const auto reads = tape_.reads(node);
    graph_.ops[ops[node]].reads.assign(reads.begin(), reads.end());
  }
  for (std::size_t i = 0; i < graph_.states.size(); ++i) {
    LineageState& state = graph_.states[i];
    const NodeId maker = i < num_taped ? tape_.maker(StateId(i)) : kNone;
    if (can_repeat(maker)) state.maker = ops[maker];
    if (is_held_anyway(i)) {
      state.cost = Bytes();
    } else if (state.cost == Bytes()) {
      state.cost = state.bytes;
    }
    if (state.is_saved || !state.maker) state.can_keep = true;
  }
  graph_.check();
  return std::move(graph_);
}

void check_amount(std::string_view array, std::size_t index,
                  std::string_view field, std::int64_t amount,
                  std::int64_t& sum) {
  if (amount < 0 || amount > kMaxSum) {
    throw PlanError(str(array, "[", index, "].", field,
                        " must be from 0 to 2^50, got ", amount));
  }
  sum += amount;
  if (sum > kMaxSum) {
    throw PlanError(
        str("the sum of ", array, "[].", field, " must be at most 2^50"));
  }
}

}  // namespace

void LayerGraph::check() const {
  std::int64_t bytes = 0;
  std::int64_t cost = 0;
  std::int64_t nanoseconds = 0;
  for (std::size_t v = 0; v < states.size(); ++v) {
    check_amount("states", v, "bytes", states[v].bytes.count(), bytes);
    check_amount("states", v, "cost", states[v].cost.count(), cost);
    const auto check_op = [&](std::size_t op) {
      if (op < ops.size()) return;
      throw PlanError(str("states[", v, "] must be made by one of ", ops.size(),
                          " ops, got ", op));
    };
    if (const auto maker = states[v].maker) check_op(*maker);
    if (const auto place = states[v].place) check_op(place->first);
  }
  for (std::size_t i = 0; i < ops.size(); ++i) {
    check_amount("ops", i, "packed", ops[i].packed.count(), cost);
    check_amount("ops", i, "nanoseconds", ops[i].nanoseconds, nanoseconds);
    for (const std::size_t read : ops[i].reads) {
      // Optionals compare as values, and an empty one is the least.
      if (read >= states.size() || states[read].maker >= std::optional(i)) {
        throw PlanError(str("ops[", i, "] must read states made before it, ",
                            "got ", read));
      }
    }
  }
}

LayerGraph layer_graph(const Trace& trace, std::span<const OpId> run,
                       std::span<const std::int64_t> nanoseconds,
                       const GraphRules& rules) {
  if (run.size() != nanoseconds.size()) {
    throw PlanError(str("nanoseconds must be given for each of ", run.size(),
                        " ops, got ", nanoseconds.size()));
  }
  Builder builder(trace, run, rules);
  for (std::size_t i = 0; i < run.size(); ++i) {
    builder.add_op(run[i], nanoseconds[i]);
  }
  return builder.finish();
}

}  // namespace memscale
