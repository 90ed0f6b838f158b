#include <pybind11/gil_safe_call_once.h>
#include <pybind11/operators.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/base/enum_names.h"
#include "memscale/base/error.h"
#include "memscale/base/log.h"
#include "memscale/bindings/bindings.h"
#include "memscale/core/config/config.h"
#include "memscale/core/hardware/hardware.h"
#include "memscale/core/hardware/host.h"
#include "memscale/core/hardware/known_devices.h"
#include "memscale/core/plan/plan.h"

namespace py = pybind11;

namespace memscale {
namespace {

// Where Python finds these classes, for help() and pickle.
constexpr const char* kConfigModule = "memscale.config";
constexpr const char* kHardwareModule = "memscale.hardware";

// ---- plain data <-> Python -------------------------------------------------

// enum.Enum, made from the C++ table: CONSERVATIVE = "conservative", ...
const py::object& mode_type() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> store;
  return store
      .call_once_and_store_result([] {
        py::list members;
        for (const auto& entry : enum_table<OptimizationMode>()) {
          const py::str value(entry.name.data(), entry.name.size());
          members.append(py::make_tuple(value.attr("upper")(), value));
        }
        py::object type = py::module_::import("enum").attr("Enum")(
            "OptimizationMode", members, py::arg("module") = kConfigModule);
        type.attr("__doc__") = "What may be spent to save memory.";
        return type;
      })
      .get_stored();
}

// An integer, or a real where it is too large for one, or nothing.
std::optional<FieldValue> number_from(py::handle object) {
  const auto index = py::reinterpret_steal<py::object>(
      PyIndex_Check(object.ptr()) ? PyNumber_Index(object.ptr()) : nullptr);
  if (index) {
    int overflow = 0;
    const auto value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    if (overflow == 0) return FieldValue(std::int64_t{value});
    double real = PyLong_AsDouble(index.ptr());
    if (PyErr_Occurred()) real = overflow * HUGE_VAL;
    PyErr_Clear();
    return FieldValue(real);
  }
  PyErr_Clear();
  const auto* methods = Py_TYPE(object.ptr())->tp_as_number;
  if (methods == nullptr || methods->nb_float == nullptr) return std::nullopt;
  const auto real =
      py::reinterpret_steal<py::object>(PyNumber_Float(object.ptr()));
  if (real) return FieldValue(PyFloat_AsDouble(real.ptr()));
  PyErr_Clear();
  return std::nullopt;
}

FieldValue from_python(const FieldSpec& spec, py::handle object);

FieldMap map_from(const py::dict& dict) {
  FieldMap map;
  for (const auto& [key, value] : dict) {
    const auto name = py::str(key).cast<std::string>();
    map.emplace_back(name, from_python(AsyncOffloadConfig::field(name), value));
  }
  return map;
}

// What the field is offered; whether it takes it is decided in core.
FieldValue from_python(const FieldSpec& spec, py::handle object) {
  if (object.is_none()) return {};
  if (PyBool_Check(object.ptr())) return object.cast<bool>();
  if (py::isinstance<py::str>(object)) return object.cast<std::string>();
  if (py::isinstance(object, mode_type())) {
    return object.attr("value").cast<std::string>();
  }
  if (py::isinstance<AsyncOffloadConfig>(object)) {
    return object.cast<const AsyncOffloadConfig&>().to_map(true);
  }
  if (py::isinstance<py::dict>(object) && spec.kind == FieldKind::Record) {
    return map_from(py::reinterpret_borrow<py::dict>(object));
  }
  if (py::isinstance<Plan>(object)) return to_json(object.cast<const Plan&>());
  if (spec.kind == FieldKind::Text && py::hasattr(object, "__fspath__")) {
    const py::object path = py::module_::import("os").attr("fspath")(object);
    if (py::isinstance<py::str>(path)) return path.cast<std::string>();
  }
  if (auto number = number_from(object)) return *number;
  reject(spec, py::repr(object).cast<std::string>());
}

py::object to_python(const FieldValue& value);

py::dict to_python(const FieldMap& map) {
  py::dict dict;
  for (const auto& [name, value] : map) dict[py::str(name)] = to_python(value);
  return dict;
}

py::object to_python(const FieldValue& value) {
  return std::visit(
      []<typename T>(const T& v) -> py::object {
        if constexpr (std::is_same_v<T, std::monostate>)
          return py::none();
        else if constexpr (std::is_same_v<T, FieldMap>)
          return to_python(v);
        else
          return py::cast(v);
      },
      value);
}

template <typename T>
std::vector<T> listed(std::span<const T> items) {
  return {items.begin(), items.end()};
}

// ---- Config ----------------------------------------------------------------

// As an attribute shows it: the enum as itself, and of a record the record
// itself (see Box in setting.h).
template <typename Owner>
py::object attribute(const Owner& owner, const FieldSpec& spec) {
  if constexpr (std::is_same_v<Owner, Config>) {
    if (spec.kind == FieldKind::Record) {
      return py::cast(owner.async_config.get().share());
    }
  }
  py::object value = to_python(owner.get(spec.name));
  return spec.kind == FieldKind::Choice ? mode_type()(value) : value;
}

template <typename Owner>
void assign(Owner& owner, const std::string& name, py::handle value) {
  owner.set(name, from_python(Owner::field(name), value));
}

template <typename Owner>
Owner updated(Owner owner, const py::dict& fields) {
  for (const auto& [name, value] : fields) {
    assign(owner, py::str(name).cast<std::string>(), value);
  }
  return owner;
}

template <typename Owner>
auto bind_config(py::module_& m, const char* name) {
  py::class_<Owner, std::shared_ptr<Owner>> cls(m, name);
  cls.attr("__module__") = kConfigModule;
  cls.def(py::init([](const py::kwargs& fields) {
       return std::make_shared<Owner>(updated(Owner(), fields));
     }))
      .def("__repr__", &Owner::repr)
      .def(py::self == py::self)
      .def("__setattr__", &assign<Owner>)
      .def("__copy__", [](const Owner& self) { return Owner(self); })
      .def("__deepcopy__",
           [](const Owner& self, const py::dict&) { return Owner(self); })
      .def(
          "replace",
          [](const Owner& self, const py::kwargs& fields) {
            return updated(self, fields);
          },
          "A copy with these fields changed.")
      .def("is_set", &Owner::is_set, py::arg("name"),
           "Whether the field was given a value, even its default.")
      .def(
          "to_dict",
          [](const Owner& self, bool include_defaults) {
            return to_python(self.to_map(include_defaults));
          },
          py::kw_only(), py::arg("include_defaults") = false,
          "The fields that are set, or all, as plain data.")
      .def_static(
          "from_dict",
          [](const py::dict& map) { return updated(Owner(), map); },
          py::arg("fields"), "The inverse of to_dict.")
      .def_static(
          "fields", [] { return listed(Owner::fields()); },
          "What fields there are, with type, default, rule and doc.")
      .def(py::pickle(
          [](const Owner& self) { return to_python(self.to_map()); },
          [](const py::dict& map) { return updated(Owner(), map); }));
  for (const FieldSpec& spec : Owner::fields()) {
    // The specs live for ever. Assignments go through __setattr__.
    const auto* const field = &spec;
    cls.def_property_readonly(
        std::string(spec.name).c_str(),
        [field](const Owner& self) { return attribute(self, *field); },
        std::string(spec.doc).c_str());
  }
  return cls;
}

void bind_configs(py::module_& m) {
  py::class_<FieldSpec>(m, "FieldSpec")
      .def_readonly("name", &FieldSpec::name)
      .def_property_readonly("type", &FieldSpec::type)
      .def_readonly("optional", &FieldSpec::optional)
      .def_readonly("by_mode", &FieldSpec::by_mode)
      .def_readonly("choices", &FieldSpec::choices)
      .def_property_readonly("rule", &FieldSpec::rule)
      .def_property_readonly(
          "default",
          [](const FieldSpec& s) { return to_python(s.default_value); })
      .def_property_readonly(
          "default_text",
          [](const FieldSpec& s) { return s.text(s.default_value); })
      .def_readonly("doc", &FieldSpec::doc);

  using E = EffectiveConfig;
  py::class_<E>(m, "EffectiveConfig")
      .def_property_readonly(
          "mode",
          [](const E& e) { return mode_type()(py::cast(to_string(e.mode))); })
      .def_readonly("enable_checkpointing", &E::enable_checkpointing)
      .def_readonly("enable_offloading", &E::enable_offloading)
      .def_readonly("enable_tiling", &E::enable_tiling)
      .def_readonly("use_mixed_precision", &E::use_mixed_precision)
      .def_readonly("use_8bit_optimizer", &E::use_8bit_optimizer)
      .def_readonly("slowdown_limit", &E::slowdown_limit)
      .def_readonly("stops_at_knee", &E::stops_at_knee)
      .def_readonly("budget", &E::budget)
      .def_readonly("host_limit", &E::host_limit);

  m.attr("OptimizationMode") = mode_type();
  bind_config<AsyncOffloadConfig>(m, "AsyncOffloadConfig");
  bind_config<Config>(m, "Config")
      .def("resolve", &Config::resolve,
           "What the mode comes to, once the fields that are set have had "
           "their say.");
}

// ---- hardware --------------------------------------------------------------

void bind_hardware(py::module_& m) {
  using D = DeviceSpec;
  py::class_<D> device(m, "DeviceSpec");
  device.attr("__module__") = kHardwareModule;
  device.def("__repr__", &D::text)
      .def_readonly("name", &D::name)
      .def_readonly("vendor", &D::vendor)
      .def_readonly("architecture", &D::architecture)
      .def_readonly("compute_capability", &D::compute_capability)
      .def_readonly("memory", &D::memory)
      .def_readonly("memory_bandwidth", &D::memory_bandwidth)
      .def_readonly("fp32_flops", &D::fp32_flops)
      .def_readonly("tf32_flops", &D::tf32_flops)
      .def_readonly("half_flops", &D::half_flops)
      .def_readonly("supports_bf16", &D::supports_bf16)
      .def_readonly("link_bandwidth", &D::link_bandwidth)
      .def("measured", &D::measured, py::kw_only(),
           py::arg("fp32_flops") = py::none(),
           py::arg("half_flops") = py::none(),
           py::arg("link_bandwidth") = py::none(),
           "A copy with these figures, as measured.")
      .def_property_readonly("sources", [](const D& d) {
        py::dict sources;
        d.each_figure([&](const char* name, const auto& f) {
          sources[name] = to_string(f.source);
        });
        return sources;
      });
  py::class_<HostSpec> host(m, "HostSpec");
  host.attr("__module__") = kHardwareModule;
  host.def_readonly("total_memory", &HostSpec::total_memory)
      .def_readonly("available_memory", &HostSpec::available_memory)
      .def_readonly("num_cores", &HostSpec::num_cores);

  py::class_<Hardware> hardware(m, "Hardware");
  hardware.attr("__module__") = kHardwareModule;
  hardware
      .def(py::init([](std::vector<D> devices, HostSpec h) {
             return Hardware{std::move(devices), h};
           }),
           py::arg("devices"), py::arg("host"))
      .def_readonly("devices", &Hardware::devices)
      .def_readonly("host", &Hardware::host);

  m.def("known_devices", [] { return listed(known_devices()); });
  m.def("find_device", &find_device, py::return_value_policy::copy,
        py::arg("name"), py::arg("memory") = py::none());
  m.def("detected_device", &detected_device, py::arg("name"), py::kw_only(),
        py::arg("vendor") = "", py::arg("memory") = py::none(),
        py::arg("compute_capability") = py::none(),
        py::arg("supports_bf16") = py::none());
  m.def("detect_host", [] { return detect_host(); });
}

// ---- log -------------------------------------------------------------------

// A Python callable as the log's sink. Any thread may call it or let it go,
// with or without the GIL; after the interpreter's end it is leaked.
class PythonSink final {
 public:
  explicit PythonSink(py::function function)
      : function_(new py::function(std::move(function)), &release) {}

  // Removes the sink and waits, for a second at most, until no thread is inside
  // one: a thread that asks for the GIL of an interpreter that is ending is
  // killed where it stands.
  static void retire() {
    const py::gil_scoped_release no_gil;
    log::set_sink({});
    for (int i = 0; i < 1000 && alive().use_count() > 1; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void operator()(const log::Record& record) const {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    const py::error_scope pending;  // an exception may be on its way up
    try {
      (*function_)(text(to_string(record.level)), text(record.component),
                   text(record.message));
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("memscale log sink");
    }
  }

 private:
  static py::str text(std::string_view bytes) {
    return py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
        bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
  }
  static void release(py::function* function) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    delete function;
  }
  // One share per sink that may still be called, and one of its own.
  static const std::shared_ptr<int>& alive() {
    static const auto token = std::make_shared<int>();
    return token;
  }
  std::shared_ptr<int> share_ = alive();
  std::shared_ptr<py::function> function_;
};

void set_log_sink(std::optional<py::function> function) {
  log::set_sink(function ? log::Sink(PythonSink(*function)) : log::Sink());
}

void bind_log(py::module_& m) {
  m.def("set_log_sink", &set_log_sink, py::arg("sink").none(true),
        "Send records to sink(level, component, message); None: to stderr.");
  m.def(
      "set_log_threshold",
      [](const std::string& level) {
        log::set_threshold(from_string<log::Level>(level));
      },
      py::arg("level"));
  m.def("log_threshold", [] { return to_string(log::threshold()); });
  m.def(
      "log",
      [](const std::string& level, const std::string& component,
         const std::string& message) {
        log::write(from_string<log::Level>(level), component, message);
      },
      py::arg("level"), py::arg("component"), py::arg("message"));
  py::module_::import("atexit").attr("register")(
      py::cpp_function(&PythonSink::retire));
}

}  // namespace

void bind_core(py::module_& m) {
  m.def("parse_bytes", &Bytes::parse, py::arg("text"),
        "'6GiB' as a number of bytes.");
  m.def(
      "parse_bytes",
      [](Bytes count) { return Bytes::parse(str(count.count())); },
      py::arg("count"), "A number of bytes as itself, unless negative.");
  m.def("format_bytes", &Bytes::human, py::arg("count"),
        "A number of bytes as '1.50 GiB'.");
  bind_configs(m);
  bind_hardware(m);
  bind_log(m);
}

}  // namespace memscale
