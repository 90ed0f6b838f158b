// Recorder's view of tensors: which storage a tensor is, and when it dies.

#include <c10/core/ScalarType.h>

#include <string>
#include <string_view>
#include <utility>

#include "memscale/runtime/observe/dtypes.h"
#include "memscale/runtime/observe/geometry.h"
#include "memscale/runtime/observe/op_info.h"
#include "memscale/runtime/observe/tensor_kinds.h"
#include "memscale/runtime/record/recorder.h"

namespace memscale {
namespace {

// To its storage; sparse tensors and the like have none.
std::size_t num_references(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().use_count() : 0;
}

}  // namespace

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
  const bool on_device = tensor.key_set().has_backend(leaf_ops_.backend());
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
  value.dtype = dtype_of(c10::typeMetaToScalarType(impl.dtype()));
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
    const StorageId storage = entry.storage;
    const Holders& held = holders_[storage.index()];
    if (entry.impl.expired()) {
      storage_ids_.erase(entry.impl._unsafe_get_target());
      --holders(storage).impls;
      if (held.impls == 0 && held.saves > 0) builder_.let_go(storage);
      maybe_free(storage);
    } else if (held.references > 0 && held.impls == 1 &&
               entry.impl.use_count() <= held.references) {
      builder_.let_go(storage);
      parked_[storage].push_back(std::move(entry));
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
  if (held.impls > 0 || held.saves > 0) return;
  // It ended with its last save: Note [A replayed step, recorded].
  const bool is_open =
      replayed_ && held.released.valid() && held.released == builder_.last_op();
  builder_.free(storage, held.last_needed, !is_open);
}

// Note [Gradients that add up]
// Where two gradients meet, autograd adds in place if nobody else holds the
// first; never if it has a Python subclass, as fake tensors do. A fake run is
// recorded as the real one would go.
bool Recorder::fills_new_zeros(const OpInfo& info, const Op& op) const {
  // Gradients of indexing write into zeros that they have just made: in place,
  // but for tensors with a Python subclass.
  if (!is_fake_run_ || op.inputs.empty() || !info.rules.fills_zeros) {
    return false;
  }
  const Trace& trace = builder_.trace();
  const StorageId target = trace.at(op.inputs.front()).storage;
  if (!target.valid()) return false;
  const OpId born = trace.at(target).born;
  return born.valid() && trace.at(born).phase == Phase::Backward &&
         trace.at(born).name.find("zeros") != std::string::npos;
}

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

// Note [Who else holds what is saved]
// A save holds an alias: so the references to a storage that are not its saves'
// are the program's own, and when those end is what replay has to know. (Fake
// tensors are not held at all: another one stands in when it is asked for.)
Recorder::Saved Recorder::save(const at::Tensor& tensor, bool hold) {
  Saved saved{};
  if (hold) {
    const std::size_t before = num_references(tensor);
    saved.tensor = alias_of(tensor);
    saved.references = num_references(tensor) - before;
  }
  const std::lock_guard lock(mutex_);
  if (finished_) return saved;
  const ValueId value = value_id(tensor);
  const StorageId storage = builder_.trace().at(value).storage;
  if (storage.valid()) {
    ++holders(storage).saves;
    holders(storage).references += saved.references;
  }
  saved.save = builder_.add_save(value, is_in_function());
  return saved;
}

void Recorder::release(std::size_t save, std::size_t references) noexcept {
  const std::lock_guard lock(mutex_);
  if (finished_) return;  // a tensor that outlives the trace
  const StorageId storage =
      builder_.trace().at(builder_.trace().saves.at(save).value).storage;
  builder_.release_save(save);
  if (!storage.valid()) return;
  holders(storage).references -= references;
  unpin(storage);
}

void Recorder::bind_saved(std::size_t save, const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  if (finished_) return;  // the graph outlives the trace
  const StorageId storage =
      builder_.trace().at(builder_.trace().saves.at(save).value).storage;
  if (storage.valid()) bind(tensor, storage);
}

RecordedSave::RecordedSave(std::shared_ptr<Recorder> recorder,
                           const at::Tensor& tensor, bool hold)
    : recorder_(std::move(recorder)), saved_(recorder_->save(tensor, hold)) {}

RecordedSave::~RecordedSave() {
  saved_.tensor = at::Tensor();
  recorder_->release(saved_.save, saved_.references);
}

void RecordedSave::bind(const at::Tensor& tensor) const {
  recorder_->bind_saved(saved_.save, tensor);
}

void Recorder::unpin(StorageId storage) {
  if (--holders(storage).saves > 0) return;
  if (replayed_) {
    holders(storage).released = builder_.last_op();
    // A tape may hold what it made again for longer.
    if (builder_.trace().at(storage).let_go.valid()) {
      return builder_.free(storage, {});
    }
  }
  const auto parked = parked_.find(storage);
  if (parked == parked_.end()) return maybe_free(storage);
  for (Watched& entry : parked->second) watched_.push_back(std::move(entry));
  parked_.erase(parked);
}

}  // namespace memscale
