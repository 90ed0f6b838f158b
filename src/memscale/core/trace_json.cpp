#include "memscale/core/trace_json.h"

#include <utility>

#include "memscale/base/error.h"
#include "memscale/core/json_fields.h"

namespace memscale {

// The fields of each struct, in the order they are written. Each is taken
// apart, so that a member that is not listed here does not compile. Found by
// argument-dependent lookup, so not in a namespace of their own.
using json::Is;

static void each_field(Is<Layer> auto& layer, auto&& field) {
  auto& [name] = layer;
  field("name", name);
}

static void each_field(Is<Op> auto& op, auto&& field) {
  auto& [name, phase, layer, forward, inputs, outputs, random, mutates, view,
         opaque, in_function, may_write, no_grad, flops, moved, workspace,
         workspace_known, nanoseconds] = op;
  field("name", name);
  field("phase", phase);
  field("layer", layer);
  field("forward", forward);
  field("inputs", inputs);
  field("outputs", outputs);
  field("random", random);
  field("mutates", mutates);
  field("view", view);
  field("opaque", opaque);
  field("in_function", in_function);
  field("may_write", may_write);
  field("no_grad", no_grad);
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
  auto& [layers, ops, values, storages, saves, saves_known, notes] = trace;
  field("layers", layers);
  field("ops", ops);
  field("values", values);
  field("storages", storages);
  field("saves", saves);
  field("saves_known", saves_known);
  field("notes", notes);
}

namespace {

// Ours is 4: trace, array, object, array. Anything deeper is not a trace.
constexpr json::Form<TraceError> kForm = {"memscale-trace", 2, "a trace", 8};

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
