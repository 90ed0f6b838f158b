#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <vector>

#include "memscale/bindings/bindings.h"
#include "memscale/core/predict/replayed_step.h"

namespace py = pybind11;

namespace memscale {

void bind_plan(py::module_& m) {
  py::class_<LayerReplay>(m, "LayerReplay")
      .def_readonly("ops", &LayerReplay::ops)
      .def_readonly("flops", &LayerReplay::flops)
      .def_readonly("moved", &LayerReplay::moved)
      .def_readonly("held_plain", &LayerReplay::held_plain)
      .def_readonly("held", &LayerReplay::held);

  py::class_<ReplayedStep>(m, "ReplayedStep")
      .def_property_readonly(
          "trace", [](const ReplayedStep& step) { return &step.trace; },
          py::return_value_policy::reference_internal)
      .def_readonly("layers", &ReplayedStep::layers)
      .def_readonly("num_replayed", &ReplayedStep::num_replayed);

  m.def(
      "replayed_step",
      [](const Trace& plain, const std::vector<TapeRules>& layers, bool on_cpu,
         bool on_cuda, bool benchmarks) {
        return replayed_step(plain, layers, on_cpu,
                             {.on_cuda = on_cuda, .benchmarks = benchmarks});
      },
      py::arg("plain"), py::arg("layers"), py::arg("on_cpu"),
      py::arg("on_cuda") = false, py::arg("benchmarks") = false);
}

}  // namespace memscale
