// Device and stream switching for a backend with one device. It has as many
// streams as are asked for, and every kernel has finished when its call
// returns: so an event has happened as soon as it is recorded, and waiting for
// one is only counted.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <utility>

#include "memscale/simdev/device.h"
#include "memscale/simdev/engine.h"
#include "memscale/simdev/registration.h"

namespace memscale::sim {
namespace {

using Clock = std::chrono::steady_clock;

struct SimEvent {
  c10::StreamId stream;
  Clock::time_point time;
};

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> last_stream{0};
std::atomic<std::size_t> waits{0};
std::atomic<std::size_t> records{0};

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

  c10::Stream getStream(c10::Device) const override {
    return stream(current_stream);
  }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return stream(++last_stream);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return stream(++last_stream);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream, next.id()));
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&,
                             const c10::Stream&) const override {
    ++records;
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new SimEvent;
    *static_cast<SimEvent*>(*event) = {stream.id(), Clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (static_cast<SimEvent*>(event)->stream != stream.id()) ++waits;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<SimEvent*>(event);
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    const std::chrono::duration<double, std::milli> time =
        static_cast<SimEvent*>(end)->time - static_cast<SimEvent*>(start)->time;
    return time.count();
  }

 private:
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
  }
};

}  // namespace

std::pair<std::size_t, std::size_t> stream_counts() { return {waits, records}; }

void register_guard() {
  static const c10::impl::DeviceGuardImplRegistrar registrar(kDeviceType,
                                                             new SimGuard);
}

}  // namespace memscale::sim
