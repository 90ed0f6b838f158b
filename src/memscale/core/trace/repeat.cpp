#include "memscale/core/trace/repeat.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "memscale/base/error.h"

namespace memscale {
namespace {

// How the ids of one layer call are those of another: by their place in the
// section, parameter list, or inputs that they belong to. What belongs to
// neither is the same for all layers.
class Renaming {
 public:
  Renaming(const LayerCall& from, const LayerCall& to) : from_(from), to_(to) {}

  std::size_t op(std::size_t id) const {
    if (from_.backward && from_.backward->ops.contains(id) && to_.backward) {
      return shift(id, from_.backward->ops, to_.backward->ops);
    }
    return shift(id, from_.forward.ops, to_.forward.ops);
  }

  StorageId storage(StorageId id) const {
    if (!id.valid()) return id;
    const std::size_t index = id.index();
    if (from_.forward.storages.contains(index)) {
      return StorageId(
          shift(index, from_.forward.storages, to_.forward.storages));
    }
    if (from_.backward && to_.backward &&
        from_.backward->storages.contains(index)) {
      return StorageId(
          shift(index, from_.backward->storages, to_.backward->storages));
    }
    if (id == from_.gradient_in) return to_.gradient_in;
    if (const auto to = by_place(id, from_.inputs, to_.inputs)) return *to;
    if (const auto to = by_place(id, from_.parameters, to_.parameters)) {
      return *to;
    }
    return id;
  }

 private:
  static std::size_t shift(std::size_t id, const IdRange& from,
                           const IdRange& to) {
    return from.contains(id) ? id - from.begin + to.begin : id;
  }
  static std::optional<StorageId> by_place(StorageId id,
                                           const std::vector<StorageId>& from,
                                           const std::vector<StorageId>& to) {
    const auto found = std::ranges::find(from, id);
    if (found == from.end()) return std::nullopt;
    const auto place = static_cast<std::size_t>(found - from.begin());
    if (place >= to.size()) return std::nullopt;
    return to[place];
  }

  const LayerCall& from_;
  const LayerCall& to_;
};

// The storages that a section's ops write into, each with its version before.
class Writes {
 public:
  Writes(const Trace& trace, const Section& section) {
    for (std::size_t i = section.ops.begin; i < section.ops.end; ++i) {
      const Op& op = trace.ops[i];
      for (const auto& values : {op.inputs, op.outputs}) {
        for (const ValueId id : values) {
          const Value& value = trace.at(id);
          if (!value.storage.valid()) continue;
          auto [entry, is_new] =
              first_.try_emplace(value.storage, value.version);
          entry->second = std::min(entry->second, value.version);
        }
      }
    }
  }
  bool contains(StorageId id) const { return first_.contains(id); }
  std::uint32_t first_version(StorageId id) const { return first_.at(id); }

 private:
  std::unordered_map<StorageId, std::uint32_t> first_;
};

// Appends copies of a section's ops, storages, values and saves; what happens
// to the copies after the section is left open.
Section append(TraceBuilder& builder, const Section& model,
               const LayerCall& from, LayerCall& to, bool backward) {
  Trace& trace = builder.mutable_trace();
  Section copy;
  copy.ops = {trace.ops.size(), trace.ops.size() + model.ops.size()};
  copy.storages = {trace.storages.size(),
                   trace.storages.size() + model.storages.size()};
  copy.saves = {trace.saves.size(), trace.saves.size() + model.saves.size()};
  (backward ? to.backward.emplace() : to.forward) = copy;
  const Renaming renamed(from, to);

  for (std::size_t i = model.storages.begin; i < model.storages.end; ++i) {
    Storage storage = trace.storages[i];
    storage.layer = to.layer;
    storage.category = Category::Transient;  // told apart at the end
    if (storage.born.valid()) {
      storage.born = OpId(renamed.op(storage.born.index()));
    }
    for (OpId* const end : {&storage.freed, &storage.let_go}) {
      if (!end->valid()) continue;
      *end = model.ops.contains(end->index()) ? OpId(renamed.op(end->index()))
                                              : OpId();
    }
    storage.returned = false;  // of the copy's own result: told anew
    if (builder.is_forgotten(StorageId(i))) {
      builder.forget(StorageId(trace.storages.size()));
    }
    trace.storages.push_back(storage);
  }

  std::unordered_map<ValueId, ValueId> values;
  const std::size_t first_value = trace.values.size();
  const Writes writes(trace, model);
  const auto value = [&](ValueId id) {
    const StorageId storage = renamed.storage(trace.at(id).storage);
    const bool is_shared = storage == trace.at(id).storage && storage.valid();
    // A storage that all layers write into is at a later version by now.
    const std::uint32_t later =
        is_shared && writes.contains(storage)
            ? builder.version(storage) - writes.first_version(storage)
            : 0;
    if (is_shared && later == 0) return id;
    const auto [entry, is_new] =
        values.try_emplace(id, ValueId(trace.values.size()));
    if (is_new) {
      Value copied = trace.at(id);
      copied.storage = storage;
      copied.version += later;
      trace.values.push_back(std::move(copied));
    }
    return entry->second;
  };
  for (std::size_t i = model.ops.begin; i < model.ops.end; ++i) {
    Op op = trace.ops[i];
    op.layer = to.layer;
    if (op.forward.valid()) op.forward = OpId(renamed.op(op.forward.index()));
    std::ranges::transform(op.inputs, op.inputs.begin(), value);
    std::ranges::transform(op.outputs, op.outputs.begin(), value);
    trace.ops.push_back(std::move(op));
  }
  copy.events.begin = trace.events.size();
  for (std::size_t i = model.events.begin; i < model.events.end; ++i) {
    Event event = trace.events[i];
    event.op = event.op - model.ops.begin + copy.ops.begin;
    event.layer = to.layer;
    std::ranges::transform(event.values, event.values.begin(), value);
    trace.events.push_back(std::move(event));
  }
  copy.events.end = trace.events.size();
  (backward ? *to.backward : to.forward) = copy;
  for (std::size_t i = model.saves.begin; i < model.saves.end; ++i) {
    const OpId op = trace.saves[i].op;
    trace.saves.push_back(
        {.op = op.valid() ? OpId(renamed.op(op.index())) : OpId(),
         .value = value(trace.saves[i].value),
         .by_function = trace.saves[i].by_function});
  }
  builder.index_values_from(first_value);
  return copy;
}

// Two calls that should be alike, place by place.
class Comparison {
 public:
  Comparison(const Trace& trace, const LayerCall& a, const LayerCall& b)
      : trace_(trace), a_(a), b_(b), renamed_(a, b) {}

  std::optional<std::string> sections(const Section& a,
                                      const Section& b) const {
    if (a.ops.size() != b.ops.size() ||
        a.storages.size() != b.storages.size() ||
        a.saves.size() != b.saves.size()) {
      return str(a.ops.size(), " ops, ", a.storages.size(), " storages and ",
                 a.saves.size(), " saves against ", b.ops.size(), ", ",
                 b.storages.size(), " and ", b.saves.size());
    }
    for (std::size_t i = 0; i < a.ops.size(); ++i) {
      const Op& x = trace_.ops[a.ops.begin + i];
      const Op& y = trace_.ops[b.ops.begin + i];
      if (x.name != y.name || !same(x.inputs, y.inputs) ||
          !same(x.outputs, y.outputs) || x.uses != y.uses) {
        return str("op ", a.ops.begin + i, " (", x.name, ") against op ",
                   b.ops.begin + i, " (", y.name, ")");
      }
    }
    for (std::size_t i = 0; i < a.storages.size(); ++i) {
      if (!same(trace_.storages[a.storages.begin + i],
                trace_.storages[b.storages.begin + i])) {
        return str("storage ", i,
                   " has another size or is held for another time");
      }
    }
    for (std::size_t i = 0; i < a.saves.size(); ++i) {
      const Save& x = trace_.saves[a.saves.begin + i];
      const Save& y = trace_.saves[b.saves.begin + i];
      if (!same(x.value, y.value) || !same(x.op, y.op) ||
          !same(x.released, y.released) || x.by_function != y.by_function) {
        return str("save ", i, " is another");
      }
    }
    return std::nullopt;
  }

  std::optional<std::string> inputs() const {
    for (std::size_t i = 0; i < a_.inputs.size(); ++i) {
      if (i >= b_.inputs.size() ||
          a_.inputs[i].valid() != b_.inputs[i].valid()) {
        return "another number of inputs";
      }
      // What all layers get is held for the longest of them.
      if (!a_.inputs[i].valid() || a_.inputs[i] == b_.inputs[i]) continue;
      if (!same(trace_.at(a_.inputs[i]).freed, trace_.at(b_.inputs[i]).freed)) {
        return str("input ", i, " is held for another time");
      }
    }
    return std::nullopt;
  }

 private:
  bool same(ValueId x, ValueId y) const {
    const Value& a = trace_.at(x);
    const Value& b = trace_.at(y);
    return a.dtype == b.dtype && a.sizes == b.sizes && a.strides == b.strides &&
           a.offset == b.offset && renamed_.storage(a.storage) == b.storage;
  }
  bool same(const std::vector<ValueId>& x,
            const std::vector<ValueId>& y) const {
    return std::ranges::equal(x, y,
                              [&](ValueId a, ValueId b) { return same(a, b); });
  }
  // The same op of the layer, or both some op outside of it, or both none.
  // Until backward is known, all that comes after the forward is outside.
  bool same(OpId x, OpId y) const {
    const bool x_inside = is_inside(x, a_);
    if (x_inside != is_inside(y, b_)) return false;
    return !x_inside || renamed_.op(x.index()) == y.index();
  }
  bool same(const Storage& x, const Storage& y) const {
    return x.bytes == y.bytes && x.place == y.place && same(x.born, y.born) &&
           same(x.freed, y.freed);
  }
  bool is_inside(OpId id, const LayerCall& call) const {
    if (!id.valid()) return false;
    if (call.forward.ops.contains(id.index())) return true;
    return a_.backward && b_.backward && call.backward &&
           call.backward->ops.contains(id.index());
  }

  const Trace& trace_;
  const LayerCall& a_;
  const LayerCall& b_;
  Renaming renamed_;
};

}  // namespace

void repeat_forward(TraceBuilder& builder, const LayerCall& model,
                    LayerCall& next) {
  append(builder, model.forward, model, next, false);
}

void find_backward(const Trace& trace, LayerCall& call) {
  const std::size_t none = trace.ops.size();
  std::size_t begin = none;
  std::size_t end = none;
  for (std::size_t i = call.forward.ops.end; i < trace.ops.size(); ++i) {
    const Op& op = trace.ops[i];
    if (op.phase != Phase::Backward || op.layer != call.layer) continue;
    if (begin == none) begin = i;
    if (begin != none && end != none && i != end) {
      throw TraceError(str("the backward of ", trace.at(call.layer).name,
                           " is not in one piece"));
    }
    end = i + 1;
  }
  if (begin == none) {
    throw TraceError(str(trace.at(call.layer).name, " has no backward"));
  }
  Section section;
  section.ops = {begin, end};
  const auto born_in = [&](const Storage& storage) {
    return storage.born.valid() && section.ops.contains(storage.born.index());
  };
  const auto first = std::ranges::find_if(trace.storages, born_in);
  const auto last = std::find_if_not(first, trace.storages.end(), born_in);
  section.storages = {static_cast<std::size_t>(first - trace.storages.begin()),
                      static_cast<std::size_t>(last - trace.storages.begin())};

  // Besides what it made itself and what exists anyway, it takes one gradient.
  call.gradient_in = StorageId();
  for (std::size_t i = begin; i < end; ++i) {
    for (const ValueId value : trace.ops[i].inputs) {
      const StorageId id = trace.at(value).storage;
      if (!id.valid() || section.storages.contains(id.index())) continue;
      const Storage& storage = trace.at(id);
      if (!storage.born.valid() ||
          trace.at(storage.born).phase != Phase::Backward) {
        continue;
      }
      if (call.gradient_in.valid() && call.gradient_in != id) {
        throw TraceError(str("the backward of ", trace.at(call.layer).name,
                             " takes more than one gradient"));
      }
      call.gradient_in = id;
    }
  }
  if (!call.gradient_in.valid()) {
    throw TraceError(str("the backward of ", trace.at(call.layer).name,
                         " takes no gradient"));
  }
  call.gradient_out = StorageId();
  for (std::size_t i = section.storages.begin; i < section.storages.end; ++i) {
    const Storage& storage = trace.storages[i];
    const bool survives =
        !storage.freed.valid() || storage.freed.index() >= end;
    const StorageId id(i);
    const auto& kept = call.parameter_gradients;
    if (!survives || std::ranges::find(kept, id) != kept.end()) continue;
    if (call.gradient_out.valid()) {
      throw TraceError(str("the backward of ", trace.at(call.layer).name,
                           " gives more than one gradient"));
    }
    call.gradient_out = id;
  }
  if (!call.gradient_out.valid()) call.gradient_out = call.gradient_in;
  call.backward = section;
}

std::vector<LastNeed> repeat_backward(TraceBuilder& builder,
                                      const LayerCall& model, LayerCall& next,
                                      StorageId gradient_in) {
  if (!model.backward) throw InternalError("a backward is not known");
  next.gradient_in = gradient_in;
  append(builder, *model.backward, model, next, true);
  const Renaming renamed(model, next);
  Trace& trace = builder.mutable_trace();
  const IdRange& ops = model.backward->ops;
  const auto moved = [&](OpId op) { return OpId(renamed.op(op.index())); };

  // What the forward left for the backward.
  for (std::size_t i = 0; i < model.forward.storages.size(); ++i) {
    const Storage& from = trace.storages[model.forward.storages.begin + i];
    Storage& to = trace.storages[next.forward.storages.begin + i];
    for (OpId Storage::* const end : {&Storage::freed, &Storage::let_go}) {
      const OpId op = from.*end;
      if (op.valid() && ops.contains(op.index())) to.*end = moved(op);
    }
  }
  for (std::size_t i = 0; i < model.forward.saves.size(); ++i) {
    const OpId released = trace.saves[model.forward.saves.begin + i].released;
    if (released.valid() && ops.contains(released.index())) {
      trace.saves[next.forward.saves.begin + i].released = moved(released);
    }
  }
  std::vector<LastNeed> needs;
  const auto need = [&](StorageId from, StorageId to) {
    const OpId freed = trace.at(from).freed;
    if (!freed.valid() || !ops.contains(freed.index())) return;
    if (trace.at(to).freed.valid()) {
      throw TraceError(str("an input of ", trace.at(next.layer).name,
                           " is gone before its backward"));
    }
    needs.push_back({to, moved(freed)});
  };
  need(model.gradient_in, gradient_in);
  for (std::size_t i = 0; i < model.inputs.size(); ++i) {
    if (model.inputs[i].valid()) need(model.inputs[i], next.inputs[i]);
  }
  next.gradient_out = renamed.storage(model.gradient_out);
  next.parameter_gradients.clear();
  for (const StorageId id : model.parameter_gradients) {
    next.parameter_gradients.push_back(renamed.storage(id));
    if (id.valid()) {
      builder.set_category(next.parameter_gradients.back(), Category::Gradient);
    }
  }
  return needs;
}

void close_repeat(TraceBuilder& builder, const LayerCall& model,
                  const LayerCall& copy) {
  Trace& trace = builder.mutable_trace();
  const auto close = [&](const Section& from, const Section& to) {
    for (std::size_t i = 0; i < from.storages.size(); ++i) {
      const Storage& model_storage = trace.storages[from.storages.begin + i];
      Storage& copied = trace.storages[to.storages.begin + i];
      if (!copied.freed.valid()) copied.freed = model_storage.freed;
      if (copied.let_go.valid() || !model_storage.let_go.valid()) continue;
      // By the layer after it, then by the copy's next; or by the end of
      // forward.
      const std::size_t let_go = model_storage.let_go.index();
      copied.let_go = let_go >= to.ops.end
                          ? model_storage.let_go
                          : OpId(let_go - from.ops.begin + to.ops.begin);
      copied.let_go = std::min(copied.let_go, copied.freed);
    }
  };
  close(model.forward, copy.forward);
}

std::optional<std::string> difference(const Trace& trace, const LayerCall& a,
                                      const LayerCall& b) {
  const Comparison comparison(trace, a, b);
  if (const auto found = comparison.sections(a.forward, b.forward)) {
    return "forward: " + *found;
  }
  if (!a.backward || !b.backward) return std::nullopt;
  if (const auto found = comparison.sections(*a.backward, *b.backward)) {
    return "backward: " + *found;
  }
  return comparison.inputs();
}

}  // namespace memscale
