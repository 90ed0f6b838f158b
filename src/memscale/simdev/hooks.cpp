// What torch asks an accelerator for: its generator, pinned memory, resizing.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <map>
#include <mutex>

#include "memscale/simdev/device.h"
#include "memscale/simdev/generator.h"

namespace memscale::sim {
namespace {

// Pinned host memory: ordinary host blocks, remembered by address range so
// that is_pinned() can answer. Thread-safe. Lives for ever.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    const std::lock_guard lock(mutex_);
    if (data != nullptr) ends_[data] = static_cast<char*>(data) + bytes;
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }

  bool owns(const void* data) const {
    const std::lock_guard lock(mutex_);
    auto after = ends_.upper_bound(data);
    return after != ends_.begin() && data < std::prev(after)->second;
  }

 private:
  static void release(void* data);

  mutable std::mutex mutex_;
  std::map<const void*, const void*> ends_;  // first byte -> one past last
};

PinnedAllocator& pinned_allocator() {
  static auto* allocator = new PinnedAllocator;
  return *allocator;
}

void PinnedAllocator::release(void* data) {
  {
    const std::lock_guard lock(pinned_allocator().mutex_);
    pinned_allocator().ends_.erase(data);
  }
  hostmem::release(data);
}

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    TORCH_CHECK(device <= 0, "sim has one device, sim:0, got index ",
                static_cast<int>(device));
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    setCurrentDevice(device);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<SimGenerator>();
  }

  at::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(heap().owns(data), "the pointer is not memory of sim:0");
    return kDevice;
  }
  bool isPinnedPtr(const void* data) const override {
    return pinned_allocator().owns(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator();
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage,
                              size_t bytes) const override {
    c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(impl->resizable(),
                "Trying to resize storage that is not resizable");
    c10::DataPtr data = allocator().allocate(bytes);
    const size_t kept = std::min(bytes, impl->nbytes());
    if (kept > 0) std::memcpy(data.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(bytes);
  }
};

}  // namespace

void register_hooks() {
  static auto* hooks = new SimHooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace memscale::sim
