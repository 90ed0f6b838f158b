#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

#include "memscale/base/block.h"

// hostmem: torch's CPU allocator, counted, and steerable by thread. A library
// of its own because it is one per process: memscale._C measures with it, and
// memscale._simdev makes device memory of what CPU kernels allocate.
namespace memscale::hostmem {

#define MEMSCALE_HOSTMEM_API __attribute__((visibility("default")))

// Wraps the CPU allocator that torch has now. Idempotent; call while no other
// thread allocates (at import). Blocks handed out before stay with their own
// deleters and are never counted.
MEMSCALE_HOSTMEM_API void install();

// Bytes of live CPU blocks allocated since install(), over all threads.
struct Counters {
  int64_t current = 0;
  int64_t peak = 0;
};
MEMSCALE_HOSTMEM_API Counters counters();
MEMSCALE_HOSTMEM_API void reset_peak();

// The deleter of every DataPtr over a block: gives it back to its owner.
MEMSCALE_HOSTMEM_API void release(void* data);

// Where a thread's CPU allocations go instead of the host.
class BlockSource {
 public:
  // Data of a new block (see base/block.h). Throws where there is no room.
  virtual void* allocate(size_t bytes) = 0;

 protected:
  ~BlockSource() = default;
};

// While alive, CPU allocations of this thread come from `source`; nullptr
// means the host. Nests. Not copyable.
class MEMSCALE_HOSTMEM_API RedirectGuard final {
 public:
  explicit RedirectGuard(BlockSource* source) noexcept;
  ~RedirectGuard();
  RedirectGuard(const RedirectGuard&) = delete;
  RedirectGuard& operator=(const RedirectGuard&) = delete;

 private:
  BlockSource* previous_;
};

}  // namespace memscale::hostmem
