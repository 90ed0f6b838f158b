#include <pybind11/stl.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memscale/base/enum_names.h"
#include "memscale/bindings/bindings.h"
#include "memscale/bindings/function_tensors.h"
#include "memscale/bindings/save_object.h"
#include "memscale/core/tape/locked_tape.h"
#include "memscale/core/tape/tape_rules.h"
#include "memscale/core/time/op_times.h"
#include "memscale/runtime/observe/kernel_flags.h"
#include "memscale/runtime/replay/op_timer.h"
#include "memscale/runtime/replay/replay.h"

namespace py = pybind11;

namespace memscale {
namespace {

std::shared_ptr<KeepSet> make_keep_set(
    std::vector<std::string> ops,
    std::vector<std::pair<std::size_t, std::size_t>> kept) {
  auto keep_set =
      std::make_shared<KeepSet>(KeepSet{std::move(ops), std::move(kept)});
  keep_set->check();
  return keep_set;
}

std::map<std::string, std::size_t> counts(ReplayStats& stats) {
  {
    const py::gil_scoped_release without_gil;  // a device may be waited for
    stats.settle();
  }
  return {{"saves_kept", stats.saves_kept},
          {"saves_dropped", stats.saves_dropped},
          {"bytes_kept", stats.bytes_kept},
          {"bytes_dropped", stats.bytes_dropped},
          {"ops_recorded", stats.ops_recorded},
          {"ops_replayed", stats.ops_replayed},
          {"bytes_copied", stats.bytes_copied},
          {"calls_unlike_keep_set", stats.calls_unlike_keep_set},
          {"nanoseconds_replayed", stats.nanoseconds_replayed}};
}

void wait_without_gil(std::mutex& mutex) {
  if (Py_IsInitialized() == 0 || PyGILState_Check() == 0) return mutex.lock();
  const py::gil_scoped_release released;
  mutex.lock();
}

void before_resize(const py::handle& storage) {
  TORCH_CHECK_TYPE(THPStorage_Check(storage.ptr()),
                   "before_resize takes a torch.UntypedStorage");
  Replay::before_resize(StoragePtr::unsafe_reclaim_from_nonowning(
      THPStorage_Unpack(storage.ptr()).unsafeGetStorageImpl()));
}

std::map<std::string, std::size_t> reasons(ReplayStats& stats) {
  const std::lock_guard lock(stats.mutex);
  return stats.reasons;
}

}  // namespace

void bind_replay(py::module_& m) {
  py::class_<KeepSet, std::shared_ptr<KeepSet>>(m, "KeepSet")
      .def(py::init(&make_keep_set), py::arg("ops"), py::arg("kept"))
      .def_readonly("ops", &KeepSet::ops)
      .def_readonly("kept", &KeepSet::kept);

  py::class_<TapeRules>(m, "TapeRules")
      .def(py::init([](std::string_view policy,
                       std::shared_ptr<KeepSet> keep_set, std::size_t min_bytes,
                       bool as_cuda, std::string_view after_difference) {
             return TapeRules{from_string<ReplayPolicy>(policy),
                              std::move(keep_set), min_bytes, as_cuda,
                              from_string<ReplayPolicy>(after_difference)};
           }),
           py::arg("policy"), py::arg("keep_set"), py::arg("min_bytes"),
           py::arg("as_cuda") = false, py::arg("after_difference") = "cheap");

  set_wait_for_tape(&wait_without_gil);
  look_into_functions();
  m.def("can_time", &can_time, py::arg("device"));
  m.def("allowed_tf32", [] {
    const Tf32 tf32 = allowed_tf32();
    return std::pair(tf32.matmuls, tf32.convolutions);
  });
  m.def("unpack_hook", &make_unpack_hook);
  m.def("rest", &Replay::rest);
  m.def("before_resize", &before_resize, py::arg("storage"));
  m.def("replay_policies", [] {
    py::list names;
    for (const auto& entry : EnumNames<ReplayPolicy>::kTable) {
      names.append(std::string(entry.name));
    }
    return py::tuple(names);
  });

  py::class_<Replay, std::shared_ptr<Replay>>(m, "Replay")
      .def(py::init<c10::Device, std::vector<TapeRules>>(), py::arg("device"),
           py::arg("layers"))
      .def("set_layers", &Replay::set_layers, py::arg("layers"))
      .def("record", &Replay::record, py::arg("recorder").none(true))
      .def("time_ops", &Replay::time_ops, py::arg("times").none(true),
           py::call_guard<py::gil_scoped_release>())
      .def("enter", &Replay::enter)
      .def("leave", &Replay::leave, py::arg("outputs"))
      .def("enter_layer", &Replay::enter_layer)
      .def("leave_layer", &Replay::leave_layer)
      .def("enter_compiled", &Replay::enter_compiled)
      .def("leave_compiled", &Replay::leave_compiled)
      .def_property_readonly("calls_unlike_keep_set",
                             [](Replay& replay) -> std::size_t {
                               return replay.stats().calls_unlike_keep_set;
                             })
      .def_property_readonly("is_entered", &Replay::is_entered)
      .def("pack_hook", &make_pack_hook)
      .def("counts", [](Replay& replay) { return counts(replay.stats()); })
      .def("reasons", [](Replay& replay) { return reasons(replay.stats()); })
      .def("reset_stats", [](Replay& replay) { replay.stats().reset(); });
}

}  // namespace memscale
