#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "memscale/base/block.h"
#include "memscale/base/byte_counter.h"

namespace memscale::sim {

// What the heap counts. Bytes are charged bytes (rounded) unless said.
struct HeapStats {
  int64_t capacity = 0;
  int64_t allocated = 0;
  int64_t allocated_peak = 0;
  int64_t requested = 0;  // before rounding
  int64_t requested_peak = 0;
  int64_t blocks = 0;  // live
  int64_t blocks_peak = 0;
  int64_t total_blocks = 0;  // since the last reset of accumulated figures
  int64_t total_allocated = 0;
  int64_t total_freed = 0;
  int64_t total_requested = 0;
  int64_t total_requested_freed = 0;
  int64_t total_blocks_freed = 0;
  int64_t ooms = 0;  // refused allocations
};

// The memory of one simulated device: host memory behind a capacity.
// A block's charge is its size rounded up to 512 bytes, as the CUDA caching
// allocator does. Freed blocks go back to the host at once: there is no cache
// and no fragmentation, so `allocated` is exactly the sum of live blocks.
// Thread-safe. Not copyable. It must outlive its blocks.
class Heap final : public BlockOwner {
 public:
  static constexpr int64_t kRounding = 512;
  static int64_t charge(int64_t bytes) noexcept {
    return (bytes + kRounding - 1) / kRounding * kRounding;
  }

  // Told of every block taken (`change` > 0) and given back (< 0), in charged
  // bytes, with what is allocated then. Called on the thread that does it.
  using Observer = void (*)(void* data, int64_t change, int64_t allocated);

  explicit Heap(int64_t capacity, Observer observer = nullptr)
      : capacity_(capacity), observer_(observer) {}
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // 64-byte aligned data, or nullptr where it does not fit. `bytes` > 0.
  // Throws std::bad_alloc where the host itself has no memory left.
  void* allocate(int64_t bytes);
  void release(BlockHeader* block) noexcept override;
  bool owns(void* data) const noexcept;

  // Changes the capacity where no block is live; returns whether it did.
  bool resize(int64_t capacity);
  int64_t capacity() const noexcept { return capacity_.load(); }

  HeapStats stats() const;
  void reset_peak();
  void reset_accumulated();

 private:
  std::atomic<int64_t> capacity_;
  const Observer observer_;
  ByteCounter allocated_;
  ByteCounter requested_;
  ByteCounter blocks_;
  std::atomic<int64_t> total_blocks_{0};
  std::atomic<int64_t> total_allocated_{0};
  std::atomic<int64_t> total_freed_{0};
  std::atomic<int64_t> total_requested_{0};
  std::atomic<int64_t> total_requested_freed_{0};
  std::atomic<int64_t> total_blocks_freed_{0};
  std::atomic<int64_t> ooms_{0};
};

}  // namespace memscale::sim
