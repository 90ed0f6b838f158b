#include "memscale/core/trace/trace_builder.h"

#include <algorithm>
#include <ranges>
#include <utility>

#include "memscale/base/error.h"

namespace memscale {

LayerId TraceBuilder::add_layer(std::string name) {
  const LayerId id(trace_.layers.size());
  trace_.layers.push_back({std::move(name)});
  return id;
}

StorageId TraceBuilder::add_resident(Bytes bytes, Place place,
                                     Category category, LayerId layer) {
  const StorageId id(trace_.storages.size());
  trace_.storages.push_back(
      {.bytes = bytes, .place = place, .category = category, .layer = layer});
  return id;
}

StorageId TraceBuilder::add_storage(Bytes bytes, Place place) {
  const StorageId id(trace_.storages.size());
  trace_.storages.push_back(
      {.bytes = bytes, .place = place, .layer = layer_, .born = last_op()});
  return id;
}

ValueId TraceBuilder::add_value(Value value) {
  if (!value.storage.valid()) {
    trace_.values.push_back(std::move(value));
    return ValueId(trace_.values.size() - 1);
  }
  const std::size_t storage = value.storage.index();
  if (versions_.size() <= storage) versions_.resize(storage + 1);
  if (views_.size() <= storage) views_.resize(storage + 1);
  value.version = versions_[storage];
  // The newest views are the likeliest.
  auto& views = views_[storage];
  for (const ValueId view : std::views::reverse(views)) {
    if (trace_.at(view) == value) return view;
  }
  trace_.values.push_back(std::move(value));
  views.emplace_back(trace_.values.size() - 1);
  return views.back();
}

void TraceBuilder::index_values_from(std::size_t first_value) {
  for (std::size_t i = first_value; i < trace_.values.size(); ++i) {
    const StorageId id = trace_.values[i].storage;
    if (!id.valid()) continue;
    if (versions_.size() <= id.index()) versions_.resize(id.index() + 1);
    if (views_.size() <= id.index()) views_.resize(id.index() + 1);
    auto& version = versions_[id.index()];
    version = std::max(version, trace_.values[i].version);
    views_[id.index()].emplace_back(i);
  }
}

OpId TraceBuilder::begin_op(Op op) {
  if (running_) throw InternalError(str(op.name, " begins inside another op"));
  op.phase = phase_;
  op.layer = layer_;
  trace_.ops.push_back(std::move(op));
  running_ = true;
  return last_op();
}

void TraceBuilder::end_op(std::vector<ValueId> outputs) {
  if (!running_) throw InternalError("an op ends that did not begin");
  trace_.ops.back().outputs = std::move(outputs);
  running_ = false;
}

void TraceBuilder::set_workspace(Bytes bytes) {
  if (!running_) throw InternalError("a workspace without an op");
  trace_.ops.back().workspace = std::max(bytes, Bytes());
  trace_.ops.back().workspace_known = true;
}

void TraceBuilder::cancel_op() {
  if (!running_) throw InternalError("an op is cancelled that did not begin");
  trace_.ops.pop_back();
  running_ = false;
}

OpId TraceBuilder::last_op() const {
  return trace_.ops.empty() ? OpId() : OpId(trace_.ops.size() - 1);
}

void TraceBuilder::bump_version(StorageId storage) {
  if (versions_.size() <= storage.index()) {
    versions_.resize(storage.index() + 1);
  }
  ++versions_[storage.index()];
}

std::uint32_t TraceBuilder::version(StorageId storage) const {
  return storage.index() < versions_.size() ? versions_[storage.index()] : 0;
}

void TraceBuilder::grow(StorageId storage, Bytes bytes) {
  Bytes& held = trace_.storages.at(storage.index()).bytes;
  held = std::max(held, bytes);
}

void TraceBuilder::free(StorageId storage, OpId after, bool let_go_known) {
  Storage& freed = trace_.storages.at(storage.index());
  // A save may be let go twice: by the tensor and by what stood for it.
  if (freed.freed.valid()) return;
  freed.freed = after.valid() ? after : last_op();
  if (freed.born.valid() && freed.freed < freed.born) freed.freed = freed.born;
  if (!freed.let_go.valid() && !let_go_known) return;
  freed.let_go = std::min(freed.let_go, freed.freed);
}

void TraceBuilder::let_go(StorageId storage) {
  OpId& let_go = trace_.storages.at(storage.index()).let_go;
  if (!let_go.valid()) let_go = last_op();
}

void TraceBuilder::set_returned(StorageId storage) {
  trace_.storages.at(storage.index()).returned = true;
}

void TraceBuilder::forget(StorageId storage) {
  if (!is_forgotten(storage)) forgotten_.push_back(storage);
}

bool TraceBuilder::is_forgotten(StorageId storage) const {
  return std::ranges::find(forgotten_, storage) != forgotten_.end();
}

void TraceBuilder::end_forgotten() {
  for (const StorageId storage : forgotten_) {
    trace_.storages.at(storage.index()).plain_freed = last_op();
  }
}

std::size_t TraceBuilder::add_save(ValueId value, bool by_function) {
  trace_.saves.push_back(
      {.op = last_op(), .value = value, .by_function = by_function});
  return trace_.saves.size() - 1;
}

void TraceBuilder::release_save(std::size_t save) {
  OpId& released = trace_.saves.at(save).released;
  if (!released.valid()) released = last_op();
}

void TraceBuilder::set_category(StorageId storage, Category category) {
  trace_.storages.at(storage.index()).category = category;
}

void TraceBuilder::set_stands_for(StorageId storage,
                                  std::vector<StorageId> parameters) {
  stands_for_[storage] = std::move(parameters);
}

void TraceBuilder::make_state(StorageId storage, StorageId parameter) {
  Storage state = trace_.storages.at(storage.index());
  state.category = Category::OptimizerState;
  state.born = OpId();
  state.freed = OpId();
  state.let_go = OpId();
  const auto found = stands_for_.find(parameter);
  const std::vector<StorageId> owners =
      found == stands_for_.end() ? std::vector{parameter} : found->second;
  for (std::size_t i = 0; i < owners.size(); ++i) {
    if (owners[i].valid()) state.layer = trace_.at(owners[i]).layer;
    if (i == 0) {
      trace_.storages[storage.index()] = state;
    } else {
      trace_.storages.push_back(state);
    }
  }
  stands_for_[storage] = owners;
}

void TraceBuilder::add_event(Event event) {
  if (phase_ != Phase::Forward) return;
  event.op = trace_.ops.size();
  trace_.events.push_back(std::move(event));
}

void TraceBuilder::enter_layer(LayerId layer, bool no_grad) {
  outer_layers_.push_back(layer_);
  layer_ = layer;
  add_event(
      {.kind = Event::Kind::EnterLayer, .layer = layer, .no_grad = no_grad});
}

bool TraceBuilder::leave_layer() {
  if (outer_layers_.empty()) return false;
  add_event({.kind = Event::Kind::LeaveLayer, .layer = layer_});
  layer_ = outer_layers_.back();
  outer_layers_.pop_back();
  return true;
}

void TraceBuilder::leave_all_layers() {
  outer_layers_.clear();
  layer_ = LayerId();
}

void TraceBuilder::add_function(Event::Kind kind, std::vector<ValueId> values) {
  add_event({.kind = kind, .layer = layer_, .values = std::move(values)});
}

void TraceBuilder::add_note(std::string note) {
  if (std::ranges::find(trace_.notes, note) == trace_.notes.end()) {
    trace_.notes.push_back(std::move(note));
  }
}

// A loop over parameters needs its temporaries once; an op over a list of them
// has one for each alive at the same time.
void TraceBuilder::multiply_foreach_temporaries() {
  for (std::size_t i = 0; i < trace_.ops.size(); ++i) {
    const Op& op = trace_.ops[i];
    if (op.phase != Phase::Optimizer ||
        !op.name.starts_with("aten::_foreach_")) {
      continue;
    }
    const std::size_t pairs = std::min(op.inputs.size(), op.outputs.size());
    for (std::size_t k = 0; k < pairs; ++k) {
      const auto source = stands_for_.find(trace_.at(op.inputs[k]).storage);
      const StorageId made = trace_.at(op.outputs[k]).storage;
      if (source == stands_for_.end() || !made.valid()) continue;
      Storage& storage = trace_.storages.at(made.index());
      if (storage.born != OpId(i)) continue;
      storage.count = static_cast<std::int64_t>(source->second.size());
      stands_for_[made] = source->second;
    }
  }
}

void TraceBuilder::tell_activations() {
  const auto backward = std::ranges::find_if(
      trace_.ops, [](const Op& op) { return op.phase != Phase::Forward; });
  const OpId first_backward(
      static_cast<std::size_t>(backward - trace_.ops.begin()));
  for (Storage& storage : trace_.storages) {
    if (storage.category != Category::Transient || !storage.born.valid()) {
      continue;
    }
    // An invalid id compares after every valid one.
    if (storage.born < first_backward && storage.freed >= first_backward) {
      storage.category = Category::Activation;
    }
  }
}

Trace TraceBuilder::finish() {
  multiply_foreach_temporaries();
  tell_activations();
  Trace trace = std::move(trace_);
  *this = TraceBuilder();
  trace.check();
  return trace;
}

}  // namespace memscale
