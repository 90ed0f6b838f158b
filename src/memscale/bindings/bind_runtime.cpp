#include <torch/csrc/utils/pybind.h>

#include "memscale/bindings/bindings.h"
#include "memscale/core/ops/workspace/adam.h"
#include "memscale/core/techniques/optimizer_state.h"
#include "memscale/hostmem/host_allocator.h"
#include "memscale/runtime/observe/memory_tracker.h"
#include "memscale/runtime/optimizer/optimizer.h"

namespace memscale {

void bind_runtime(pybind11::module_& m) {
  // From here on every CPU tensor is counted: see MemoryTracker.
  hostmem::install();
  // torch.ops.memscale.*
  register_optimizer_ops();
  m.attr("MIN_8BIT_ELEMENTS") = kMin8BitElements;
  m.attr("STATE_BLOCK") = kStateBlock;
  m.attr("STATE_PIECE") = kStatePiece;
  m.def("has_cuda_step", &has_cuda_step);

  pybind11::class_<MemoryTracker>(m, "MemoryTracker")
      .def(pybind11::init<c10::Device, bool>(), pybind11::arg("device"),
           pybind11::arg("resets") = true)
      .def("start", &MemoryTracker::start)
      .def("stop", &MemoryTracker::stop)
      .def_property_readonly("device", &MemoryTracker::device)
      .def_property_readonly("current", &MemoryTracker::current)
      .def_property_readonly("peak", &MemoryTracker::peak)
      .def_property_readonly("before", &MemoryTracker::before);
}

}  // namespace memscale
