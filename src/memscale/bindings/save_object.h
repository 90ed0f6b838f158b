#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "memscale/runtime/replay/replay.h"

namespace memscale {

// The saved-tensor hooks of a replay, written against Python itself: they run
// for every tensor that autograd saves, and pybind11's calls would cost as much
// again as all that they do.

// f(tensor) -> SavedTensor
pybind11::object make_pack_hook(const std::shared_ptr<Replay>& replay);
// f(save) -> tensor
pybind11::object make_unpack_hook();

}  // namespace memscale
