// What is asked of a whole model in every step, where walking its modules in
// Python would take as long as a small model's forward.

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_set>
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

// Calls visit(parameter) for each of the module's own parameters that was not
// met before. Nothing in it may run Python code.
template <typename F>
void for_each_parameter(PyObject* module, Met& met, const F& visit) {
  static PyObject* const parameters = PyUnicode_InternFromString("_parameters");
  for_each_entry(dict_of(module, parameters), [&](PyObject* parameter) {
    if (!THPVariable_Check(parameter) || !met.insert(parameter)) return;
    visit(THPVariable_Unpack(parameter));
  });
}

// For each module, once, in the order of model.modules(): "t" if it is in
// training mode, else "e"; then "0" or "1" for each of its own parameters that
// no earlier module has: whether it requires a gradient.
std::string trained_parameters(const py::object& model) {
  std::string flags;
  Met met;
  for_each_module(model, met, [&](PyObject* module) {
    flags += is_training(module) ? 't' : 'e';
    for_each_parameter(module, met, [&](const at::Tensor& parameter) {
      flags += parameter.requires_grad() ? '1' : '0';
    });
  });
  return flags;
}

// Whether a parameter that is trained has a gradient.
bool has_gradients(const py::object& model) {
  bool found = false;
  Met met;
  for_each_module(model, met, [&](PyObject* module) {
    for_each_parameter(module, met, [&](const at::Tensor& parameter) {
      found |= parameter.requires_grad() && parameter.grad().defined();
    });
  });
  return found;
}

// The bytes behind a model's parameters, their gradients, its buffers, and
// other tensors, on a device of this type; each storage once.
std::int64_t held_bytes(const py::object& model,
                        const std::vector<at::Tensor>& others,
                        const c10::Device& device) {
  static PyObject* const buffers = PyUnicode_InternFromString("_buffers");
  std::unordered_set<const c10::StorageImpl*> storages;
  std::int64_t bytes = 0;
  const auto add = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage() ||
        tensor.device().type() != device.type()) {
      return;
    }
    const c10::Storage& storage = tensor.storage();
    if (!storages.insert(storage.unsafeGetStorageImpl()).second) return;
    bytes += static_cast<std::int64_t>(storage.nbytes());
  };
  Met met;
  for_each_module(model, met, [&](PyObject* module) {
    for_each_parameter(module, met, [&](const at::Tensor& parameter) {
      add(parameter);
      add(parameter.grad());
    });
    for_each_entry(dict_of(module, buffers), [&](PyObject* buffer) {
      if (THPVariable_Check(buffer)) add(THPVariable_Unpack(buffer));
    });
  });
  for (const at::Tensor& tensor : others) add(tensor);
  return bytes;
}

}  // namespace

void bind_modules(py::module_& m) {
  m.def("trained_parameters", &trained_parameters, py::arg("model"));
  m.def("has_gradients", &has_gradients, py::arg("model"));
  m.def("held_bytes", &held_bytes, py::arg("model"), py::arg("others"),
        py::arg("device"));
}

}  // namespace memscale
