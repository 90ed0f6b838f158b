#include "memscale/simdev/registration.h"

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <torch/library.h>

#include <mutex>

#include "memscale/hostmem/host_allocator.h"
#include "memscale/simdev/device.h"
#include "memscale/simdev/host_call.h"

namespace memscale::sim {

torch::Library& device_kernels() {
  static auto* aten =
      new torch::Library(torch::Library::IMPL, "aten",
                         c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  return *aten;
}

void register_device() {
  static std::once_flag once;
  std::call_once(once, [] {
    hostmem::install();
    c10::register_privateuse1_backend("sim");
    c10::SetAllocator(kDeviceType, &allocator());
    register_guard();
    register_hooks();
    register_memory_ops();
    register_attention();
    register_dropout();
    register_rnn();
    register_autocast();
    register_beyond_cpu();
    register_fallback();
    const HostCall first;  // see Note [One thread count for the device]
  });
}

}  // namespace memscale::sim
