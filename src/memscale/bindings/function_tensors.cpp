#include "memscale/bindings/function_tensors.h"

#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <unordered_set>
#include <utility>
#include <vector>

#include "memscale/bindings/bindings.h"
#include "memscale/runtime/observe/unseen_writes.h"

namespace py = pybind11;

namespace memscale {
namespace {

// Deeper than this nobody nests.
constexpr int kMaxDepth = 100;

// Collected before they are visited: a visit may let go of the GIL, and then
// another thread may change the list.
using Tensors = std::vector<at::Tensor>;

class Collector final {
 public:
  void add(PyObject* object, int depth = 0) {
    if (object == nullptr || depth > kMaxDepth) return;
    if (THPVariable_Check(object)) {
      found_.push_back(THPVariable_Unpack(object));
    } else if (PyList_Check(object) || PyTuple_Check(object)) {
      if (!seen_.insert(object).second) return;
      const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
      PyObject** const items = PySequence_Fast_ITEMS(object);
      for (Py_ssize_t i = 0; i < size; ++i) add(items[i], depth + 1);
    } else if (PyDict_Check(object)) {
      if (!seen_.insert(object).second) return;
      Py_ssize_t place = 0;
      PyObject* value = nullptr;
      while (PyDict_Next(object, &place, nullptr, &value) != 0) {
        add(value, depth + 1);
      }
    }
  }

  void add(at::Tensor tensor) { found_.push_back(std::move(tensor)); }

  const Tensors& found() const { return found_; }

 private:
  Tensors found_;
  // A container may stand in many others, or contain itself.
  std::unordered_set<PyObject*> seen_;
};

PyObject* code_of_apply() {
  static PyObject* const code = [] {
    const py::object function =
        py::module_::import("torch").attr("autograd").attr("Function");
    py::object of_apply = function.attr("apply").attr("__func__");
    of_apply = of_apply.attr("__code__");
    return of_apply.release().ptr();
  }();
  return code;
}

// torch names a Function's range, and tells the tensors among its arguments,
// but nothing that is inside of them. The frame that called torch has them all.
void visit_hidden_arguments(VisitTensor visit) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return;
  Collector found;
  try {
    PyFrameObject* const frame = PyEval_GetFrame();
    if (frame == nullptr) return;
    const auto code = py::reinterpret_steal<py::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    if (code.ptr() != code_of_apply()) return;
    const auto locals =
        py::reinterpret_steal<py::object>(PyFrame_GetLocals(frame));
    const py::tuple arguments = locals["args"];
    for (const py::handle argument : arguments) {
      if (!THPVariable_Check(argument.ptr())) found.add(argument.ptr());
    }
    const py::object by_name = locals["kwargs"];
    found.add(by_name.ptr());
  } catch (const std::exception&) {
    // A torch whose apply has other names: then none are known, as before.
  }
  for (const at::Tensor& tensor : found.found()) visit(tensor);
}

void visit_saved(const torch::autograd::Node& node, VisitTensor visit) {
  // Nodes that torch brings have none, unless the user looked at them.
  if (node.pyobj_slot()->load_pyobj() == nullptr) return;
  Collector found;
  {
    const py::gil_scoped_acquire gil;
    PyObject* const object = node.pyobj_slot()->load_pyobj();
    if (object == nullptr || !THPFunction_Check(object)) return;
    const auto* const context = reinterpret_cast<THPFunction*>(object);
    for (const auto& saved : context->saved_variables) {
      // With hooks, it is theirs to say what backward is given.
      auto tensor = saved.get_raw_data();
      if (tensor) found.add(std::move(*tensor));
    }
    const auto attributes = py::reinterpret_steal<py::object>(
        PyObject_GenericGetDict(object, nullptr));
    if (!attributes) PyErr_Clear();
    found.add(attributes.ptr());
  }
  for (const at::Tensor& tensor : found.found()) visit(tensor);
}

}  // namespace

void look_into_functions() {
  set_function_tensors({&visit_hidden_arguments, &visit_saved});
}

}  // namespace memscale
