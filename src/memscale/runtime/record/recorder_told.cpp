// What the caller tells the recorder: the dispatcher does not know it.

#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "memscale/runtime/record/recorder.h"

namespace memscale {

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
  const bool on_device = impl.key_set().has_backend(leaf_ops_.backend());
  const StorageId id = builder_.add_resident(
      Bytes(static_cast<std::int64_t>(impl.unsafe_storage().nbytes())),
      on_device ? Place::Device : Place::Host, category, layer);
  storage_ids_[impl.unsafe_storage().unsafeGetStorageImpl()] = id;
  holders(id).impls = 1;  // never looked at, never let go
  residents_.push_back(tensor);
}

void Recorder::enter_layer(LayerId layer) {
  const std::lock_guard lock(mutex_);
  // Ops that are being recomputed were recorded with their layers before.
  if (!recomputed_) {
    builder_.enter_layer(layer, !c10::GradMode::is_enabled());
  }
  numbered_.push_back({at::sequence_number::peek(), layer, OpId()});
}

void Recorder::leave_layer() {
  const std::lock_guard lock(mutex_);
  if (!recomputed_ && !builder_.leave_layer()) return;
  numbered_.push_back({at::sequence_number::peek(), builder_.layer(), OpId()});
}

void Recorder::set_phase(Phase phase) {
  const std::lock_guard lock(mutex_);
  find_dead();
  builder_.set_phase(phase);
  builder_.leave_all_layers();
}

Phase Recorder::phase() {
  const std::lock_guard lock(mutex_);
  return builder_.phase();
}

void Recorder::set_category(const at::Tensor& tensor, Category category) {
  const std::lock_guard lock(mutex_);
  const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
  if (id.valid()) builder_.set_category(id, category);
}

void Recorder::set_returned(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
  if (id.valid()) builder_.set_returned(id);
}

void Recorder::forget(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
  if (id.valid()) builder_.forget(id);
}

void Recorder::end_forgotten() {
  const std::lock_guard lock(mutex_);
  if (!finished_) builder_.end_forgotten();
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
  ++holders(id).impls;  // it outlives the tensor that stands for it here
}

void Recorder::add_note(std::string note) {
  const std::lock_guard lock(mutex_);
  builder_.add_note(std::move(note));
}

void Recorder::set_saves_unknown() {
  const std::lock_guard lock(mutex_);
  builder_.set_saves_unknown();
}

}  // namespace memscale
