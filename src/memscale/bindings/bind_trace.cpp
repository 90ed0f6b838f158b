#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "memscale/base/enum_names.h"
#include "memscale/bindings/bindings.h"
#include "memscale/core/hardware/fit.h"
#include "memscale/core/ops/op_cost.h"
#include "memscale/core/ops/op_table.h"
#include "memscale/core/trace/timeline.h"
#include "memscale/core/trace/trace.h"
#include "memscale/core/trace/trace_json.h"

namespace py = pybind11;

namespace memscale {
namespace {

py::dict by_name(const BytesByCategory& bytes) {
  py::dict names;
  for (const auto& entry : enum_table<Category>()) {
    names[py::str(entry.name.data(), entry.name.size())] =
        bytes[static_cast<std::size_t>(entry.value)];
  }
  return names;
}

std::optional<std::string> layer_name(const Trace& trace, LayerId layer) {
  if (!layer.valid()) return std::nullopt;
  return trace.at(layer).name;
}

// An element of a trace, with the trace that its ids point into.
template <typename T>
struct Entry {
  const Trace* trace;
  std::size_t index;
  const T* entry;
};

Entry<Op> op_at(const Trace& trace, std::size_t index) {
  if (index >= trace.ops.size()) throw py::index_error("no such op");
  return {&trace, index, &trace.ops[index]};
}

void bind_entries(py::module_& m) {
  py::class_<Entry<Op>>(m, "Op")
      .def_readonly("index", &Entry<Op>::index)
      .def_property_readonly("name",
                             [](const Entry<Op>& e) { return e.entry->name; })
      .def_property_readonly(
          "phase", [](const Entry<Op>& e) { return to_string(e.entry->phase); })
      .def_property_readonly("layer",
                             [](const Entry<Op>& e) {
                               return layer_name(*e.trace, e.entry->layer);
                             })
      .def_property_readonly(
          "forward",
          [](const Entry<Op>& e) {
            return e.entry->forward.valid()
                       ? std::optional(e.entry->forward.index())
                       : std::nullopt;
          })
      .def_property_readonly("random",
                             [](const Entry<Op>& e) { return e.entry->random; })
      .def_property_readonly(
          "mutates", [](const Entry<Op>& e) { return e.entry->mutates; })
      .def_property_readonly("view",
                             [](const Entry<Op>& e) { return e.entry->view; })
      .def_property_readonly("opaque",
                             [](const Entry<Op>& e) { return e.entry->opaque; })
      .def_property_readonly(
          "in_function",
          [](const Entry<Op>& e) { return e.entry->in_function; })
      .def_property_readonly(
          "accesses",
          [](const Entry<Op>& e) {
            std::vector<std::string_view> names;
            for (std::size_t i = 0; i < e.entry->inputs.size(); ++i) {
              names.push_back(to_string(e.entry->use(i).access));
            }
            return names;
          })
      .def_property_readonly("from_leaves",
                             [](const Entry<Op>& e) {
                               std::vector<bool> leaves;
                               for (std::size_t i = 0;
                                    i < e.entry->inputs.size(); ++i) {
                                 leaves.push_back(e.entry->use(i).is_leaf);
                               }
                               return leaves;
                             })
      .def_property_readonly(
          "aliases", [](const Entry<Op>& e) { return e.entry->aliases; })
      .def_property_readonly(
          "accumulates",
          [](const Entry<Op>& e) { return e.entry->accumulates; })
      .def_property_readonly("flops",
                             [](const Entry<Op>& e) { return e.entry->flops; })
      .def_property_readonly("moved",
                             [](const Entry<Op>& e) { return e.entry->moved; })
      .def_property_readonly("workspace", [](const Entry<Op>& e) {
        return e.entry->workspace_known ? std::optional(e.entry->workspace)
                                        : std::nullopt;
      });

  py::class_<Entry<Storage>>(m, "Storage")
      .def_readonly("index", &Entry<Storage>::index)
      .def_property_readonly("bytes",
                             [](const Entry<Storage>& e) {
                               return e.entry->bytes * e.entry->count;
                             })
      .def_property_readonly(
          "category",
          [](const Entry<Storage>& e) { return to_string(e.entry->category); })
      .def_property_readonly("layer",
                             [](const Entry<Storage>& e) {
                               return layer_name(*e.trace, e.entry->layer);
                             })
      .def_property_readonly("made_by", [](const Entry<Storage>& e) {
        return e.entry->born.valid()
                   ? std::optional(e.trace->at(e.entry->born).name)
                   : std::nullopt;
      });
}

}  // namespace

void bind_trace(py::module_& m) {
  bind_entries(m);
  m.def("op_names", [] {
    std::vector<std::string> names;
    for (const OpRow& row : op_rows()) names.emplace_back(row.name);
    return names;
  });
  m.def(
      "describe_op",
      [](std::string_view name) { return describe(find_op_row(name)); },
      py::arg("name"));
  m.def("dtype_names", [] {
    std::vector<std::string> names;
    for (const auto& entry : enum_table<Dtype>()) {
      names.emplace_back(entry.name);
    }
    return names;
  });
  py::class_<Trace, std::shared_ptr<Trace>>(m, "Trace")
      .def("to_json", &to_json)
      .def_static("from_json", &trace_from_json)
      .def("__eq__", [](const Trace& a, const Trace& b) { return a == b; })
      .def("__len__", [](const Trace& t) { return t.ops.size(); })
      .def("__getitem__", &op_at, py::keep_alive<0, 1>())
      .def_property_readonly("num_saves",
                             [](const Trace& t) { return t.saves.size(); })
      .def_property_readonly(
          "events",
          [](const Trace& t) {
            std::vector<std::tuple<std::string_view, std::size_t,
                                   std::optional<std::string>>>
                events;
            for (const Event& event : t.events) {
              events.emplace_back(to_string(event.kind), event.op,
                                  layer_name(t, event.layer));
            }
            return events;
          })
      .def_readonly("saves_known", &Trace::saves_known)
      .def_readonly("notes", &Trace::notes)
      .def_property_readonly("uncounted_ops", &uncounted_ops)
      .def_property_readonly("layers", [](const Trace& t) {
        std::vector<std::string> names;
        for (const Layer& layer : t.layers) names.push_back(layer.name);
        return names;
      });

  py::class_<Instant>(m, "Instant")
      .def_property_readonly("op",
                             [](const Instant& i) { return i.op.index(); })
      .def_readonly("bytes", &Instant::bytes)
      .def_property_readonly("by_category", [](const Instant& i) {
        return by_name(i.by_category);
      });

  py::class_<Fit>(m, "Fit")
      .def_readonly("fits", &Fit::fits)
      .def_readonly("needed", &Fit::needed)
      .def_readonly("reserve", &Fit::reserve)
      .def_readonly("capacity", &Fit::capacity);
  m.def("fit", &fit, py::arg("peak"), py::arg("capacity"));

  py::class_<Timeline>(m, "Timeline")
      .def(py::init([](const Trace& trace, std::string_view place,
                       Bytes granularity) {
             return Timeline(trace, from_string<Place>(place), granularity);
           }),
           py::arg("trace"), py::arg("place"), py::arg("granularity"),
           py::keep_alive<1, 2>())
      .def("__len__", [](const Timeline& t) { return t.instants().size(); })
      .def("__getitem__",
           [](const Timeline& t, std::size_t op) {
             if (op >= t.instants().size()) throw py::index_error("no such op");
             return t.instants()[op];
           })
      .def(
          "peak",
          [](const Timeline& t, std::optional<std::string_view> phase) {
            return phase ? t.peak(from_string<Phase>(*phase)) : t.peak();
          },
          py::arg("phase") = py::none())
      .def_property_readonly("resident", &Timeline::resident)
      .def("by_layer",
           [](const Timeline& t, std::size_t op) {
             py::list shares;
             for (const LayerShare& share : t.by_layer(OpId(op))) {
               shares.append(py::make_tuple(layer_name(t.trace(), share.layer),
                                            share.bytes,
                                            by_name(share.by_category)));
             }
             return shares;
           })
      .def("held", [](const py::object& self, std::size_t op) {
        const auto& t = self.cast<const Timeline&>();
        py::list held;
        for (const StorageId id : t.held(OpId(op))) {
          const py::object entry = py::cast(
              Entry<Storage>{&t.trace(), id.index(), &t.trace().at(id)});
          // Each of them: a list cannot keep anything alive.
          py::detail::keep_alive_impl(entry, self);
          held.append(entry);
        }
        return held;
      });
}

}  // namespace memscale
