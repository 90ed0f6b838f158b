// memscale._simdev: the simulated accelerator, loaded only on request.
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "memscale/simdev/device.h"
#include "memscale/simdev/engine.h"
#include "memscale/simdev/generator.h"
#include "memscale/simdev/registration.h"

PYBIND11_MODULE(_simdev, m) {
  m.def("register_device", &memscale::sim::register_device);
  m.def("set_capacity", &memscale::sim::set_capacity);
  m.def("default_generator", &memscale::sim::default_generator);
  m.def("wait_for_backward", &memscale::sim::wait_for_backward,
        pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("num_set_states", &memscale::sim::num_set_states);
  m.def("stream_counts", &memscale::sim::stream_counts);
  m.def("capacity", [] { return memscale::sim::heap().capacity(); });
}
