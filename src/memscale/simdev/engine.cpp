#include "memscale/simdev/engine.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>

#include <atomic>
#include <exception>
#include <thread>

#include "memscale/simdev/device.h"

namespace memscale::sim {
namespace {

const std::thread::id loading_thread = std::this_thread::get_id();
std::atomic<bool> set_elsewhere = false;

}  // namespace

void note_device_set() noexcept {
  if (std::this_thread::get_id() != loading_thread) set_elsewhere = true;
}

bool wait_for_backward() noexcept {
  if (!set_elsewhere) return false;
  try {
    // The thread takes one task after the other, and drops a graph before it
    // takes the next. This one is without Python objects: whenever it is
    // dropped itself, nothing is asked of the interpreter.
    const c10::AutoGradMode with_gradients(true);
    const at::Tensor leaf = at::ones({}, at::TensorOptions().device(kDevice));
    leaf.set_requires_grad(true);
    leaf.mul(leaf).backward();
    return true;
  } catch (const std::exception&) {
    // After a fork, or with the engine older than the device, there is no
    // such thread; a full device cannot be waited for, as without this.
    return false;
  }
}

}  // namespace memscale::sim
