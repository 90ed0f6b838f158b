// Recorder's part in repeating equal layers: it ties the copies that
// core/trace/repeat.cpp makes to the tensors that stand for them.

#include <ranges>

#include "memscale/base/error.h"
#include "memscale/runtime/record/recorder.h"

namespace memscale {

LayerCall Recorder::new_call(LayerId layer,
                             const std::vector<at::Tensor>& parameters,
                             const std::vector<at::Tensor>& inputs) {
  LayerCall call;
  call.layer = layer;
  for (const at::Tensor& tensor : parameters) {
    call.parameters.push_back(storage_id(*tensor.unsafeGetTensorImpl()));
  }
  for (const at::Tensor& tensor : inputs) {
    call.inputs.push_back(storage_id(*tensor.unsafeGetTensorImpl()));
  }
  return call;
}

void Recorder::bind(const at::Tensor& tensor, StorageId storage) {
  watch(tensor.storage().unsafeGetStorageImpl(), storage);
}

LayerCall Recorder::begin_call(LayerId layer,
                               const std::vector<at::Tensor>& parameters,
                               const std::vector<at::Tensor>& inputs) {
  const std::lock_guard lock(mutex_);
  find_dead();
  LayerCall call = new_call(layer, parameters, inputs);
  const Trace& trace = builder_.trace();
  call.forward.ops.begin = trace.ops.size();
  call.forward.storages.begin = trace.storages.size();
  call.forward.saves.begin = trace.saves.size();
  call.forward.events.begin = trace.events.size();
  return call;
}

void Recorder::end_call(LayerCall& call) {
  const std::lock_guard lock(mutex_);
  find_dead();
  const Trace& trace = builder_.trace();
  call.forward.ops.end = trace.ops.size();
  call.forward.storages.end = trace.storages.size();
  call.forward.saves.end = trace.saves.size();
  call.forward.events.end = trace.events.size();
}

void Recorder::find_backward(LayerCall& call,
                             const std::vector<at::Tensor>& gradients) {
  const std::lock_guard lock(mutex_);
  find_dead();
  call.parameter_gradients.clear();
  for (const at::Tensor& gradient : gradients) {
    call.parameter_gradients.push_back(
        gradient.defined() ? storage_id(*gradient.unsafeGetTensorImpl())
                           : StorageId());
  }
  memscale::find_backward(builder_.trace(), call);
}

LayerCall Recorder::repeat_forward(const LayerCall& model, LayerId layer,
                                   const std::vector<at::Tensor>& parameters,
                                   const std::vector<at::Tensor>& inputs) {
  const std::lock_guard lock(mutex_);
  find_dead();
  LayerCall call = new_call(layer, parameters, inputs);
  memscale::repeat_forward(builder_, model, call);
  for (std::size_t i = call.forward.saves.begin; i < call.forward.saves.end;
       ++i) {
    const StorageId storage =
        builder_.trace().at(builder_.trace().saves[i].value).storage;
    if (storage.valid()) ++holders(storage).saves;
  }
  return call;
}

std::optional<std::size_t> Recorder::place_of(const LayerCall& call,
                                              const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  const StorageId id = storage_id(*tensor.unsafeGetTensorImpl());
  if (!id.valid() || !call.forward.storages.contains(id.index())) {
    return std::nullopt;
  }
  return id.index() - call.forward.storages.begin;
}

void Recorder::bind_result(const LayerCall& call, std::size_t place,
                           const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  bind(tensor, StorageId(call.forward.storages.begin + place));
}

void Recorder::repeat_backward(const LayerCall& model, LayerCall& call,
                               const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  find_dead();
  const StorageId gradient_in = storage_id(*gradient.unsafeGetTensorImpl());
  for (const LastNeed& need :
       memscale::repeat_backward(builder_, model, call, gradient_in)) {
    holders(need.storage).last_needed = need.op;
    hinted_.push_back(need.storage);
  }
  for (std::size_t i = call.forward.saves.begin; i < call.forward.saves.end;
       ++i) {
    const StorageId storage =
        builder_.trace().at(builder_.trace().saves[i].value).storage;
    if (storage.valid()) unpin(storage);
  }
}

void Recorder::bind_gradient(const LayerCall& call,
                             const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_);
  bind(gradient, call.gradient_out);
}

void Recorder::close_repeat(const LayerCall& model, const LayerCall& call) {
  const std::lock_guard lock(mutex_);
  find_dead();
  memscale::close_repeat(builder_, model, call);
}

std::optional<std::string> Recorder::difference(const LayerCall& a,
                                                const LayerCall& b) {
  const std::lock_guard lock(mutex_);
  find_dead();
  return memscale::difference(builder_.trace(), a, b);
}

}  // namespace memscale
