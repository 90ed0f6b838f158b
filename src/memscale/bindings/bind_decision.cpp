#include <pybind11/operators.h>
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
#include "memscale/core/config/config.h"
#include "memscale/core/plan/decision.h"
#include "memscale/core/plan/plan.h"
#include "memscale/core/plan/question.h"
#include "memscale/core/plan/tape_choice.h"
#include "memscale/core/plan/technique.h"
#include "memscale/core/techniques/optimizer_state.h"
#include "memscale/core/time/op_times.h"

namespace py = pybind11;

namespace memscale {
namespace {

// A copy: keep sets are held by shared_ptr.
std::shared_ptr<KeepSet> shared(const std::optional<KeepSet>& set) {
  return set ? std::make_shared<KeepSet>(*set) : nullptr;
}

void bind_layer_plan(py::module_& m) {
  py::class_<Choice>(m, "Choice")
      .def_readonly("technique", &Choice::technique)
      .def_readonly("choice", &Choice::choice)
      .def_property_readonly(
          "keep_set",
          [](const Choice& choice) { return shared(choice.keep_set); })
      .def_readonly("bytes", &Choice::bytes)
      .def_readonly("nanoseconds", &Choice::nanoseconds)
      .def_readonly("reason", &Choice::reason)
      .def(py::self == py::self);

  py::class_<LayerPlan>(m, "LayerPlan")
      .def_readonly("layer", &LayerPlan::layer)
      .def_readonly("choices", &LayerPlan::choices)
      .def_property_readonly(
          "policy",
          [](const LayerPlan& plan) {
            return to_string(tape_rules(plan, Bytes()).policy);
          })
      .def_property_readonly(
          "keep_set",
          [](const LayerPlan& plan) {
            const Choice* choice = find_choice(plan.choices, kRecompute);
            return choice == nullptr ? nullptr : shared(choice->keep_set);
          })
      .def_readonly("parameter_bytes", &LayerPlan::parameter_bytes)
      .def_readonly("plain_bytes", &LayerPlan::plain_bytes)
      .def_readonly("held_bytes", &LayerPlan::held_bytes)
      .def_property_readonly("nanoseconds", &LayerPlan::nanoseconds)
      .def_property_readonly("reason", &LayerPlan::reason)
      .def_property_readonly("technique", &LayerPlan::technique)
      .def_property_readonly("recomputes", &LayerPlan::recomputes);
}

void bind_plans(py::module_& m) {
  bind_layer_plan(m);
  py::class_<Verdict>(m, "Verdict")
      .def_readonly("rule", &Verdict::rule)
      .def_readonly("text", &Verdict::text);

  py::class_<Plan>(m, "Plan")
      .def_readonly("model", &Plan::model)
      .def_property_readonly("policy_after_difference",
                             [](const Plan& plan) {
                               return to_string(policy_after_difference(plan));
                             })
      .def_readonly("fingerprint", &Plan::fingerprint)
      .def_readonly("call", &Plan::call)
      .def_readonly("device", &Plan::device)
      .def_readonly("optimizer", &Plan::optimizer)
      .def_property_readonly(
          "mode", [](const Plan& plan) { return to_string(plan.mode); })
      .def_readonly("budget", &Plan::budget)
      .def_readonly("verdicts", &Plan::verdicts)
      .def_readonly("choices", &Plan::choices)
      .def_readonly("layers", &Plan::layers)
      .def_property_readonly(
          "optimizer_bits",
          [](const Plan& plan) { return state_bits(plan.choices); })
      .def_readonly("plain_peak_bytes", &Plan::plain_peak)
      .def_readonly("peak_bytes", &Plan::peak)
      .def_readonly("host_peak_bytes", &Plan::host_peak)
      .def_readonly("plain_nanoseconds", &Plan::plain_nanoseconds)
      .def_readonly("nanoseconds", &Plan::nanoseconds)
      .def_property_readonly(
          "optimizer_nanoseconds",
          [](const Plan& plan) {
            const Choice* choice = find_choice(plan.choices, "optimizer_state");
            return choice == nullptr ? 0 : choice->nanoseconds;
          })
      .def_property_readonly("slowdown", &Plan::slowdown)
      .def(
          "find_choice",
          [](const Plan& plan, std::string_view technique) {
            const Choice* choice = find_choice(plan.choices, technique);
            return choice == nullptr ? std::nullopt : std::optional(*choice);
          },
          py::arg("technique"))
      .def("check_fits", &Plan::check_fits, py::arg("layer_names"),
           py::arg("parameter_bytes") = std::vector<Bytes>())
      .def("explain", &Plan::explain)
      .def("diff", &Plan::diff, py::arg("other"))
      .def("to_json", [](const Plan& plan) { return to_json(plan); })
      .def_static("from_json", &plan_from_json, py::arg("text"))
      .def(py::self == py::self);
}

void bind_costs(py::module_& m) {
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
}

void bind_questions(py::module_& m) {
  m.attr("DEFAULT_MIN_BYTES") = kDefaultMinBytes.count();
  m.def("granularity_of", &granularity_of, py::arg("device_type"));

  py::class_<Target>(m, "Target")
      .def(py::init([](std::string type, std::string name,
                       std::optional<DeviceSpec> card,
                       std::optional<Bytes> memory,
                       std::pair<bool, bool> allowed_tf32, bool benchmarks,
                       bool has_state_kernel) {
             return Target{.name = std::move(name),
                           .type = std::move(type),
                           .card = std::move(card),
                           .memory = memory,
                           .tf32 = {.matmuls = allowed_tf32.first,
                                    .convolutions = allowed_tf32.second},
                           .benchmarks = benchmarks,
                           .has_state_kernel = has_state_kernel};
           }),
           py::kw_only(), py::arg("type"), py::arg("name") = "",
           py::arg("card") = py::none(), py::arg("memory") = py::none(),
           py::arg("allowed_tf32") =
               std::pair(Tf32().matmuls, Tf32().convolutions),
           py::arg("benchmarks") = false, py::arg("has_state_kernel") = true);

  py::class_<StepFacts>(m, "StepFacts")
      .def(py::init([](std::string model, std::string call,
                       std::string optimizer, bool optimizer_is_adam,
                       bool has_gradients, bool is_compiled,
                       std::vector<Bytes> parameter_bytes) {
             return StepFacts{.model = std::move(model),
                              .call = std::move(call),
                              .optimizer = std::move(optimizer),
                              .optimizer_is_adam = optimizer_is_adam,
                              .has_gradients = has_gradients,
                              .is_compiled = is_compiled,
                              .parameter_bytes = std::move(parameter_bytes)};
           }),
           py::kw_only(), py::arg("model") = "", py::arg("call") = "",
           py::arg("optimizer") = "", py::arg("optimizer_is_adam") = false,
           py::arg("has_gradients") = false, py::arg("is_compiled") = false,
           py::arg("parameter_bytes") = std::vector<Bytes>());

  py::class_<Question>(m, "Question")
      .def(
          py::init([](const std::shared_ptr<Trace>& trace, const Config& config,
                      const Target& target, const StepFacts& facts) {
            return Question::of(trace, config, target, facts);
          }),
          py::arg("trace").none(true), py::arg("config"), py::arg("target"),
          py::arg("facts") = StepFacts())
      .def_readwrite("min_bytes", &Question::min_bytes)
      .def_readwrite("disabled_rules", &Question::disabled_rules);

  m.def("plan_for", &plan_for, py::arg("question"),
        py::call_guard<py::gil_scoped_release>());
  m.def("plan_frontier", &plan_frontier, py::arg("question"),
        py::arg("max_plans"), py::call_guard<py::gil_scoped_release>());
  m.def("fallback_choices", &fallback_choices, py::arg("question"),
        py::arg("only_asked"));
  m.def("check_allowed", &check_allowed, py::arg("plan"), py::arg("config"));
  m.def("step_under", &step_under, py::arg("question"), py::arg("plan"),
        py::call_guard<py::gil_scoped_release>());
  m.def("plain_step", &plain_step, py::arg("recorded"),
        py::call_guard<py::gil_scoped_release>());
  m.def("rule_names", &rule_names);
  m.def("technique_names", &technique_names);
}

}  // namespace

void bind_decision(py::module_& m) {
  bind_plans(m);
  bind_costs(m);
  bind_questions(m);
}

}  // namespace memscale
