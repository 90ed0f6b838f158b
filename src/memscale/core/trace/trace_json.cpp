#include "memscale/core/trace/trace_json.h"

#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/json/json_fields.h"

namespace memscale {

// The fields of each struct, in the order they are written. Each is taken
// apart, so that a member that is not listed here does not compile. Found by
// argument-dependent lookup, so not in a namespace of their own.
using json::Is;

static void each_field(Is<Layer> auto& layer, auto&& field) {
  auto& [name] = layer;
  field("name", name);
}

static void each_field(Is<Use> auto& use, auto&& field) {
  auto& [access, is_leaf] = use;
  field("access", access);
  field("is_leaf", is_leaf);
}

static void each_field(Is<Event> auto& event, auto&& field) {
  auto& [kind, op, layer, no_grad, values] = event;
  field("kind", kind);
  field("op", op);
  field("layer", layer);
  field("no_grad", no_grad);
  field("values", values);
}

static void each_field(Is<Op> auto& op, auto&& field) {
  auto& [name, phase, layer, forward, inputs, outputs, uses, random, mutates,
         view, opaque, in_function, may_write, no_grad, aliases, accumulates,
         transposed, not_waited_for, flops, moved, workspace, workspace_known,
         nanoseconds] = op;
  field("name", name);
  field("phase", phase);
  field("layer", layer);
  field("forward", forward);
  field("inputs", inputs);
  field("outputs", outputs);
  field("uses", uses);
  field("random", random);
  field("mutates", mutates);
  field("view", view);
  field("opaque", opaque);
  field("in_function", in_function);
  field("may_write", may_write);
  field("no_grad", no_grad);
  field("aliases", aliases);
  field("accumulates", accumulates);
  field("transposed", transposed);
  field("not_waited_for", not_waited_for);
  field("flops", flops);
  field("moved", moved);
  field("workspace", workspace);
  field("workspace_known", workspace_known);
  field("nanoseconds", nanoseconds);
}

static void each_field(Is<Value> auto& value, auto&& field) {
  auto& [storage, dtype, sizes, strides, offset, version] = value;
  field("storage", storage);
  field("dtype", dtype);
  field("sizes", sizes);
  field("strides", strides);
  field("offset", offset);
  field("version", version);
}

static void each_field(Is<Storage> auto& storage, auto&& field) {
  auto& [bytes, count, place, category, layer, born, freed, let_go, returned,
         plain_freed] = storage;
  field("bytes", bytes);
  field("count", count);
  field("place", place);
  field("category", category);
  field("layer", layer);
  field("born", born);
  field("freed", freed);
  field("let_go", let_go);
  field("returned", returned);
  field("plain_freed", plain_freed);
}

static void each_field(Is<Save> auto& save, auto&& field) {
  auto& [op, value, released, by_function] = save;
  field("op", op);
  field("value", value);
  field("released", released);
  field("by_function", by_function);
}

static void each_field(Is<Trace> auto& trace, auto&& field) {
  auto& [layers, ops, events, values, storages, saves, saves_known, notes] =
      trace;
  field("layers", layers);
  field("ops", ops);
  field("events", events);
  field("values", values);
  field("storages", storages);
  field("saves", saves);
  field("saves_known", saves_known);
  field("notes", notes);
}

namespace {

// Ours is 5: trace, ops, op, uses, use. Anything deeper is not a trace.
constexpr json::Form<TraceError> kForm = {"memscale-trace", 3, "a trace", 8};

}  // namespace

std::string to_json(const Trace& trace) {
  json::Writer<TraceError> writer;
  writer.write_document(kForm, trace);
  return std::move(writer).take();
}

Trace trace_from_json(std::string_view text) {
  Trace trace;
  json::Reader<TraceError>(kForm).read_document(text, trace);
  trace.check();
  return trace;
}

}  // namespace memscale
