// Backward's half of the tape: ops called again. See Note [Why replay is
// bit-equal].

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "memscale/runtime/op_info.h"
#include "memscale/runtime/op_timer.h"
#include "memscale/runtime/recorded_state.h"
#include "memscale/runtime/saved_tensor.h"
#include "memscale/runtime/tape.h"
#include "memscale/runtime/tape_lock.h"
#include "memscale/runtime/tensor_kinds.h"

namespace memscale {
namespace {

constexpr const char* kFreed =
    "MemScale cannot compute a tensor again that backward needs: the memory of "
    "a tensor that it is computed from was freed, resized or moved by hand "
    "after forward. Have that layer keep what it saves "
    "(memscale.replay.attach(model, {\"name of the layer\": \"keep\", ...})), "
    "or "
    "free that memory after backward.";

// Torch's default dtype is of the process: it is touched only if it has changed
// since forward.
class DefaultType final {
 public:
  explicit DefaultType(caffe2::TypeMeta type)
      : before_(c10::get_default_dtype()), changes_(type != before_) {
    if (changes_) c10::set_default_dtype(type);
  }
  ~DefaultType() {
    if (changes_) c10::set_default_dtype(before_);
  }
  DefaultType(const DefaultType&) = delete;
  DefaultType& operator=(const DefaultType&) = delete;

 private:
  const caffe2::TypeMeta before_;
  const bool changes_;
};

}  // namespace

at::Tensor Tape::materialise(StateId id, const Geometry& geometry) {
  const Locked lock(*this);
  State& state = states_[id];
  const StoragePtr* storage = &state.changed;
  const c10::VariableVersion* counter = &state.counter;
  if (state.changed) {
    TORCH_CHECK(state.changed->nbytes() == state.bytes, kFreed);
  } else {
    if (!has_bytes(state)) replay(id);
    check(state, geometry);
    use_here(state);
    storage = &state.held;
    if (state.ours) counter = &state.handed_out;
    if (state.ours && !counter->enabled()) {
      state.handed_out = c10::VariableVersion(0);
    }
  }
  at::Tensor tensor = geometry.over(*storage);
  if (counter->enabled()) {
    tensor.unsafeGetTensorImpl()->set_version_counter(*counter);
  }
  return tensor;
}

void Tape::replay(StateId state) {
  const ReplayClock clock(*stats_, states_[state].device);
  if (at_once_) run_all();
  ensure(state);
}

void Tape::use_here(const State& state) {
  if (!state.held) return;
  use_on_current_stream(*state.held, state.stream, state.op == nullptr);
}

// All that backward will ask for, before it changes a parameter.
void Tape::run_all() {
  for (Node& node : nodes_) {
    if (node.num_needed > 0 && !node.done) run(node);
  }
}

void Tape::ensure(StateId id) {
  if (has_bytes(states_[id])) return;
  ++num_searches_;
  std::vector<NodeId> missing;
  std::vector<StateId> path = {id};
  while (!path.empty()) {
    State& state = states_[path.back()];
    path.pop_back();
    if (has_bytes(state) || use_original(state)) continue;
    TORCH_CHECK(!state.held, kFreed);
    if (state.maker == kNone || nodes_[state.maker].done) {
      throw_modified("a tensor that has to be computed again", "", 1, 0);
    }
    Node& node = nodes_[state.maker];
    if (std::exchange(node.search, num_searches_) == num_searches_) continue;
    missing.push_back(state.maker);
    path.insert(path.end(), node.reads.begin(), node.reads.end());
  }
  std::ranges::sort(missing);  // the order in which they ran
  for (const NodeId node : missing) {
    // Originals that were found may have made it unnecessary.
    if (nodes_[node].num_needed > 0) run(nodes_[node]);
  }
}

// The tensor itself may be alive still: somebody else holds it, as autograd
// would have.
bool Tape::use_original(State& state) {
  if (!state.counter.enabled() ||
      state.counter.current_version() != state.version) {
    return false;
  }
  StoragePtr storage = state.original.lock();
  if (!storage || !is_whole(state, *storage)) return false;
  state.held = std::move(storage);
  forget_maker(state);
  return true;
}

// Whether its bytes are there, and still the ones that were recorded.
void Tape::check(const State& state, const Geometry& geometry) const {
  TORCH_CHECK(has_bytes(state), kFreed);
  const auto& counter = state.ours ? state.handed_out : state.counter;
  if (!counter.enabled()) return;
  const std::uint32_t expected = state.ours ? 0 : state.version;
  if (counter.current_version() != expected) {
    throw_modified(geometry.describe(state.device), "",
                   counter.current_version(), expected);
  }
}

// Memory for what the op writes, by reference; null for what it only reads.
std::vector<StoragePtr> Tape::make_targets(const Node& node) {
  std::vector<StoragePtr> targets(node.references.size());
  // Arguments that share the memory of a written one do so again.
  const auto share = [&](std::size_t i) {
    for (std::size_t j = 0; j < targets.size(); ++j) {
      const Access other = node.references[j].access;
      if (targets[j] && node.references[j].state == node.references[i].state &&
          (other == Access::Update || other == node.references[i].access)) {
        return targets[j];
      }
    }
    return StoragePtr();
  };
  for (std::size_t i = 0; i < targets.size(); ++i) {
    const Reference& reference = node.references[i];
    if (reference.access == Access::Read) continue;
    State& old = states_[reference.state];
    if (reference.access == Access::Scratch) {
      targets[i] = zero_storage(old.bytes, old.device);
    } else if (StoragePtr shared = share(i)) {
      targets[i] = std::move(shared);
    } else if (reference.access == Access::Overwrite) {
      targets[i] = empty_storage(old.bytes, old.device);
    } else {
      check(old, reference.geometry);
      use_here(old);
      // Nobody else needs the old bytes: they become the new ones.
      targets[i] = old.ours && old.readers == 1 ? std::exchange(old.held, {})
                                                : clone_storage(old.held);
    }
  }
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (!targets[i]) targets[i] = share(i);
  }
  return targets;
}

std::vector<c10::IValue> Tape::make_stack(
    const Node& node, const std::vector<StoragePtr>& targets) {
  std::vector<c10::IValue> stack = node.arguments;
  std::vector<std::vector<at::Tensor>> lists(node.lists.size());
  for (std::size_t i = 0; i < lists.size(); ++i) {
    lists[i].resize(node.lists[i].length);
  }
  for (std::size_t i = 0; i < node.references.size(); ++i) {
    const Reference& reference = node.references[i];
    StoragePtr storage = targets[i];
    if (!storage) {
      const State& state = states_[reference.state];
      check(state, reference.geometry);
      use_here(state);
      storage = state.held;
    }
    at::Tensor tensor = reference.geometry.over(storage);
    if (reference.element < 0) {
      stack[reference.argument] = std::move(tensor);
      continue;
    }
    for (std::size_t l = 0; l < lists.size(); ++l) {
      if (node.lists[l].argument == reference.argument) {
        lists[l][static_cast<std::size_t>(reference.element)] =
            std::move(tensor);
      }
    }
  }
  for (std::size_t i = 0; i < lists.size(); ++i) {
    c10::IValue& argument = stack[node.lists[i].argument];
    if (!node.lists[i].of_optional) {
      argument = c10::List<at::Tensor>(lists[i]);
      continue;
    }
    c10::List<std::optional<at::Tensor>> optional;
    for (at::Tensor& tensor : lists[i]) {
      optional.push_back(tensor.defined() ? std::optional(std::move(tensor))
                                          : std::nullopt);
    }
    argument = std::move(optional);
  }
  return stack;
}

void Tape::run(Node& node) {
  if (node.packed) {
    const auto& made = node.writes.empty() ? node.results : node.writes;
    adopt(made.front().state, unpack(node), node);
    return finish(node);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(
      c10::autocast_dispatch_keyset);
  const c10::AutoGradMode grad_mode(node.grad_mode);
  const DefaultType default_type(node.default_type);
  const KernelFlagsGuard kernel_flags(node.kernel_flags);
  std::vector<StoragePtr> targets = make_targets(node);
  std::vector<c10::IValue> stack = make_stack(node, targets);
  std::optional<RecordedState> state;
  if (node.generator.defined()) {
    if (node.op->generator) {
      stack[*node.op->generator] = node.generator.clone();
    } else {
      state.emplace(node.generator);
    }
  }
  node.op->handle.callBoxed(stack);
  state.reset();
  ++stats_->ops_replayed;

  for (const Made& made : node.writes) {
    adopt(made.state, targets[made.place], node);
  }
  std::uint32_t place = 0;
  auto next = node.results.begin();
  for (const c10::IValue& value : stack) {
    for_each_result(value, [&](const at::Tensor& tensor) {
      if (next == node.results.end() || next->place != place++) return;
      adopt(next->state, own_storage(tensor), node);
      ++next;
    });
  }
  TORCH_INTERNAL_ASSERT(next == node.results.end(), "replaying ", node.op->name,
                        " gave fewer results");
  finish(node);
}

void Tape::adopt(StateId id, const StoragePtr& storage, const Node& node) {
  State& made = states_[id];
  TORCH_INTERNAL_ASSERT(storage->nbytes() == made.bytes, "replaying ",
                        node.op->name, " made ", storage->nbytes(),
                        " bytes instead of ", made.bytes);
  if (made.readers == 0 || made.held) return;
  made.held = storage;
  made.ours = true;
  made.stream = current_stream(made.device);
}

void Tape::finish(Node& node) {
  node.done = true;
  node.packed.reset();
  node.arguments.clear();
  node.references.clear();
  node.generator = at::Generator();
  unclaim_all(std::exchange(node.reads, {}));
}

}  // namespace memscale
