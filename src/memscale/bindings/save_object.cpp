#include "memscale/bindings/save_object.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <new>
#include <utility>

namespace py = pybind11;

namespace memscale {
namespace {

constexpr const char* kCapsule = "memscale.Replay";

struct SaveObject {
  PyObject_HEAD std::shared_ptr<SavedTensor> save;
};

void dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  std::destroy_at(&reinterpret_cast<SaveObject*>(self)->save);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyTypeObject* save_type() {
  static PyTypeObject* const type = [] {
    PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
        {Py_tp_doc, const_cast<char*>("A tensor that autograd saved.")},
        {0, nullptr}};
    PyType_Spec spec = {"memscale._C.SavedTensor", sizeof(SaveObject), 0,
                        Py_TPFLAGS_DEFAULT, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }();
  return type;
}

PyObject* pack(PyObject* capsule, PyObject* argument) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(THPVariable_Check(argument), "pack takes a tensor");
  auto* const replay = static_cast<std::shared_ptr<Replay>*>(
      PyCapsule_GetPointer(capsule, kCapsule));
  if (replay == nullptr) return nullptr;
  std::shared_ptr<SavedTensor> save =
      (*replay)->pack(THPVariable_Unpack(argument));
  auto* const object = PyObject_New(SaveObject, save_type());
  if (object == nullptr) return nullptr;
  new (&object->save) std::shared_ptr<SavedTensor>(std::move(save));
  return reinterpret_cast<PyObject*>(object);
  END_HANDLE_TH_ERRORS
}

PyObject* unpack(PyObject* /*self*/, PyObject* argument) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(Py_TYPE(argument) == save_type(),
                   "unpack takes a SavedTensor");
  const SavedTensor& save = *reinterpret_cast<SaveObject*>(argument)->save;
  if (save.kept().defined()) return THPVariable_Wrap(save.unpack());
  at::Tensor tensor;
  {
    // A replay may need the GIL: nobody may wait for a tape while holding it.
    const py::gil_scoped_release released;
    tensor = save.unpack();
  }
  return THPVariable_Wrap(std::move(tensor));
  END_HANDLE_TH_ERRORS
}

void delete_replay(PyObject* capsule) {
  delete static_cast<std::shared_ptr<Replay>*>(
      PyCapsule_GetPointer(capsule, kCapsule));
}

py::object checked(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

}  // namespace

py::object make_pack_hook(const std::shared_ptr<Replay>& replay) {
  static PyMethodDef method = {"pack", &pack, METH_O, nullptr};
  const py::object capsule = checked(PyCapsule_New(
      new std::shared_ptr<Replay>(replay), kCapsule, &delete_replay));
  py::object hook = checked(PyCFunction_New(&method, capsule.ptr()));
  replay->set_pack_hook(hook.ptr());
  return hook;
}

py::object make_unpack_hook() {
  static PyMethodDef method = {"unpack", &unpack, METH_O, nullptr};
  return checked(PyCFunction_New(&method, nullptr));
}

}  // namespace memscale
