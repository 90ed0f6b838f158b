// What is asked of a whole model in every step, where walking its modules in
// Python would take as long as a small model's forward.

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "memscale/bindings/bindings.h"

namespace py = pybind11;

namespace memscale {
namespace {

// The objects that a walk has met. std::unordered_set allocates for each, which
// took longer than the rest of the walk.
class Met final {
 public:
  // False: it was met before.
  bool insert(const PyObject* object) {
    if (2 * (count_ + 1) > slots_.size()) grow();
    if (!insert_into(slots_, object)) return false;
    ++count_;
    return true;
  }

 private:
  using Slots = std::vector<const PyObject*>;

  static bool insert_into(Slots& slots, const PyObject* object) {
    const std::size_t mask = slots.size() - 1;
    // Objects are aligned to 16 bytes: the lowest bits tell nothing.
    std::size_t slot = (reinterpret_cast<std::uintptr_t>(object) >> 4) & mask;
    for (; slots[slot] != nullptr; slot = (slot + 1) & mask) {
      if (slots[slot] == object) return false;
    }
    slots[slot] = object;
    return true;
  }
  void grow() {
    Slots larger(2 * slots_.size());
    for (const PyObject* const object : slots_) {
      if (object != nullptr) insert_into(larger, object);
    }
    slots_.swap(larger);
  }

  Slots slots_ = Slots(1024);  // a power of two
  std::size_t count_ = 0;
};

// The dict in which nn.Module keeps parameters or modules; null: it has none.
PyObject* dict_of(PyObject* module, PyObject* name) {
  PyObject** const attributes = _PyObject_GetDictPtr(module);
  if (attributes == nullptr || *attributes == nullptr) return nullptr;
  PyObject* const found = PyDict_GetItem(*attributes, name);  // borrowed
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

// Calls visit(module) for each module, once, in the order of model.modules().
// Nothing in it may run Python code, either.
template <typename F>
void for_each_module(const py::object& model, Met& met, const F& visit) {
  static PyObject* const modules = PyUnicode_InternFromString("_modules");
  std::vector<PyObject*> path = {model.ptr()};  // borrowed: the GIL is held
  while (!path.empty()) {
    PyObject* const module = path.back();
    path.pop_back();
    if (!met.insert(module)) continue;
    visit(module);
    const std::size_t first = path.size();
    for_each_entry(dict_of(module, modules),
                   [&](PyObject* child) { path.push_back(child); });
    std::reverse(path.begin() + static_cast<std::ptrdiff_t>(first), path.end());
  }
}

bool is_training(PyObject* module) {
  static PyObject* const training = PyUnicode_InternFromString("training");
  PyObject** const attributes = _PyObject_GetDictPtr(module);
  return attributes != nullptr && *attributes != nullptr &&
         PyDict_GetItem(*attributes, training) == Py_True;
}

// For each module, once, in the order of model.modules(): "t" if it is in
// training mode, else "e"; then, for each of its own parameters that no earlier
// module has, "0" if it is not trained, "1" if it is, and "g" if it is and has
// a gradient already.
std::string trained_parameters(const py::object& model) {
  static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
  std::string flags;
  Met met;
  for_each_module(model, met, [&](PyObject* module) {
    flags += is_training(module) ? 't' : 'e';
    for_each_entry(dict_of(module, parameters), [&](PyObject* parameter) {
      if (!THPVariable_Check(parameter) || !met.insert(parameter)) return;
      const at::Tensor& tensor = THPVariable_Unpack(parameter);
      flags += !tensor.requires_grad()   ? '0'
               : tensor.grad().defined() ? 'g'
                                         : '1';
    });
  });
  return flags;
}

// Whether a module of the model is of a class that is not among `known`.
bool has_other_classes(const py::object& model, const py::set& known) {
  bool others = false;
  Met met;
  const PyTypeObject* last = nullptr;  // neighbours are often of one class
  for_each_module(model, met, [&](PyObject* module) {
    PyTypeObject* const type = Py_TYPE(module);
    if (type == last) return;
    last = type;
    // Classes hash by identity, unless a metaclass says otherwise.
    const int found =
        PySet_Contains(known.ptr(), reinterpret_cast<PyObject*>(type));
    if (found < 0) PyErr_Clear();
    others |= found != 1;
  });
  return others;
}

// The parts that are compiled: torch.compile() made them, or their compile()
// was called and no way in of ours, of class `ours`, stands before it.
std::vector<py::object> find_compiled(const py::object& model,
                                      const py::type& ours) {
  static PyObject* const modules = PyUnicode_InternFromString("_modules");
  static PyObject* const place =
      PyUnicode_InternFromString("_compiled_call_impl");
  static PyObject* const original = PyUnicode_InternFromString("_orig_mod");
  std::vector<PyObject*> found;
  Met met;
  for_each_module(model, met, [&](PyObject* module) {
    PyObject** const attributes = _PyObject_GetDictPtr(module);
    if (attributes == nullptr || *attributes == nullptr) return;
    PyObject* const call = PyDict_GetItem(*attributes, place);
    PyObject* const parts = dict_of(module, modules);
    const bool in_place =
        call != nullptr && call != Py_None &&
        PyType_IsSubtype(Py_TYPE(call),
                         reinterpret_cast<PyTypeObject*>(ours.ptr())) == 0;
    const bool made = parts != nullptr && PyDict_GET_SIZE(parts) == 1 &&
                      PyDict_GetItem(parts, original) != nullptr;
    if (in_place || made) found.push_back(module);
  });
  std::vector<py::object> owned;
  for (PyObject* const module : found) {
    owned.push_back(py::reinterpret_borrow<py::object>(module));
  }
  return owned;
}

}  // namespace

void bind_modules(py::module_& m) {
  m.def("trained_parameters", &trained_parameters, py::arg("model"));
  m.def("has_other_classes", &has_other_classes, py::arg("model"),
        py::arg("known"));
  m.def("find_compiled", &find_compiled, py::arg("model"), py::arg("ours"));
}

}  // namespace memscale
