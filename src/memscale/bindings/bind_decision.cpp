#include <pybind11/operators.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memscale/base/enum_names.h"
#include "memscale/bindings/bindings.h"
#include "memscale/core/config.h"
#include "memscale/core/decision.h"
#include "memscale/core/op_times.h"
#include "memscale/core/plan.h"

namespace py = pybind11;

namespace memscale {
namespace {

void bind_plans(py::module_& m) {
  py::class_<LayerPlan>(m, "LayerPlan")
      .def_readonly("layer", &LayerPlan::layer)
      .def_property_readonly(
          "policy",
          [](const LayerPlan& plan) { return to_string(plan.policy); })
      .def_property_readonly(
          "keep_set",
          [](const LayerPlan& plan) {
            // A copy: keep sets are held by shared_ptr.
            return plan.keep_set ? std::make_shared<KeepSet>(*plan.keep_set)
                                 : nullptr;
          })
      .def_readonly("parameter_bytes", &LayerPlan::parameter_bytes)
      .def_readonly("plain_bytes", &LayerPlan::plain_bytes)
      .def_readonly("held_bytes", &LayerPlan::held_bytes)
      .def_readonly("nanoseconds", &LayerPlan::nanoseconds)
      .def_readonly("reason", &LayerPlan::reason)
      .def_property_readonly("technique", &LayerPlan::technique)
      .def_property_readonly("recomputes", &LayerPlan::recomputes);

  py::class_<Verdict>(m, "Verdict")
      .def_readonly("rule", &Verdict::rule)
      .def_readonly("text", &Verdict::text);

  py::class_<Plan>(m, "Plan")
      .def_readonly("model", &Plan::model)
      .def_readonly("fingerprint", &Plan::fingerprint)
      .def_readonly("call", &Plan::call)
      .def_readonly("device", &Plan::device)
      .def_readonly("optimizer", &Plan::optimizer)
      .def_property_readonly(
          "mode", [](const Plan& plan) { return to_string(plan.mode); })
      .def_readonly("budget", &Plan::budget)
      .def_readonly("verdicts", &Plan::verdicts)
      .def_readonly("layers", &Plan::layers)
      .def_readonly("optimizer_bits", &Plan::optimizer_bits)
      .def_readonly("plain_peak_bytes", &Plan::plain_peak)
      .def_readonly("peak_bytes", &Plan::peak)
      .def_readonly("host_peak_bytes", &Plan::host_peak)
      .def_readonly("plain_nanoseconds", &Plan::plain_nanoseconds)
      .def_readonly("nanoseconds", &Plan::nanoseconds)
      .def_readonly("optimizer_nanoseconds", &Plan::optimizer_nanoseconds)
      .def_property_readonly("slowdown", &Plan::slowdown)
      .def("check_fits", &Plan::check_fits, py::arg("layer_names"),
           py::arg("parameter_bytes") = std::vector<Bytes>())
      .def("explain", &Plan::explain)
      .def("diff", &Plan::diff, py::arg("other"))
      .def("to_json", [](const Plan& plan) { return to_json(plan); })
      .def_static("from_json", &plan_from_json, py::arg("text"))
      .def(py::self == py::self);
}

void bind_questions(py::module_& m) {
  py::class_<CostModel>(m, "CostModel")
      .def_static("of_cpu", &CostModel::of_cpu)
      .def_static(
          "of",
          [](const DeviceSpec& device, bool tf32_matmuls,
             bool tf32_convolutions) {
            return CostModel::of(device, {.matmuls = tf32_matmuls,
                                          .convolutions = tf32_convolutions});
          },
          py::arg("device"), py::arg("tf32_matmuls") = Tf32().matmuls,
          py::arg("tf32_convolutions") = Tf32().convolutions)
      .def(
          "nanoseconds",
          [](const CostModel& cost, const Trace& trace) {
            return cost.nanoseconds(trace);
          },
          py::arg("trace"));

  py::class_<OpTimes, std::shared_ptr<OpTimes>>(m, "OpTimes")
      .def(py::init<>())
      .def(
          "applied_to",
          [](const OpTimes& times, const Trace& trace, const CostModel& cost,
             const std::vector<std::string>& layers) {
            return times.applied_to(trace, cost, layers);
          },
          py::arg("trace"), py::arg("cost"), py::arg("layers"));

  py::class_<Question>(m, "Question")
      .def(py::init(
               [](const Trace& trace, const Config& config, CostModel cost) {
                 Question question;
                 question.trace = &trace;
                 question.config = config.resolve();
                 question.force = *config.force_optimize;
                 question.utilization = *config.target_gpu_utilization;
                 question.cost = std::move(cost);
                 if (question.config.use_8bit_optimizer) {
                   question.state_bits = config.use_8bit_optimizer.is_set()
                                             ? StateBits::Eight
                                             : StateBits::EightIfAllowed;
                 }
                 return question;
               }),
           py::arg("trace"), py::arg("config"), py::arg("cost"),
           py::keep_alive<1, 2>())
      .def_readwrite("on_cpu", &Question::on_cpu)
      .def_property(
          "on_cuda", [](const Question& q) { return q.target.on_cuda; },
          [](Question& q, bool on) { q.target.on_cuda = on; })
      .def_property(
          "benchmarks", [](const Question& q) { return q.target.benchmarks; },
          [](Question& q, bool on) { q.target.benchmarks = on; })
      .def_readwrite("granularity", &Question::granularity)
      .def_readwrite("device_memory", &Question::device_memory)
      .def_readwrite("min_bytes", &Question::min_bytes)
      .def_readwrite("margin", &Question::margin)
      .def_readwrite("optimizer_can_be_8bit", &Question::optimizer_can_be_8bit)
      .def_readwrite("steps_8bit_in_pieces", &Question::steps_8bit_in_pieces)
      .def_readwrite("parameter_bytes", &Question::parameter_bytes)
      .def_readwrite("disabled_rules", &Question::disabled_rules)
      .def_readwrite("model", &Question::model)
      .def_readwrite("call", &Question::call)
      .def_readwrite("device", &Question::device)
      .def_readwrite("optimizer", &Question::optimizer);

  py::class_<Decision>(m, "Decision")
      .def_readonly("plan", &Decision::plan)
      .def_readonly("smallest_budget", &Decision::smallest_budget);

  m.def("decide", &decide, py::arg("question"),
        py::call_guard<py::gil_scoped_release>());
  m.def("plan_frontier", &plan_frontier, py::arg("question"),
        py::arg("max_plans"), py::call_guard<py::gil_scoped_release>());
  m.def("rule_names", &rule_names);
}

}  // namespace

void bind_decision(py::module_& m) {
  bind_plans(m);
  bind_questions(m);
}

}  // namespace memscale
