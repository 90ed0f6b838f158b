#include "memscale/runtime/recorder.h"

#include <ATen/Parallel.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/op_facts.h"
#include "memscale/runtime/memory_tracker.h"
#include "memscale/runtime/op_info.h"

namespace memscale {
namespace {

constexpr std::string_view kSlotName = "MEMSCALE_RECORDER";
const c10::DebugInfoKind kSlot(&kSlotName);

// How deep this thread is inside recorded ops, backward nodes and custom
// Functions. They are of the thread, not of a recorder: a recorder starts and
// stops at depth zero.
thread_local int leaf_depth = 0;
thread_local int node_depth = 0;
thread_local int function_depth = 0;

Recorder* current_recorder() {
  return static_cast<Recorder*>(c10::ThreadLocalDebugInfo::get(kSlot));
}

template <typename F>
void for_each_tensor(const c10::IValue& value, const F& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList().vec()) {
      if (tensor.defined()) visit(tensor);
    }
  } else if (value.isList()) {  // of optional tensors
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor() && element.toTensor().defined()) {
        visit(element.toTensor());
      }
    }
  }
}

// Note [Inside fake tensors]
// A fake tensor is a meta tensor in a Python subclass. Calls on the bare meta
// tensor are torch's own bookkeeping, and no bytes stand behind it.
bool is_bare_meta(const c10::TensorImpl& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  return keys.has_backend(c10::BackendComponent::MetaBit) &&
         !keys.has(c10::DispatchKey::Python);
}

// Tensors whose storage is not theirs, or not one block of bytes.
bool has_wrapper(const c10::DispatchKeySet& keys) {
  return keys.has(c10::DispatchKey::FuncTorchBatched) ||
         keys.has(c10::DispatchKey::FuncTorchGradWrapper) ||
         keys.has_any(c10::DispatchKeySet(c10::DispatchKey::Functionalize)) ||
         keys.has(c10::DispatchKey::NestedTensor);
}

}  // namespace

struct Recorder::OpContext final : at::ObserverContext {
  enum class Kind { Op, Recomputed, Node, Function };
  explicit OpContext(Kind what) : kind(what) {}
  const Kind kind;
  const OpInfo* info = nullptr;
  std::vector<StorageId> written;
  std::unique_ptr<MemoryTracker> tracker;
  StorageId accumulated;  // the op adds to this storage in place of a new one
};

std::shared_ptr<Recorder> Recorder::make(c10::Device device, IsFake is_fake,
                                         bool fake_run) {
  return std::shared_ptr<Recorder>(new Recorder(device, is_fake, fake_run));
}

Recorder::Recorder(c10::Device device, IsFake is_fake, bool fake_run)
    : device_(device),
      backend_key_(c10::computeDispatchKey(c10::kFloat, c10::kStrided, device)),
      autocast_key_(at::autocast::get_autocast_dispatch_key_from_device_type(
          device.type())),
      is_fake_(is_fake),
      is_fake_run_(fake_run) {}

Recorder::~Recorder() = default;

void Recorder::start() {
  if (current_recorder() != nullptr) {
    throw TraceError("this thread is being recorded already");
  }
  forward_thread_ = std::this_thread::get_id();
  c10::ThreadLocalDebugInfo::_push(kSlot, shared_from_this());
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&Recorder::on_start, &Recorder::on_end)
          .needsInputs(true)
          .needsOutputs(true)
          .scopes(
              {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
}

void Recorder::stop() {
  if (!handle_) return;
  at::removeCallback(*handle_);
  handle_.reset();
  c10::ThreadLocalDebugInfo::_pop(kSlot);
  const std::lock_guard lock(mutex_);
  find_dead();
}

// ---- observing
// ---------------------------------------------------------------

std::unique_ptr<at::ObserverContext> Recorder::on_start(
    const at::RecordFunction& fn) {
  using Kind = OpContext::Kind;
  if (leaf_depth > 0) return nullptr;
  Recorder* recorder = current_recorder();
  if (recorder == nullptr || recorder->paused_ > 0) return nullptr;
  if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    ++node_depth;
    recorder->begin_node(fn.seqNr());
    return std::make_unique<OpContext>(Kind::Node);
  }
  const OpInfo* info = find_op_info(fn);
  if (info == nullptr) {
    if (std::string_view(fn.name()).starts_with("autograd::engine::")) {
      return nullptr;
    }
    ++function_depth;
    return std::make_unique<OpContext>(Kind::Function);
  }
  if (info->ignored || !recorder->is_leaf(*info, fn)) return nullptr;
  const bool recomputed = recorder->recomputed_.has_value();
  auto context =
      std::make_unique<OpContext>(recomputed ? Kind::Recomputed : Kind::Op);
  context->info = info;
  if (!recomputed) recorder->begin_op(*info, fn, *context);
  ++leaf_depth;
  return context;
}

void Recorder::on_end(const at::RecordFunction& fn,
                      at::ObserverContext* context) {
  auto* const ours = static_cast<OpContext*>(context);
  if (ours == nullptr) return;
  switch (ours->kind) {
    case OpContext::Kind::Node:
      --node_depth;
      return;
    case OpContext::Kind::Function:
      --function_depth;
      return;
    case OpContext::Kind::Op:
      --leaf_depth;
      if (Recorder* recorder = current_recorder()) recorder->end_op(fn, *ours);
      return;
    case OpContext::Kind::Recomputed:
      --leaf_depth;
      if (Recorder* recorder = current_recorder()) {
        recorder->end_recomputed_op(fn, *ours->info);
      }
      return;
  }
}

bool Recorder::is_leaf(const OpInfo& info, const at::RecordFunction& fn) const {
  using c10::DispatchKey;
  if (info.decomposes(backend_key_)) return false;
  if (c10::impl::tls_is_dispatch_key_included(
          DispatchKey::FuncTorchDynamicLayerFrontMode)) {
    return false;
  }
  if (!c10::impl::tls_is_dispatch_key_excluded(autocast_key_) &&
      info.handle.hasKernelForDispatchKey(autocast_key_)) {
    return false;
  }
  bool wrapped = false;
  for (const c10::IValue& input : fn.inputs()) {
    for_each_tensor(input, [&](const at::Tensor& tensor) {
      const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
      wrapped |= is_bare_meta(impl) ||
                 (impl.key_set().has(DispatchKey::Python) && !is_fake_(impl));
    });
  }
  return !wrapped;
}

void Recorder::begin_op(const OpInfo& info, const at::RecordFunction& fn,
                        OpContext& context) {
  const std::lock_guard lock(mutex_);
  find_dead();
  Op op;
  op.name = info.name;
  op.inputs = value_ids({fn.inputs().data(), fn.inputs().size()});
  op.random = info.random;
  op.mutates = info.mutates;
  op.opaque = info.opaque;
  op.in_function = function_depth > 0;
  // Nobody can tell a foreign kernel's workspace; where it really runs, see it.
  if (info.opaque && !is_fake_run_) {
    context.tracker = std::make_unique<MemoryTracker>(device_);
    context.tracker->start();
  }
  for (const std::size_t index : info.written) {
    if (index >= fn.inputs().size()) continue;
    for_each_tensor(fn.inputs()[index], [&](const at::Tensor& tensor) {
      const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
      if (id.valid()) context.written.push_back(id);
    });
  }
  if (builder_.phase() == Phase::Backward) {
    op.forward = node_op_;
    if (node_depth == 0 && accumulates_in_place(fn)) {
      context.accumulated = builder_.trace().at(op.inputs[0]).storage;
      op.mutates = true;
    }
  }
  const OpId id = builder_.begin_op(std::move(op));
  if (builder_.phase() == Phase::Forward &&
      std::this_thread::get_id() == forward_thread_) {
    numbered_.push_back({at::sequence_number::peek(), builder_.layer(), id});
  }
}

void Recorder::end_op(const at::RecordFunction& fn, OpContext& context) {
  const std::lock_guard lock(mutex_);
  bool bare_meta = false;
  for (const c10::IValue& output : fn.outputs()) {
    for_each_tensor(output, [&](const at::Tensor& tensor) {
      bare_meta |= is_bare_meta(*tensor.unsafeGetTensorImpl());
    });
  }
  if (bare_meta) return cancel_op();
  for (const StorageId storage : context.written) {
    builder_.bump_version(storage);
  }
  if (context.accumulated.valid()) {
    builder_.bump_version(context.accumulated);
    for_each_tensor(fn.outputs().at(0), [&](const at::Tensor& tensor) {
      watch(tensor.storage().unsafeGetStorageImpl(), context.accumulated);
    });
  }
  std::vector<ValueId> outputs = value_ids(fn.outputs());
  // detach and the like: what comes out is, to us, what went in.
  const auto& inputs = builder_.trace().ops.back().inputs;
  const bool is_identity =
      !outputs.empty() && context.written.empty() &&
      !context.accumulated.valid() &&
      std::ranges::all_of(outputs, [&](ValueId output) {
        return builder_.trace().at(output).storage.valid() &&
               std::ranges::find(inputs, output) != inputs.end();
      });
  if (is_identity) return cancel_op();
  if (context.tracker != nullptr) {
    context.tracker->stop();
    builder_.set_workspace(
        Bytes(context.tracker->peak() -
              std::max(context.tracker->before(), context.tracker->current())));
  }
  builder_.end_op(std::move(outputs));
}

void Recorder::end_recomputed_op(const at::RecordFunction& fn,
                                 const OpInfo& info) {
  const std::lock_guard lock(mutex_);
  find_dead();
  if (!recomputed_ || recomputed_->size() == 0) return;
  const Op& first = builder_.trace().ops[recomputed_->begin];
  if (first.name != info.name) return;  // one that was not worth recording
  ++recomputed_->begin;
  std::size_t place = 0;
  for (const c10::IValue& output : fn.outputs()) {
    for_each_tensor(output, [&](const at::Tensor& tensor) {
      if (place >= first.outputs.size()) return;
      const StorageId storage =
          builder_.trace().at(first.outputs[place++]).storage;
      c10::StorageImpl* impl = tensor.has_storage()
                                   ? tensor.storage().unsafeGetStorageImpl()
                                   : nullptr;
      if (impl == nullptr || !storage.valid() || storage_ids_.contains(impl)) {
        return;
      }
      watch(impl, storage);
    });
  }
}

void Recorder::begin_recompute(const LayerCall& call) {
  const std::lock_guard lock(mutex_);
  find_dead();
  recomputed_ = call.forward.ops;
}

void Recorder::end_recompute() {
  const std::lock_guard lock(mutex_);
  recomputed_.reset();
}

void Recorder::bind_same(const at::Tensor& stand_in, const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
  if (id.valid()) watch(stand_in.storage().unsafeGetStorageImpl(), id);
}

void Recorder::cancel_op() {
  if (!numbered_.empty() && numbered_.back().op == builder_.last_op()) {
    numbered_.pop_back();
  }
  builder_.cancel_op();
}

void Recorder::begin_node(std::int64_t sequence_number) {
  const std::lock_guard lock(mutex_);
  builder_.set_phase(Phase::Backward);
  node_op_ = {};
  if (sequence_number < 0) return;  // AccumulateGrad: of the last one's layer
  const auto number = static_cast<std::uint64_t>(sequence_number);
  const auto after =
      std::ranges::upper_bound(numbered_, number, {}, &Numbered::number);
  if (after == numbered_.begin()) return;
  const Numbered& entry = *std::prev(after);
  builder_.set_layer(entry.layer);
  if (entry.number == number) node_op_ = entry.op;
}

// ---- values and storages
// -----------------------------------------------------

bool Recorder::has_own_bytes(const c10::TensorImpl& tensor) const {
  const c10::DispatchKeySet keys = tensor.key_set();
  return tensor.has_storage() && !has_wrapper(keys) && !is_bare_meta(tensor) &&
         (!keys.has(c10::DispatchKey::Python) || is_fake_(tensor));
}

StorageId Recorder::storage_id(const c10::TensorImpl& tensor) {
  if (!has_own_bytes(tensor)) return {};
  c10::StorageImpl* impl = tensor.unsafe_storage().unsafeGetStorageImpl();
  const c10::SymInt size = impl->sym_nbytes();
  if (size.is_heap_allocated()) return {};
  const Bytes bytes(size.as_int_unchecked());
  const auto known = storage_ids_.find(impl);
  if (known != storage_ids_.end()) {
    builder_.grow(known->second, bytes);
    return known->second;
  }
  const bool on_device =
      tensor.key_set().has_backend(c10::toBackendComponent(backend_key_));
  const Place place = on_device ? Place::Device : Place::Host;
  // An op reads what no op that we saw has made: it came from outside.
  const StorageId id =
      builder_.op_is_running()
          ? builder_.add_storage(bytes, place)
          : builder_.add_resident(bytes, place, Category::Input,
                                  builder_.layer());
  watch(impl, id);
  return id;
}

ValueId Recorder::value_id(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  Value value;
  value.storage = storage_id(impl);
  value.dtype =
      c10::getDtypeNames(c10::typeMetaToScalarType(impl.dtype())).first;
  if (value.storage.valid()) {
    value.sizes = impl.sizes_default().vec();
    value.strides = impl.strides_default().vec();
    value.offset = impl.storage_offset_default();
  }
  return builder_.add_value(std::move(value));
}

std::vector<ValueId> Recorder::value_ids(std::span<const c10::IValue> values) {
  std::vector<ValueId> ids;
  for (const c10::IValue& value : values) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      ids.push_back(value_id(tensor));
    });
  }
  return ids;
}

Recorder::Holders& Recorder::holders(StorageId storage) {
  if (holders_.size() <= storage.index()) holders_.resize(storage.index() + 1);
  return holders_[storage.index()];
}

void Recorder::watch(c10::StorageImpl* impl, StorageId storage) {
  storage_ids_[impl] = storage;
  watched_.push_back(
      {c10::weak_intrusive_ptr<c10::StorageImpl>(
           c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl)),
       storage});
  ++holders(storage).impls;
}

void Recorder::find_dead() {
  for (std::size_t i = 0; i < watched_.size();) {
    Watched& entry = watched_[i];
    if (holders_[entry.storage.index()].saves > 0) {
      parked_[entry.storage].push_back(std::move(entry));
    } else if (entry.impl.expired()) {
      const StorageId storage = entry.storage;
      storage_ids_.erase(entry.impl._unsafe_get_target());
      --holders(storage).impls;
      maybe_free(storage);
    } else {
      ++i;
      continue;
    }
    if (i + 1 < watched_.size()) watched_[i] = std::move(watched_.back());
    watched_.pop_back();
  }
  // Still held, by somebody else: then its end is not the layer's.
  for (const StorageId storage : hinted_) holders(storage).last_needed = {};
  hinted_.clear();
}

void Recorder::maybe_free(StorageId storage) {
  const Holders& held = holders(storage);
  if (held.impls == 0 && held.saves == 0) {
    builder_.free(storage, held.last_needed);
  }
}

// Note [Gradients that add up]
// Where two gradients meet, autograd adds in place if nobody else holds the
// first; never if it has a Python subclass, as fake tensors do. A fake run is
// recorded as the real one would go.
bool Recorder::accumulates_in_place(const at::RecordFunction& fn) const {
  if (std::string_view(fn.name()) != "aten::add" || fn.inputs().size() < 2 ||
      !fn.inputs()[0].isTensor() || !fn.inputs()[1].isTensor()) {
    return false;
  }
  const at::Tensor& first = fn.inputs()[0].toTensor();
  const c10::TensorImpl& impl = *first.unsafeGetTensorImpl();
  // Besides autograd's own reference: the arguments' and the Python object's;
  // besides the tensor's own storage reference: that of the meta tensor inside.
  return impl.key_set().has(c10::DispatchKey::Python) && is_fake_(impl) &&
         first.use_count() <= 3 && first.storage().use_count() <= 2 &&
         impl.is_non_overlapping_and_dense_default();
}

// ---- what the caller tells
// ---------------------------------------------------

LayerId Recorder::add_layer(std::string name) {
  const std::lock_guard lock(mutex_);
  return builder_.add_layer(std::move(name));
}

void Recorder::add_resident(const at::Tensor& tensor, Category category,
                            LayerId layer) {
  const std::lock_guard lock(mutex_);
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (!has_own_bytes(impl) ||
      storage_ids_.contains(impl.unsafe_storage().unsafeGetStorageImpl())) {
    return;
  }
  const bool on_device =
      impl.key_set().has_backend(c10::toBackendComponent(backend_key_));
  const StorageId id = builder_.add_resident(
      Bytes(static_cast<std::int64_t>(impl.unsafe_storage().nbytes())),
      on_device ? Place::Device : Place::Host, category, layer);
  storage_ids_[impl.unsafe_storage().unsafeGetStorageImpl()] = id;
  holders(id).impls = 1;  // never looked at, never let go
  residents_.push_back(tensor);
}

void Recorder::enter_layer(LayerId layer) {
  const std::lock_guard lock(mutex_);
  layer_stack_.push_back(builder_.layer());
  builder_.set_layer(layer);
  numbered_.push_back({at::sequence_number::peek(), layer, OpId()});
}

void Recorder::leave_layer() {
  const std::lock_guard lock(mutex_);
  if (layer_stack_.empty()) return;
  builder_.set_layer(layer_stack_.back());
  layer_stack_.pop_back();
  numbered_.push_back({at::sequence_number::peek(), builder_.layer(), OpId()});
}

void Recorder::set_phase(Phase phase) {
  const std::lock_guard lock(mutex_);
  find_dead();
  builder_.set_phase(phase);
  builder_.set_layer(LayerId());
  layer_stack_.clear();
}

void Recorder::set_category(const at::Tensor& tensor, Category category) {
  const std::lock_guard lock(mutex_);
  const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
  if (id.valid()) builder_.set_category(id, category);
}

void Recorder::set_stands_for(const at::Tensor& tensor,
                              const std::vector<at::Tensor>& parameters) {
  const std::lock_guard lock(mutex_);
  std::vector<StorageId> ids;
  for (const at::Tensor& parameter : parameters) {
    ids.push_back(storage_id(*parameter.unsafeGetTensorImpl()));
  }
  const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
  if (id.valid()) builder_.set_stands_for(id, std::move(ids));
}

void Recorder::set_state(const at::Tensor& tensor,
                         const at::Tensor& parameter) {
  const std::lock_guard lock(mutex_);
  const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
  if (!id.valid()) return;
  builder_.make_state(id, storage_id(*parameter.unsafeGetTensorImpl()));
}

void Recorder::add_note(std::string note) {
  const std::lock_guard lock(mutex_);
  builder_.add_note(std::move(note));
}

void Recorder::set_saves_unknown() {
  const std::lock_guard lock(mutex_);
  builder_.set_saves_unknown();
}

std::size_t Recorder::save(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const ValueId value = value_id(tensor);
  const StorageId storage = builder_.trace().at(value).storage;
  if (storage.valid()) ++holders(storage).saves;
  return builder_.add_save(value);
}

void Recorder::release(std::size_t save) {
  const std::lock_guard lock(mutex_);
  const StorageId storage =
      builder_.trace().at(builder_.trace().saves.at(save).value).storage;
  builder_.release_save(save);
  if (storage.valid()) unpin(storage);
}

void Recorder::unpin(StorageId storage) {
  if (--holders(storage).saves > 0) return;
  const auto parked = parked_.find(storage);
  if (parked == parked_.end()) return maybe_free(storage);
  for (Watched& entry : parked->second) watched_.push_back(std::move(entry));
  parked_.erase(parked);
}

Trace Recorder::finish() {
  if (handle_) throw TraceError("stop recording before reading the trace");
  const std::lock_guard lock(mutex_);
  find_dead();
  Trace trace = builder_.finish();
  add_op_facts(trace, at::get_num_threads());
  return trace;
}

}  // namespace memscale
