#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <utility>

#include "memscale/base/error.h"
#include "memscale/bindings/bindings.h"

namespace py = pybind11;

namespace memscale {
namespace {

// Owned by the module and never released: the translator may run as long as
// the interpreter does.
struct ErrorTypes {
  PyObject* error;
  PyObject* config;
  PyObject* parse;
  PyObject* hardware;
  PyObject* trace;
  PyObject* input;
  PyObject* plan;
  PyObject* internal;
} types;

PyObject* add_type(py::module_& m, const char* name, const char* doc,
                   const py::tuple& bases) {
  const auto full = str(m.attr("__name__").cast<std::string>(), ".", name);
  PyObject* type =
      PyErr_NewExceptionWithDoc(full.c_str(), doc, bases.ptr(), nullptr);
  if (type == nullptr) throw py::error_already_set();
  m.add_object(name, type);
  return type;
}

void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(std::move(pointer));
  } catch (const ConfigError& error) {
    py::set_error(types.config, error.what());
  } catch (const ParseError& error) {
    py::set_error(types.parse, error.what());
  } catch (const HardwareError& error) {
    py::set_error(types.hardware, error.what());
  } catch (const TraceError& error) {
    py::set_error(types.trace, error.what());
  } catch (const InputError& error) {
    py::set_error(types.input, error.what());
  } catch (const PlanError& error) {
    py::set_error(types.plan, error.what());
  } catch (const InternalError& error) {
    py::set_error(types.internal, error.what());
  } catch (const Error& error) {
    py::set_error(types.error, error.what());
  }
}

}  // namespace

void bind_errors(py::module_& m) {
  const py::handle value_error = PyExc_ValueError;
  types.error = add_type(m, "Error", "The root of MemScale's exceptions.",
                         py::make_tuple(py::handle(PyExc_RuntimeError)));
  const py::handle error = types.error;
  types.config = add_type(m, "ConfigError",
                          "A Config field is unknown or breaks its rule.",
                          py::make_tuple(error, value_error));
  types.parse = add_type(m, "ParseError", "A text cannot be read.",
                         py::make_tuple(error, value_error));
  types.hardware = add_type(m, "HardwareError",
                            "A device is unknown or cannot be described.",
                            py::make_tuple(error));
  types.trace = add_type(m, "TraceError",
                         "A trace is malformed, or a model cannot be traced.",
                         py::make_tuple(error));
  types.input =
      add_type(m, "InputError", "A sample input is missing or not usable.",
               py::make_tuple(error, value_error));
  types.plan = add_type(m, "PlanError",
                        "A plan is malformed or belongs to another model.",
                        py::make_tuple(error));
  types.internal =
      add_type(m, "InternalError", "A bug in MemScale.", py::make_tuple(error));
  py::register_local_exception_translator(&translate);
}

}  // namespace memscale
