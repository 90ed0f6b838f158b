#include "memscale/runtime/tape.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "memscale/runtime/op_info.h"
#include "memscale/runtime/repeatable.h"
#include "memscale/runtime/saved_tensor.h"
#include "memscale/runtime/tape_lock.h"
#include "memscale/runtime/tape_reasons.h"
#include "memscale/runtime/tensor_kinds.h"
#include "memscale/runtime/unseen_writes.h"

namespace memscale {
namespace {

bool is_training(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  return !info.training || inputs[*info.training].toBool();
}

bool is_expensive(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  if (info.rules.slow_on_cpu && !inputs.empty() && inputs[0].isTensor() &&
      inputs[0].toTensor().is_cpu()) {
    return true;
  }
  if (info.rules.work == Work::Little) return false;
  if (info.rules.work == Work::Much || info.rules.factor >= inputs.size() ||
      !inputs[info.rules.factor].isTensor()) {
    return true;
  }
  const at::Tensor& factor = inputs[info.rules.factor].toTensor();
  if (!factor.defined() || factor.dim() == 0 || factor.numel() == 0)
    return true;
  const std::int64_t multiplications = info.rules.work == Work::Matmul
                                           ? factor.sizes().back()
                                           : factor.numel() / factor.size(0);
  return is_worth_keeping(multiplications,
                          static_cast<std::int64_t>(factor.element_size()));
}

std::optional<at::Generator> find_generator(
    const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  if (info.generator && inputs[*info.generator].isGenerator()) {
    const at::Generator given = inputs[*info.generator].toGenerator();
    if (given.defined()) return given;
  }
  c10::Device device = c10::kCPU;
  bool found = false;
  for (const c10::IValue& input : inputs) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      if (!found) device = tensor.device();
      found = true;
    });
    if (!found && input.isDevice()) device = input.toDevice();
  }
  if (device.type() == c10::kMeta) return std::nullopt;
  return at::globalContext().defaultGenerator(device);
}

}  // namespace

Tape::Tape(TapeRules rules, std::shared_ptr<ReplayStats> stats)
    : rules_(std::move(rules)),
      stats_(std::move(stats)),
      follows_keep_set_(rules_.keep_set != nullptr) {}

Tape::~Tape() = default;

const char* Tape::why_not(const OpInfo& info,
                          c10::ArrayRef<const c10::IValue> inputs,
                          bool in_function) const {
  if (in_function) return kInFunction;
  if (is_in_dispatch_mode()) return kMode;
  if (!info.rules.never.empty()) return info.rules.never.data();
  if (inputs.size() != info.handle.schema().arguments().size()) {
    return kArguments;
  }
  if (info.rules.is_factory) return kFactory;
  for (const c10::IValue& input : inputs) {
    bool plain = true;
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      plain &= is_plain(*tensor.unsafeGetTensorImpl());
    });
    if (!plain) return kSpecial;
  }
  return why_not_repeatable(info, inputs, rules_.as_cuda);
}

void Tape::begin_op(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs,
                    bool in_function) {
  const Locked lock(*this);
  running_.emplace();
  Running& running = *running_;
  running.node.op = &info;
  running.why = why_not(info, inputs, in_function);
  running.expensive = is_expensive(info, inputs);
  holds_ = c10::GradMode::is_enabled() && !in_function;
  if (info.may_write || running.why == kMode) {
    for (const c10::IValue& input : inputs) {
      for_each_tensor(input, [&](const at::Tensor& tensor) {
        begin_write(tensor, Access::Update);
      });
    }
  }
  const bool updates =
      info.rules.updates_statistics &&
      inputs.size() == info.handle.schema().arguments().size() &&
      is_training(info, inputs);
  if (running.why == nullptr && !info.is_view) {
    running.node.arguments.resize(inputs.size());
    running.node.grad_mode = c10::GradMode::is_enabled();
    running.node.default_type = c10::get_default_dtype();
    running.node.kernel_flags = kernel_flags();
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Access access = Access::Read;
    if (std::ranges::find(info.written, i) != info.written.end()) {
      access = info.rules.overwrites ? Access::Overwrite : Access::Update;
    }
    if (updates &&
        std::ranges::find(info.statistics, i) != info.statistics.end()) {
      access = Access::Scratch;
    }
    add_argument(i, inputs[i], access);
  }
  if (running.why == nullptr && info.random) {
    std::optional<at::Generator> generator = find_generator(info, inputs);
    if (generator) {
      // Cloning reads the state: not while another thread draws from it.
      const std::lock_guard guard(generator->mutex());
      running.node.generator = generator->clone();
    } else {
      running.why = kArguments;
    }
  }
}

void Tape::add_argument(std::size_t place, const c10::IValue& input,
                        Access access) {
  Running& running = *running_;
  Node& node = running.node;
  const bool replayable = running.why == nullptr && !node.op->is_view;
  if (input.isTensor()) {
    const at::Tensor& tensor = input.toTensor();
    if (tensor.defined()) return add_tensor(tensor, place, -1, access);
    if (replayable) node.arguments[place] = input;
    return;
  }
  if (input.isList()) {
    const c10::ArrayRef<c10::IValue> elements = input.toListRef();
    bool of_tensors = false;
    for (std::size_t i = 0; i < elements.size(); ++i) {
      of_tensors |= elements[i].isTensor() || elements[i].isNone();
      if (elements[i].isTensor() && elements[i].toTensor().defined()) {
        add_tensor(elements[i].toTensor(), place, static_cast<std::int32_t>(i),
                   access);
      }
    }
    if (of_tensors) {
      if (replayable) {
        node.lists.push_back({static_cast<std::uint32_t>(place),
                              static_cast<std::uint32_t>(elements.size()),
                              !input.isTensorList()});
      }
      return;
    }
  }
  // A generator is given anew, in the state of its own.
  if (replayable && !input.isGenerator()) node.arguments[place] = input;
}

void Tape::add_tensor(const at::Tensor& tensor, std::size_t argument,
                      std::int32_t element, Access access) {
  Running& running = *running_;
  Node& node = running.node;
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!is_plain(impl)) return;
  c10::StorageImpl* storage = impl.unsafe_storage().unsafeGetStorageImpl();
  if (access == Access::Overwrite &&
      !Geometry(impl).covers(storage->nbytes())) {
    access = Access::Update;
  }
  if (access != Access::Read) begin_write(tensor, access);
  if (node.op->is_view && follows_keep_set_) {
    running.viewed.emplace_back(storage, Geometry(impl));
  }
  if (running.why != nullptr) return;
  if (node.op->is_view) {
    find_state(tensor);  // its base is held
    return;
  }
  const StateId state = read_state(tensor);
  if (states_[state].why == kOutside && storage->allocator() == nullptr) {
    running.why = kForeign;
    return;
  }
  if ((access == Access::Read || access == Access::Update) &&
      std::ranges::find(node.reads, state) == node.reads.end()) {
    node.reads.push_back(state);
  }
  node.references.push_back({static_cast<std::uint32_t>(argument), element,
                             access, state, Geometry(impl)});
}

// The state that an op is about to read: cut there, if its lineage is too long.
Tape::StateId Tape::read_state(const at::Tensor& tensor) {
  const StateId id = find_state(tensor);
  State& state = states_[id];
  if (is_written_now(storage_of(tensor))) return id;
  if (state.why != nullptr) {
    if (!state.held) hold_here(id, tensor);
    return id;
  }
  std::uint32_t depth = state.depth;
  if (state.section != section_) {
    ++depth;
    const bool is_claimed = std::ranges::find(crossing_, id) != crossing_.end();
    if (depth > kMaxDepth ||
        (!is_claimed && (!can_claim(id) || !is_worth_dropping(id)))) {
      state.why = kBorder;
      state.depth = 0;
      hold_here(id, tensor);
      forget_maker(state);
      state.maker = kNone;
      return id;
    }
    // What it is made from stays there while this layer may come to need it.
    if (!is_claimed) {
      claim(id);
      crossing_.push_back(id);
    }
  }
  running_->depth = std::max(running_->depth, depth);
  return id;
}

// An earlier section's, and read in this one: held while that lasts.
void Tape::hold_here(StateId id, const at::Tensor& tensor) {
  if (!holds_) return;
  states_[id].held = own_storage(tensor);
  held_here_.push_back(id);
}

bool Tape::is_current(const State& state) const {
  return !state.counter.enabled() ||
         state.counter.current_version() == state.version;
}

bool Tape::is_whole(const State& state, const c10::StorageImpl& storage) {
  return storage.nbytes() == state.bytes &&
         storage.data_ptr().get() == state.data;
}

bool Tape::has_bytes(const State& state) const {
  return state.held && (state.ours || is_whole(state, *state.held));
}

Tape::StateId Tape::find_state(const at::Tensor& tensor) {
  at_once_ |= is_changed_in_backward(tensor);
  const c10::StorageImpl* storage = storage_of(tensor);
  const auto found = current_.find(storage);
  if (found != current_.end()) {
    State& state = states_[found->second];
    if (is_current(state) && is_whole(state, *storage)) {
      return found->second;
    }
    // Changed by something that we did not see.
    state.original = WeakStoragePtr(StoragePtr());
    if (!state.ours) state.lost = state.maker == kNone;
    if (!state.ours) bury(state.held);
  }
  const StateId state = new_state(tensor, nullptr, kNone, kOutside);
  states_[state].is_leaf = !has_history(tensor);
  return state;
}

Tape::StateId Tape::new_state(const at::Tensor& tensor, const OpInfo* op,
                              NodeId maker, const char* why) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const auto id = static_cast<StateId>(states_.size());
  State& state = states_.emplace_back();
  StoragePtr storage = own_storage(tensor);
  state.bytes = storage->nbytes();
  state.data = storage->data_ptr().get();
  state.device = storage->device();
  state.stream = current_stream(state.device);
  state.op = op;
  state.why = why;
  state.section = section_;
  state.counter = impl.version_counter();
  if (state.counter.enabled()) state.version = state.counter.current_version();
  state.original = WeakStoragePtr(storage);
  current_[storage.get()] = id;
  if (why == nullptr) {
    state.maker = maker;
  } else if (holds_) {
    state.held = std::move(storage);
  }
  return id;
}

const char* Tape::why_keep(const Running& running, std::size_t bytes,
                           std::size_t output) {
  if (running.why != nullptr) return running.why;
  if (bytes < rules_.min_bytes) return kSmall;
  if (follows_keep_set_) {
    return rules_.keep_set->keeps(num_ops_, output) ? kChosen : nullptr;
  }
  const bool by_work =
      rules_.policy == ReplayPolicy::Cheap || rules_.keep_set != nullptr;
  if (!by_work || !running.expensive) return nullptr;
  // Indices are kept too, but packed: see pack_indices.
  return running.node.op->rules.indices == output ? nullptr : kChosen;
}

void Tape::end_op(c10::ArrayRef<c10::IValue> outputs,
                  std::size_t num_expected) {
  const Locked lock(*this);
  if (!running_) return;
  Running running = std::move(*running_);
  running_.reset();
  const OpInfo& info = *running.node.op;
  ++stats_->ops_recorded;
  if (is_identity(running, outputs)) return;
  if (outputs.size() != num_expected) running.why = kRaised;
  // An old state that nobody can make again and nobody needed so far is gone.
  for (const Written& written : running.written) {
    const State& old = states_[written.old];
    if (written.access == Access::Update && old.maker == kNone && !old.ours) {
      if (running.why == nullptr) running.why = old.why ? old.why : kLost;
    }
  }
  follow_keep_set(info);
  const auto id = static_cast<NodeId>(nodes_.size());
  Node& node = running.node;
  for (const Written& written : running.written) {
    end_write(written, info, running);
  }
  std::uint32_t place = 0;
  for (const c10::IValue& output : outputs) {
    for_each_result(output, [&](const at::Tensor& tensor) {
      const std::uint32_t at = place++;
      if (!tensor.defined()) return;
      const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      if (!is_plain(impl)) return;
      const c10::StorageImpl* storage =
          impl.unsafe_storage().unsafeGetStorageImpl();
      if (current_.count(storage) > 0) return;  // a view, or written
      const char* why = why_keep(running, storage->nbytes(), at);
      const StateId state = new_state(tensor, &info, id, why);
      if (why == nullptr) node.results.push_back({at, state});
      if (why == nullptr) states_[state].depth = running.depth;
    });
  }
  if (!node.results.empty() || !node.writes.empty()) {
    keep_packed(node);
    nodes_.push_back(std::move(node));
  }
  ++num_ops_;
  for (const std::shared_ptr<SavedTensor>& save : std::exchange(pending_, {})) {
    const auto found = current_.find(storage_of(save->kept()));
    if (found != current_.end()) {
      settle(save, found->second);
    } else {
      ++stats_->saves_kept;
    }
  }
}

// detach and the like: to a trace, and so to a keep set, not an op.
bool Tape::is_identity(const Running& running,
                       c10::ArrayRef<c10::IValue> outputs) const {
  if (running.viewed.empty() || outputs.empty()) return false;
  bool all = true;
  for (const c10::IValue& output : outputs) {
    for_each_tensor(output, [&](const at::Tensor& tensor) {
      const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      all &= is_plain(impl) &&
             std::ranges::any_of(running.viewed, [&](const auto& viewed) {
               return viewed.first == storage_of(tensor) &&
                      viewed.second == Geometry(impl);
             });
    });
  }
  return all;
}

void Tape::follow_keep_set(const OpInfo& info) {
  if (!follows_keep_set_) return;
  const auto& ops = rules_.keep_set->ops;
  if (num_ops_ < ops.size() && is_same_op(ops[num_ops_], info.name)) return;
  follows_keep_set_ = false;
  ++stats_->calls_unlike_keep_set;
}

}  // namespace memscale
