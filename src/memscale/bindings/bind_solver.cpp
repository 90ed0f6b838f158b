#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "memscale/base/enum_names.h"
#include "memscale/bindings/bindings.h"
#include "memscale/core/cuts/cuts.h"
#include "memscale/core/cuts/layer_graph.h"
#include "memscale/core/solver/solver.h"
#include "memscale/core/trace/trace.h"

namespace py = pybind11;

namespace memscale {
namespace {

// List of options, base in forward, base in backward.
using LayerTuple = std::tuple<std::size_t, Bytes, Bytes>;

Problem make_problem(std::vector<std::vector<Option>> options,
                     const std::vector<LayerTuple>& layers, Bytes other_peak,
                     Bytes device_budget, Bytes host_budget) {
  Problem problem;
  problem.options = std::move(options);
  for (const auto& [list, forward_base, backward_base] : layers) {
    problem.layers.push_back({list, forward_base, backward_base});
  }
  problem.other_peak = other_peak;
  problem.device_budget = device_budget;
  problem.host_budget = host_budget;
  problem.check();
  return problem;
}

std::vector<Cut> cuts_of(const Trace& trace,
                         const std::vector<std::size_t>& ops,
                         const std::vector<std::int64_t>& nanoseconds,
                         Bytes min_bytes, bool on_cpu, bool on_cuda,
                         Bytes granularity,
                         const std::vector<std::size_t>& held_elsewhere) {
  const std::vector<OpId> run(ops.begin(), ops.end());
  const std::vector<StorageId> held(held_elsewhere.begin(),
                                    held_elsewhere.end());
  return pareto_cuts(layer_graph(trace, run, nanoseconds,
                                 {.min_bytes = min_bytes,
                                  .on_cpu = on_cpu,
                                  .on_cuda = on_cuda,
                                  .granularity = granularity,
                                  .held_elsewhere = held}));
}

}  // namespace

void bind_solver(py::module_& m) {
  py::class_<Option>(m, "Option")
      .def(py::init([](Bytes held, Bytes forward_peak, Bytes backward_peak,
                       Bytes host, std::int64_t nanoseconds) {
             return Option{held, forward_peak, backward_peak, host,
                           nanoseconds};
           }),
           py::arg("held"), py::arg("forward_peak"), py::arg("backward_peak"),
           py::arg("host"), py::arg("nanoseconds"))
      .def_readonly("held", &Option::held)
      .def_readonly("forward_peak", &Option::forward_peak)
      .def_readonly("backward_peak", &Option::backward_peak)
      .def_readonly("host", &Option::host)
      .def_readonly("nanoseconds", &Option::nanoseconds);

  py::class_<Problem>(m, "Problem")
      .def(py::init(&make_problem), py::arg("options"), py::arg("layers"),
           py::arg("other_peak"), py::arg("device_budget"),
           py::arg("host_budget"));

  py::class_<Selection>(m, "Selection")
      .def_readonly("choice", &Selection::choice)
      .def_readonly("nanoseconds", &Selection::nanoseconds)
      .def_readonly("peak", &Selection::peak)
      .def_readonly("host", &Selection::host);

  py::class_<SolveResult>(m, "SolveResult")
      .def_property_readonly("status",
                             [](const SolveResult& result) {
                               return std::string(to_string(result.status));
                             })
      .def_readonly("plan", &SolveResult::plan)
      .def_readonly("lower_bound", &SolveResult::lower_bound)
      .def_readonly("smallest_budget", &SolveResult::smallest_budget)
      .def_property_readonly("gap", &SolveResult::gap);

  const SolveLimits limits;
  m.def(
      "solve",
      [](const Problem& problem, std::size_t num_states, double gap) {
        return solve(problem, {.num_states = num_states, .gap = gap});
      },
      py::arg("problem"), py::arg("num_states") = limits.num_states,
      py::arg("gap") = limits.gap, py::call_guard<py::gil_scoped_release>());
  m.def(
      "pareto",
      [](const Problem& problem, std::size_t max_points, std::size_t num_states,
         double gap) {
        return pareto(problem, max_points,
                      {.num_states = num_states, .gap = gap});
      },
      py::arg("problem"), py::arg("max_points"),
      py::arg("num_states") = limits.num_states, py::arg("gap") = limits.gap,
      py::call_guard<py::gil_scoped_release>());

  py::class_<Cut>(m, "Cut")
      .def_readonly("held", &Cut::held)
      .def_readonly("nanoseconds", &Cut::nanoseconds)
      .def_readonly("replayed", &Cut::replayed)
      .def_property_readonly("keep_set", [](const Cut& cut) {
        return std::make_shared<KeepSet>(cut.keep_set);
      });
  m.def("layer_cuts", &cuts_of, py::arg("trace"), py::arg("ops"),
        py::arg("nanoseconds"), py::arg("min_bytes"), py::arg("on_cpu"),
        py::arg("on_cuda"), py::arg("granularity"), py::arg("held_elsewhere"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace memscale
