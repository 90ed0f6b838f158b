#include "memscale/simdev/device.h"

#include <c10/util/Exception.h>

#include "memscale/base/bytes.h"

namespace memscale::sim {
namespace {

class DeviceBlocks final : public hostmem::BlockSource {
 public:
  void* allocate(size_t bytes) override { return allocate_or_throw(bytes); }
};

class SimAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : allocate_or_throw(bytes);
    return {data, data, &hostmem::release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &hostmem::release; }
  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }

  bool initialized() override { return true; }
  // The heap keeps nothing back, and the one stream is synchronous: there is
  // nothing to empty and no other stream's use to wait for.
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex device) override {
    check_index(device);
    const HeapStats heap_stats = heap().stats();
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto fill = [](c10::CachingAllocator::StatArray& to, int64_t current,
                         int64_t peak, int64_t allocated, int64_t freed) {
      auto& all =
          to[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
      all.current = current;
      all.peak = peak;
      all.allocated = allocated;
      all.freed = freed;
    };
    for (auto* bytes :
         {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      fill(*bytes, heap_stats.allocated, heap_stats.allocated_peak,
           heap_stats.total_allocated, heap_stats.total_freed);
    }
    fill(stats.requested_bytes, heap_stats.requested, heap_stats.requested_peak,
         heap_stats.total_requested, heap_stats.total_requested_freed);
    for (auto* count : {&stats.allocation, &stats.segment, &stats.active}) {
      fill(*count, heap_stats.blocks, heap_stats.blocks_peak,
           heap_stats.total_blocks, heap_stats.total_blocks_freed);
    }
    stats.num_ooms = heap_stats.ooms;
    stats.num_device_alloc = heap_stats.total_blocks;
    stats.num_device_free = heap_stats.total_blocks_freed;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    check_index(device);
    heap().reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    check_index(device);
    heap().reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    check_index(device);
    const HeapStats stats = heap().stats();
    return {static_cast<size_t>(stats.capacity - stats.allocated),
            static_cast<size_t>(stats.capacity)};
  }

 private:
  static void check_index(c10::DeviceIndex device) {
    TORCH_CHECK(device == 0 || device == -1,
                "invalid device index: sim has one device, sim:0, got ",
                static_cast<int>(device));
  }
};

// torch.profiler(profile_memory=True).
void report_to_profiler(void* data, int64_t change, int64_t allocated) {
  if (!c10::memoryProfilingEnabled()) return;
  c10::reportMemoryUsageToProfiler(data, change, static_cast<size_t>(allocated),
                                   static_cast<size_t>(allocated), kDevice);
}

}  // namespace

Heap& heap() {
  static auto* heap = new Heap(/*capacity=*/0, &report_to_profiler);
  return *heap;
}

void* allocate_or_throw(size_t bytes) {
  const auto wanted = static_cast<int64_t>(bytes);
  if (void* data = heap().allocate(wanted)) return data;
  const HeapStats stats = heap().stats();
  const auto human = [](int64_t n) { return Bytes(n).human(); };
  TORCH_CHECK_WITH(OutOfMemoryError, false,
                   "sim out of memory. Tried to allocate ", human(wanted),
                   ". Device 0 has a total capacity of ", human(stats.capacity),
                   " of which ", human(stats.capacity - stats.allocated),
                   " is free. Of the memory in "
                   "use, ",
                   human(stats.allocated), " is allocated by PyTorch in ",
                   stats.blocks, " blocks.");
}

hostmem::BlockSource& device_blocks() {
  static auto* blocks = new DeviceBlocks;
  return *blocks;
}

c10::DeviceAllocator& allocator() {
  static auto* allocator = new SimAllocator;
  return *allocator;
}

void set_capacity(int64_t bytes) {
  TORCH_CHECK_VALUE(bytes > 0, "memory must be more than 0 bytes, got ", bytes);
  if (bytes == heap().capacity()) return;
  TORCH_CHECK(heap().resize(bytes), "the simulated device is in use: ",
              Bytes(heap().stats().allocated).human(), " in ",
              heap().stats().blocks,
              " blocks are allocated; free its tensors before changing its "
              "memory from ",
              Bytes(heap().capacity()).human(), " to ", Bytes(bytes).human());
}

}  // namespace memscale::sim
