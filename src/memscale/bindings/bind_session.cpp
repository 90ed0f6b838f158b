#include <pybind11/operators.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memscale/bindings/bindings.h"
#include "memscale/core/session/session.h"

namespace py = pybind11;

namespace memscale {

void bind_session(py::module_& m) {
  py::class_<CallKind>(m, "CallKind")
      .def(py::init([](std::vector<std::string> facts,
                       std::vector<std::int64_t> sizes) {
             return CallKind{std::move(facts), std::move(sizes)};
           }),
           py::arg("facts"), py::arg("sizes"))
      .def("covers", &CallKind::covers, py::arg("call"))
      .def(py::self == py::self);

  py::class_<LedgerEntry>(m, "LedgerEntry")
      .def_readonly("predicted_peak", &LedgerEntry::predicted_peak)
      .def_readonly("measured_peak", &LedgerEntry::measured_peak)
      .def_readonly("predicted_slowdown", &LedgerEntry::predicted_slowdown)
      .def_readonly("measured_slowdown", &LedgerEntry::measured_slowdown)
      .def("__str__", &LedgerEntry::text)
      .def(py::self == py::self);

  py::class_<Tolerance>(m, "Tolerance")
      .def(py::init([](double peak, double time) {
             return Tolerance{.peak = peak, .time = time};
           }),
           py::arg("peak") = Tolerance().peak,
           py::arg("time") = Tolerance().time)
      .def_readonly("peak", &Tolerance::peak)
      .def_readonly("time", &Tolerance::time);

  py::class_<Review>(m, "Review")
      .def_readonly("last", &Review::last)
      .def_readonly("has_new_plan", &Review::has_new_plan)
      .def_readonly("reason", &Review::reason)
      .def_readonly("problem", &Review::problem);

  py::class_<Session>(m, "Session")
      .def(
          py::init<const Config&, std::vector<std::string>, const Tolerance&>(),
          py::arg("config"), py::arg("layers"),
          py::arg("tolerance") = Tolerance())
      .def_property_readonly_static(
          "MAX_KINDS", [](const py::object&) { return Session::kMaxKinds; })
      .def("find", &Session::find, py::arg("call"))
      .def_property_readonly("is_full", &Session::is_full)
      .def("add", &Session::add, py::arg("call"))
      .def("plan", &Session::plan, py::arg("kind"), py::arg("question"),
           py::return_value_policy::copy,
           py::call_guard<py::gil_scoped_release>())
      .def("plan_of", &Session::plan_of, py::arg("kind"),
           py::return_value_policy::copy)
      .def("plans", &Session::plans)
      .def(
          "measure_of",
          [](const Session& session, std::size_t kind) {
            return std::string(to_string(session.measure_of(kind)));
          },
          py::arg("kind"))
      .def("times_to_measure", &Session::times_to_measure, py::arg("kind"))
      .def(
          "add_step",
          [](Session& session, std::size_t kind, Bytes before, Bytes peak,
             std::optional<std::int64_t> nanoseconds,
             std::int64_t nanoseconds_replayed, std::optional<Bytes> held) {
            return session.add_step(
                kind, {before, peak, nanoseconds, nanoseconds_replayed, held});
          },
          py::arg("kind"), py::kw_only(), py::arg("before"), py::arg("peak"),
          py::arg("nanoseconds"), py::arg("nanoseconds_replayed"),
          py::arg("held"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("ledger", &Session::ledger);
}

}  // namespace memscale
