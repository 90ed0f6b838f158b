#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <utility>

#include "memscale/base/bytes.h"
#include "memscale/core/hardware/hardware.h"

// One function per binding file; module.cpp calls them in this order. Every
// binding file includes this header, so that all of them see the same casters.

namespace memscale {

// The Error tree as Python exceptions, and the translation of ours into them.
void bind_errors(pybind11::module_& m);

// Sizes, configs, hardware, log sink.
void bind_core(pybind11::module_& m);

// Traces and timelines.
void bind_trace(pybind11::module_& m);

// What sees a step go by.
void bind_recorder(pybind11::module_& m);

// Recomputation, op by op.
void bind_replay(pybind11::module_& m);

// What a step will be under a plan.
void bind_plan(pybind11::module_& m);

// Plans and how they are made.
void bind_decision(pybind11::module_& m);

// A training's plans and first steps.
void bind_session(pybind11::module_& m);

// Cuts of layers, and the choice among them.
void bind_solver(pybind11::module_& m);

// What needs libtorch.
void bind_runtime(pybind11::module_& m);

// Deep copies of Python's own containers.
void bind_copies(pybind11::module_& m);

// What is asked of a whole model in every step.
void bind_modules(pybind11::module_& m);

}  // namespace memscale

namespace pybind11::detail {

// Bytes are an int in Python, both ways.
template <>
struct type_caster<memscale::Bytes> {
  PYBIND11_TYPE_CASTER(memscale::Bytes, const_name("int"));

  bool load(handle source, bool convert) {
    if (PyBool_Check(source.ptr())) return false;  // True is not a size
    make_caster<std::int64_t> count;
    if (!count.load(source, convert)) return false;
    value = memscale::Bytes(cast_op<std::int64_t>(count));
    return true;
  }
  static handle cast(memscale::Bytes bytes, return_value_policy, handle) {
    return PyLong_FromLongLong(bytes.count());
  }
};

// "8.6" is (8, 6) in Python, both ways.
template <>
struct type_caster<memscale::ComputeCapability> {
  PYBIND11_TYPE_CASTER(memscale::ComputeCapability,
                       const_name("tuple[int, int]"));

  bool load(handle source, bool convert) {
    make_caster<std::pair<int, int>> pair;
    if (!pair.load(source, convert)) return false;
    const auto [major, minor] = cast_op<std::pair<int, int>>(pair);
    value = {major, minor};
    return true;
  }
  static handle cast(memscale::ComputeCapability capability,
                     return_value_policy, handle) {
    return make_tuple(capability.major, capability.minor).release();
  }
};

// A Figure is its value in Python, or None if it is unknown; out only.
template <typename T>
struct type_caster<memscale::Figure<T>> {
  static constexpr auto name = make_caster<T>::name + const_name(" | None");

  static handle cast(const memscale::Figure<T>& figure,
                     return_value_policy policy, handle parent) {
    if (!figure.known()) return none().release();
    return make_caster<T>::cast(figure.value, policy, parent);
  }
};

}  // namespace pybind11::detail
