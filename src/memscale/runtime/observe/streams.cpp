#include "memscale/runtime/observe/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace memscale {

c10::StreamId current_stream(c10::Device device) {
  if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) {
    return 0;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

void use_on_current_stream(const c10::StorageImpl& storage,
                           c10::StreamId made_on, bool foreign) {
  const c10::Device device = storage.device();
  if (device.is_cpu() || !c10::impl::hasDeviceGuardImpl(device.type())) {
    return;
  }
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream here = guard.getStream(device);
  if (here.id() != made_on) {
    // All that was put there so far, and so what made these bytes.
    c10::Event event(device.type());
    event.record(c10::Stream(c10::Stream::UNSAFE, device, made_on));
    event.block(here);
  } else if (!foreign) {
    return;
  }
  guard.recordDataPtrOnStream(storage.data_ptr(), here);
}

}  // namespace memscale
