#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <utility>

#include "memscale/hostmem/host_allocator.h"
#include "memscale/simdev/heap.h"

// The simulated accelerator as torch sees it: PrivateUse1, named "sim", one
// device, index 0. Its kernels are the CPU's, its memory is a Heap.
namespace memscale::sim {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;
inline const c10::Device kDevice{kDeviceType, 0};

// The one heap. Lives for ever: tensors may outlive everything else.
Heap& heap();

// A block of the heap, or torch's own out-of-memory error.
void* allocate_or_throw(size_t bytes);

// Steers a thread's CPU allocations onto the device (see RedirectGuard).
hostmem::BlockSource& device_blocks();

c10::DeviceAllocator& allocator();

// So far: waits of a stream for an event of another, and storages whose use on
// a stream was recorded.
std::pair<std::size_t, std::size_t> stream_counts();

// Sets the capacity of an empty device; a device in use keeps its own unless
// it is the same. Throws torch's errors.
void set_capacity(int64_t bytes);

}  // namespace memscale::sim
