// Deep copies of Python's own containers, as fast as their elements can be
// visited: a vocabulary of 300,000 entries takes hundredths of a second, where
// copy.deepcopy takes seconds. See memscale/trace/copies.py.
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "memscale/bindings/bindings.h"

namespace py = pybind11;

namespace memscale {
namespace {

bool is_atom(PyObject* object) {
  return object == Py_None || PyBool_Check(object) ||
         PyLong_CheckExact(object) || PyUnicode_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyBytes_CheckExact(object) ||
         PyComplex_CheckExact(object);
}

// Throws Python's RecursionError before the stack is at its end.
struct Recursion {
  Recursion() {
    if (Py_EnterRecursiveCall(" in a deep copy") != 0)
      throw py::error_already_set();
  }
  Recursion(const Recursion&) = delete;
  Recursion& operator=(const Recursion&) = delete;
  ~Recursion() { Py_LeaveRecursiveCall(); }
};

// `memo` is copy.deepcopy's: copies by the ids of their originals. `other`
// copies what is no container, and uses the same memo.
class Copier final {
 public:
  Copier(py::dict memo, py::function other)
      : memo_(std::move(memo)), other_(std::move(other)) {}

  // `held`: how many references come from where the object was found. One
  // that has no others cannot be met again, and need not be remembered.
  py::object copy(const py::object& object, Py_ssize_t held) {
    PyObject* const p = object.ptr();
    if (is_atom(p)) return object;
    const bool is_list = PyList_CheckExact(p);
    const bool is_dict = PyDict_CheckExact(p);
    const bool is_tuple = PyTuple_CheckExact(p);
    const bool is_set = PySet_CheckExact(p);
    const bool is_frozen_set = PyFrozenSet_CheckExact(p);
    if (!is_list && !is_dict && !is_tuple && !is_set && !is_frozen_set)
      return other_(object);
    const bool remember = Py_REFCNT(p) > held;
    if (remember) {
      if (PyObject* known = PyDict_GetItemWithError(memo_.ptr(), id(p).ptr()))
        return py::reinterpret_borrow<py::object>(known);
      if (PyErr_Occurred()) throw py::error_already_set();
    }
    const Recursion recursion;
    if (is_list) return copy_list(object, remember);
    if (is_dict) return copy_dict(object, remember);
    if (is_set) return copy_set(object, remember);
    py::object made = is_tuple ? copy_tuple(object) : copy_frozen_set(object);
    // It may contain itself, by way of a list: then the first copy counts.
    if (remember) {
      const py::int_ key = id(p);
      if (memo_.contains(key)) return memo_[key];
      memo_[key] = made;
    }
    return made;
  }

 private:
  // The reference of the container, and ours.
  static constexpr Py_ssize_t kInContainer = 2;

  static py::int_ id(PyObject* p) {
    return py::reinterpret_steal<py::int_>(PyLong_FromVoidPtr(p));
  }

  void note(const py::object& original, const py::object& made, bool remember) {
    if (remember) memo_[id(original.ptr())] = made;
  }

  py::object element(PyObject* p) {
    return copy(py::reinterpret_borrow<py::object>(p), kInContainer);
  }

  py::object copy_list(const py::object& original, bool remember) {
    py::list made;
    note(original, made, remember);
    // Its length may change: copies of others may run any code.
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(original.ptr()); ++i)
      made.append(element(PyList_GET_ITEM(original.ptr(), i)));
    return made;
  }

  py::object copy_dict(const py::object& original, bool remember) {
    py::dict made;
    note(original, made, remember);
    const Py_ssize_t num_entries = PyDict_GET_SIZE(original.ptr());
    Py_ssize_t place = 0;
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(original.ptr(), &place, &key, &value) != 0) {
      const py::object kept = py::reinterpret_borrow<py::object>(value);
      const py::object new_key = element(key);
      const py::object new_value = copy(kept, kInContainer);
      if (PyDict_SetItem(made.ptr(), new_key.ptr(), new_value.ptr()) != 0)
        throw py::error_already_set();
      if (PyDict_GET_SIZE(original.ptr()) != num_entries)
        throw std::runtime_error("a dictionary changed while it was copied");
    }
    return made;
  }

  py::object copy_set(const py::object& original, bool remember) {
    py::set made;
    note(original, made, remember);
    for (const py::handle each : py::tuple(original))
      made.add(
          copy(py::reinterpret_borrow<py::object>(each), kInContainer + 1));
    return made;
  }

  // The same if nothing in it had to be copied, as of copy.deepcopy.
  py::object copy_tuple(const py::object& original) {
    const Py_ssize_t size = PyTuple_GET_SIZE(original.ptr());
    py::object made;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* const each = PyTuple_GET_ITEM(original.ptr(), i);
      py::object copied = element(each);
      if (!made && copied.ptr() == each) continue;
      if (!made) {
        made = py::reinterpret_steal<py::object>(PyTuple_New(size));
        if (!made) throw py::error_already_set();
        for (Py_ssize_t j = 0; j < i; ++j) {
          PyObject* const same = PyTuple_GET_ITEM(original.ptr(), j);
          Py_INCREF(same);
          PyTuple_SET_ITEM(made.ptr(), j, same);
        }
      }
      PyTuple_SET_ITEM(made.ptr(), i, copied.release().ptr());
    }
    return made ? made : original;
  }

  py::object copy_frozen_set(const py::object& original) {
    const py::object made = copy_tuple(py::tuple(original));
    return py::reinterpret_steal<py::object>(PyFrozenSet_New(made.ptr()));
  }

  py::dict memo_;
  py::function other_;
};

}  // namespace

void bind_copies(py::module_& m) {
  m.def(
      "copy_containers",
      [](const py::object& object, py::dict memo, py::function other) {
        constexpr Py_ssize_t kHeldByNobodyElse = 0;
        return Copier(std::move(memo), std::move(other))
            .copy(object, kHeldByNobodyElse);
      },
      py::arg("object"), py::arg("memo"), py::arg("other"));
}

}  // namespace memscale
