// Device and stream switching for a backend with one device and, for now, one
// synchronous stream: every kernel has finished when its call returns.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memscale/simdev/device.h"
#include "memscale/simdev/engine.h"
#include "memscale/simdev/registration.h"

namespace memscale::sim {
namespace {

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return kDevice;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.type() == kDeviceType && device.index() <= 0,
                "invalid device ordinal: sim has one device, sim:0, got ",
                device);
    note_device_set();
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override { return only_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override {
    return only_stream();
  }
  c10::Stream exchangeStream(c10::Stream) const override {
    return only_stream();
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&,
                             const c10::Stream&) const override {}

  // With one synchronous stream an event has always happened.
  void record(void**, const c10::Stream&, c10::DeviceIndex,
              c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}

 private:
  static c10::Stream only_stream() {
    return c10::Stream(c10::Stream::DEFAULT, kDevice);
  }
};

}  // namespace

void register_guard() {
  static const c10::impl::DeviceGuardImplRegistrar registrar(kDeviceType,
                                                             new SimGuard);
}

}  // namespace memscale::sim
