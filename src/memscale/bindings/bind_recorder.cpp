#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memscale/base/enum_names.h"
#include "memscale/bindings/bindings.h"
#include "memscale/core/trace/repeat.h"
#include "memscale/core/trace/trace.h"
#include "memscale/runtime/record/recorder.h"
#include "memscale/runtime/replay/saved_tensor.h"

namespace py = pybind11;

namespace memscale {
namespace {

// Set by the first Recorder; torch has one such type.
PyTypeObject* fake_tensor_type = nullptr;

bool is_fake(const c10::TensorImpl& impl) {
  const PyObject* object = impl.pyobj_slot()->load_pyobj();
  return object != nullptr && Py_TYPE(object) == fake_tensor_type;
}

LayerId layer_id(std::optional<std::size_t> index) {
  return index ? LayerId(*index) : LayerId();
}

using Tensors = std::vector<at::Tensor>;

// None is a tensor that there is not.
Tensors or_undefined(const std::vector<std::optional<at::Tensor>>& tensors) {
  Tensors defined;
  for (const auto& tensor : tensors) {
    defined.push_back(tensor.value_or(at::Tensor()));
  }
  return defined;
}

}  // namespace

void bind_recorder(py::module_& m) {
  py::class_<RecordedSave>(m, "SaveHandle")
      .def_static("unpack",
                  [](const RecordedSave& save) { return save.tensor(); })
      .def("bind", &RecordedSave::bind);
  py::class_<LayerCall>(m, "LayerCall");

  py::class_<Recorder, std::shared_ptr<Recorder>>(m, "Recorder")
      .def(py::init([](c10::Device device, const py::type& fake_tensor,
                       bool fake_run) {
             fake_tensor_type =
                 reinterpret_cast<PyTypeObject*>(fake_tensor.ptr());
             return Recorder::make(device, &is_fake, fake_run);
           }),
           py::arg("device"), py::arg("fake_tensor"), py::arg("fake_run"))
      .def("start", &Recorder::start)
      .def("stop", &Recorder::stop)
      .def("abandon", &Recorder::abandon)
      .def_property_readonly("has_saves", &Recorder::has_saves)
      .def("pause", &Recorder::pause)
      .def("resume", &Recorder::resume)
      .def("add_layer",
           [](Recorder& r, std::string name) {
             return r.add_layer(std::move(name)).index();
           })
      .def(
          "add_resident",
          [](Recorder& r, const at::Tensor& tensor, std::string_view category,
             std::optional<std::size_t> layer) {
            r.add_resident(tensor, from_string<Category>(category),
                           layer_id(layer));
          },
          py::arg("tensor"), py::arg("category"), py::arg("layer") = py::none())
      .def(
          "enter_layer",
          [](Recorder& r, std::size_t layer) { r.enter_layer(LayerId(layer)); })
      .def("leave_layer", &Recorder::leave_layer)
      .def("set_phase",
           [](Recorder& r, std::string_view phase) {
             r.set_phase(from_string<Phase>(phase));
           })
      .def_property_readonly("phase",
                             [](Recorder& r) { return to_string(r.phase()); })
      .def(
          "set_category",
          [](Recorder& r, const at::Tensor& tensor, std::string_view category) {
            r.set_category(tensor, from_string<Category>(category));
          })
      .def("set_returned", &Recorder::set_returned)
      .def("forget", &Recorder::forget)
      .def("end_forgotten", &Recorder::end_forgotten)
      .def("set_state", &Recorder::set_state)
      .def("set_stands_for", &Recorder::set_stands_for)
      .def("set_saves_unknown", &Recorder::set_saves_unknown)
      .def("add_note", &Recorder::add_note)
      .def(
          "save",
          [](std::shared_ptr<Recorder> r, const at::Tensor& tensor, bool hold) {
            return std::make_unique<RecordedSave>(std::move(r), tensor, hold);
          },
          py::arg("tensor"), py::arg("hold") = true)
      .def("set_replayed", &Recorder::set_replayed)
      .def("bind_same", &Recorder::bind_same)
      .def("begin_recompute", &Recorder::begin_recompute)
      .def("end_recompute", &Recorder::end_recompute)
      .def("begin_call",
           [](Recorder& r, std::size_t layer, const Tensors& parameters,
              const Tensors& inputs) {
             return r.begin_call(LayerId(layer), parameters, inputs);
           })
      .def("end_call", &Recorder::end_call)
      .def("find_backward",
           [](Recorder& r, LayerCall& call,
              const std::vector<std::optional<at::Tensor>>& gradients) {
             r.find_backward(call, or_undefined(gradients));
           })
      .def("repeat_forward",
           [](Recorder& r, const LayerCall& model, std::size_t layer,
              const Tensors& parameters, const Tensors& inputs) {
             return r.repeat_forward(model, LayerId(layer), parameters, inputs);
           })
      .def("place_of", &Recorder::place_of)
      .def("bind_result", &Recorder::bind_result)
      .def("repeat_backward", &Recorder::repeat_backward)
      .def("bind_gradient", &Recorder::bind_gradient)
      .def("close_repeat", &Recorder::close_repeat)
      .def("difference", &Recorder::difference)
      .def("finish", &Recorder::finish);
}

}  // namespace memscale
