// Ops called again, and the memory of a tape. See Note [Why replay is
// bit-equal].

#include "memscale/runtime/replay/tensor_bytes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <string>
#include <utility>

#include "memscale/base/enum_names.h"
#include "memscale/runtime/observe/op_info.h"
#include "memscale/runtime/observe/tensor_kinds.h"
#include "memscale/runtime/replay/recorded_state.h"
#include "memscale/runtime/replay/saved_tensor.h"
#include "memscale/runtime/replay/tensor_tape.h"

namespace memscale {
namespace {

constexpr const char* kFreed =
    "MemScale cannot compute a tensor again that backward needs: the memory of "
    "a tensor that it is computed from was freed, resized or moved by hand "
    "after forward. Have that layer keep what it saves "
    "(memscale.replay.attach(model, {\"name of the layer\": \"keep\", ...})), "
    "or free that memory after backward.";

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

TensorBytes::TensorBytes(TensorTape& tape, std::shared_ptr<ReplayStats> stats)
    : tape_(tape), stats_(std::move(stats)) {
  states_.reserve(kExpectedOps);
  nodes_.reserve(kExpectedOps);
}

void TensorBytes::close() {
  call_ = TensorCall();
  drop_spare_room(states_);
  drop_spare_room(nodes_);
}

TensorBytes::~TensorBytes() = default;

// ---- states ----

std::int64_t TensorBytes::add_state(StateId /*state*/,
                                    const TensorUse& tensor) {
  const auto& impl = *reinterpret_cast<const c10::TensorImpl*>(tensor.tensor);
  State& state = states_.emplace_back();
  const StoragePtr storage = StoragePtr::unsafe_reclaim_from_nonowning(
      impl.unsafe_storage().unsafeGetStorageImpl());
  state.bytes = storage->nbytes();
  state.data = storage->data_ptr().get();
  state.storage = storage.get();
  state.device = storage->device();
  state.stream = current_stream(state.device);
  state.op = maker_;
  state.counter = impl.version_counter();
  if (state.counter.enabled()) state.version = state.counter.current_version();
  state.original = WeakStoragePtr(storage);
  return static_cast<std::int64_t>(state.bytes);
}

bool TensorBytes::is_whole(const State& state,
                           const c10::StorageImpl& storage) {
  return storage.nbytes() == state.bytes &&
         storage.data_ptr().get() == state.data;
}

// Of a tensor without a counter (made in inference mode) nobody can tell.
bool TensorBytes::has_version(const State& state) {
  return !state.counter.enabled() ||
         state.counter.current_version() == state.version;
}

bool TensorBytes::is_current(StateId id) const {
  const State& state = states_[id];
  return has_version(state) && is_whole(state, *state.storage);
}

bool TensorBytes::is_alive(StateId id) const {
  return states_[id].original.use_count() > 0;
}

bool TensorBytes::has_original(StateId id) const {
  const State& state = states_[id];
  // What an op of ours made may have been written since, if nothing counts.
  if (!has_version(state) ||
      (!state.counter.enabled() && state.op != nullptr)) {
    return false;
  }
  const StoragePtr storage = state.original.lock();
  return storage && is_whole(state, *storage);
}

bool TensorBytes::is_whole(StateId id) const {
  const State& state = states_[id];
  return is_whole(state, *state.held);
}

bool TensorBytes::hold(StateId id) {
  State& state = states_[id];
  state.held = state.original.lock();
  return state.held != nullptr;
}

void TensorBytes::let_go(StateId id) {
  State& state = states_[id];
  if (std::exchange(state.ours, false)) {
    state.held.reset();
  } else {
    bury(state.held);
  }
}

void TensorBytes::lose_original(StateId id) {
  states_[id].original = WeakStoragePtr(StoragePtr());
}

bool TensorBytes::copy_out(StateId id) {
  State& state = states_[id];
  try {
    use_here(state);
    StoragePtr copy = clone_storage(state.held);
    bury(state.held);
    state.held = std::move(copy);
    state.stream = current_stream(state.device);
    state.ours = true;
    stats_->bytes_copied += state.bytes;
    return true;
  } catch (const std::exception&) {  // no memory for it
    return false;
  }
}

void TensorBytes::show_writes(StateId id) {
  State& state = states_[id];
  if (StoragePtr storage = state.original.lock()) {
    bury(state.changed);
    state.changed = std::move(storage);
  }
}

void TensorBytes::end_state(StateId id) { bury(states_[id].changed); }

// Note [Foreign storages]
// Bytes that are not ours may belong to numpy, whose deleter wants the GIL:
// they are let go after the lock.
void TensorBytes::bury(StoragePtr& storage) {
  if (storage) buried_.push_back(std::move(storage));
  storage.reset();
}

std::shared_ptr<void> TensorBytes::take_dead() {
  if (buried_.empty()) return nullptr;
  return std::make_shared<std::vector<StoragePtr>>(std::exchange(buried_, {}));
}

void TensorBytes::use_here(const State& state) {
  if (!state.held) return;
  use_on_current_stream(*state.held, state.stream, state.op == nullptr);
}

void TensorBytes::check(const State& state, const Geometry& geometry) {
  TORCH_CHECK(state.held && (state.ours || is_whole(state, *state.held)),
              kFreed);
  const auto& counter = state.ours ? state.handed_out : state.counter;
  if (!counter.enabled()) return;
  const std::uint32_t expected = state.ours ? 0 : state.version;
  if (counter.current_version() != expected) {
    throw_modified(geometry.describe(state.device), "",
                   counter.current_version(), expected);
  }
}

at::Tensor TensorBytes::tensor(StateId id, const Geometry& geometry) {
  State& state = states_[id];
  const StoragePtr* storage = &state.changed;
  const c10::VariableVersion* counter = &state.counter;
  if (state.changed) {
    TORCH_CHECK(state.changed->nbytes() == state.bytes, kFreed);
  } else {
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

void TensorBytes::fail(StateId /*state*/, Failure failure) const {
  TORCH_CHECK(failure != Failure::Freed, kFreed);
  throw_modified("a tensor that has to be computed again", "", 1, 0);
}

// ---- saves ----

SaveKey TensorBytes::add_save(const std::shared_ptr<SavedTensor>& save) {
  saves_.push_back({save});
  return saves_.size() - 1;
}

bool TensorBytes::is_waiting(SaveKey save) const {
  return !saves_[save].save.expired();
}

void TensorBytes::drop_save(SaveKey save, StateId id) {
  State& state = states_[id];
  const std::shared_ptr<SavedTensor> dropped = saves_[save].save.lock();
  if (dropped == nullptr) return tape_.release(id);  // it has just ended
  dropped->drop(tape_.shared_from_this(), id);
  ++stats_->saves_dropped;
  const bool was_kept = std::exchange(saves_[save].is_kept, false);
  if (was_kept) --stats_->saves_kept;
  // A state is counted once: as dropped, if one of its saves is.
  if (!state.is_counted || (was_kept && !state.is_dropped)) {
    stats_->bytes_dropped += state.bytes;
    if (state.is_counted) stats_->bytes_kept -= state.bytes;
  }
  state.is_counted = true;
  state.is_dropped = true;
}

void TensorBytes::keep_save(SaveKey save, StateId id, Why why) {
  saves_[save].is_kept = true;
  ++stats_->saves_kept;
  if (id == kNone) return;
  State& state = states_[id];
  if (!std::exchange(state.is_counted, true)) {
    stats_->bytes_kept += state.bytes;
  }
  if (!is_notable(why)) return;
  if (state.op == nullptr) {
    stats_->count_reason(std::string(to_string(why)));
  } else {
    const std::string_view text =
        why == Why::Never ? state.op->rules.never : to_string(why);
    stats_->count_reason(state.op->name + ": " + std::string(text));
  }
}

// ---- nodes ----

void TensorBytes::add_node(NodeId /*node*/) {
  nodes_.push_back(std::exchange(call_, {}));
}

void TensorBytes::clear_node(NodeId node) { nodes_[node] = TensorCall(); }

// Memory for what the op writes; null for what it only reads.
std::vector<StoragePtr> TensorBytes::make_targets(
    const TensorCall& call, std::span<const Destination> targets) {
  using Kind = Destination::Kind;
  std::vector<StoragePtr> memory(targets.size());
  for (std::size_t i = 0; i < targets.size(); ++i) {
    State& state = states_[targets[i].state];
    switch (targets[i].kind) {
      case Kind::AsHeld:
      case Kind::Share:
        break;
      case Kind::Zeros:
        memory[i] = zero_storage(state.bytes, state.device);
        break;
      case Kind::Fresh:
        memory[i] = empty_storage(state.bytes, state.device);
        break;
      case Kind::Copy:
      case Kind::TakeOver:
        check(state, call.references[i].geometry);
        use_here(state);
        memory[i] = targets[i].kind == Kind::Copy
                        ? clone_storage(state.held)
                        : std::exchange(state.held, {});
        break;
    }
  }
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (targets[i].kind == Kind::Share) memory[i] = memory[targets[i].with];
  }
  return memory;
}

std::vector<c10::IValue> TensorBytes::make_stack(
    const TensorCall& call, std::span<const Destination> targets,
    const std::vector<StoragePtr>& memory) {
  std::vector<c10::IValue> stack = call.arguments;
  std::vector<std::vector<at::Tensor>> lists(call.lists.size());
  for (std::size_t i = 0; i < lists.size(); ++i) {
    lists[i].resize(call.lists[i].length);
  }
  for (std::size_t i = 0; i < call.references.size(); ++i) {
    const TensorCall::Reference& reference = call.references[i];
    StoragePtr storage = memory[i];
    if (!storage) {
      const State& state = states_[targets[i].state];
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
      if (call.lists[l].argument == reference.argument) {
        lists[l][static_cast<std::size_t>(reference.element)] =
            std::move(tensor);
      }
    }
  }
  for (std::size_t i = 0; i < lists.size(); ++i) {
    c10::IValue& argument = stack[call.lists[i].argument];
    if (!call.lists[i].of_optional) {
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

void TensorBytes::run(NodeId node, std::span<const Destination> targets,
                      std::span<const Made> written,
                      std::span<const Made> results) {
  const TensorCall& call = nodes_[node];
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(
      c10::autocast_dispatch_keyset);
  const c10::AutoGradMode grad_mode(call.grad_mode);
  const DefaultType default_type(call.default_type);
  const KernelFlagsGuard kernel_flags(call.kernel_flags);
  const std::vector<StoragePtr> memory = make_targets(call, targets);
  std::vector<c10::IValue> stack = make_stack(call, targets, memory);
  std::optional<RecordedState> random_state;
  if (call.generator.defined()) {
    if (call.op->generator) {
      stack[*call.op->generator] = call.generator.clone();
    } else {
      random_state.emplace(call.generator);
    }
  }
  call.op->handle.callBoxed(stack);
  random_state.reset();
  ++stats_->ops_replayed;

  for (const Made& made : written) adopt(made.state, memory[made.place], call);
  std::uint32_t place = 0;
  auto next = results.begin();
  for (const c10::IValue& value : stack) {
    for_each_result(value, [&](const at::Tensor& tensor) {
      const std::uint32_t at = place++;
      if (next == results.end() || next->place != at) return;
      adopt(next->state, own_storage(tensor), call);
      ++next;
    });
  }
  TORCH_INTERNAL_ASSERT(next == results.end(), "replaying ", call.op->name,
                        " gave fewer results");
}

void TensorBytes::adopt(StateId id, const StoragePtr& storage,
                        const TensorCall& call) {
  State& made = states_[id];
  TORCH_INTERNAL_ASSERT(storage->nbytes() == made.bytes, "replaying ",
                        call.op->name, " made ", storage->nbytes(),
                        " bytes instead of ", made.bytes);
  made.held = storage;
  made.ours = true;
  made.stream = current_stream(made.device);
}

}  // namespace memscale
