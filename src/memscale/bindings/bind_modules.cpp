// What is asked of a whole model in every step, where walking its modules in
// Python would take as long as a small model's forward.

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <unordered_set>
#include <vector>

#include "memscale/bindings/bindings.h"

namespace py = pybind11;

namespace memscale {
namespace {

// The dict in which nn.Module keeps parameters or modules; null: it has none.
PyObject* dict_of(PyObject* module, const char* name) {
  PyObject** const attributes = _PyObject_GetDictPtr(module);
  if (attributes == nullptr || *attributes == nullptr) return nullptr;
  PyObject* const found = PyDict_GetItemString(*attributes, name);  // borrowed
  return found != nullptr && PyDict_Check(found) ? found : nullptr;
}

// Calls visit(value) for each entry that is not None. Nothing in it may run
// Python code.
template <typename F>
void for_each_entry(PyObject* dict, const F& visit) {
  if (dict == nullptr) return;
  Py_ssize_t place = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(dict, &place, &key, &value) != 0) {
    if (value != Py_None) visit(value);
  }
}

bool is_training(PyObject* module) {
  PyObject** const attributes = _PyObject_GetDictPtr(module);
  return attributes != nullptr && *attributes != nullptr &&
         PyDict_GetItemString(*attributes, "training") == Py_True;
}

// For each module, once, in the order of model.modules(): "t" if it is in
// training mode, else "e"; then "0" or "1" for each of its own parameters that
// no earlier module has: whether it requires a gradient.
std::string trained_parts(const py::object& model) {
  std::string flags;
  std::unordered_set<PyObject*> seen;
  std::vector<PyObject*> path = {model.ptr()};  // borrowed: the GIL is held
  while (!path.empty()) {
    PyObject* const module = path.back();
    path.pop_back();
    if (!seen.insert(module).second) continue;
    flags += is_training(module) ? 't' : 'e';
    for_each_entry(dict_of(module, "_parameters"), [&](PyObject* parameter) {
      if (!THPVariable_Check(parameter) || !seen.insert(parameter).second) {
        return;
      }
      flags += THPVariable_Unpack(parameter).requires_grad() ? '1' : '0';
    });
    const std::size_t first = path.size();
    for_each_entry(dict_of(module, "_modules"),
                   [&](PyObject* child) { path.push_back(child); });
    std::reverse(path.begin() + static_cast<std::ptrdiff_t>(first), path.end());
  }
  return flags;
}

}  // namespace

void bind_modules(py::module_& m) {
  m.def("trained_parts", &trained_parts, py::arg("model"));
}

}  // namespace memscale
