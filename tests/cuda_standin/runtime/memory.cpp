// Memory of the devices is memory of the host. It is address space first: a
// page that nothing writes to is never backed, so that a card of 80 GiB can be
// filled on a machine that has less. Copies copy, fills fill.
#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "card.h"
#include "runtime.h"

namespace standin {
namespace {

constexpr int kMaxDevices = 16;
// A card hands out whole pages of 2 MiB.
constexpr std::size_t kPageBytes = std::size_t{2} << 20;

struct Block {
  std::size_t bytes;
  int device;
  bool on_host;
};

std::mutex mutex;  // guards all below
std::map<char*, Block> blocks;
std::array<std::size_t, kMaxDevices> used_bytes{};
std::size_t capacity_bytes = 0;  // 0: the card's own

std::size_t capacity() {
  return capacity_bytes != 0 ? capacity_bytes : card().memory_bytes;
}

char* map_addresses(std::size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return address == MAP_FAILED ? nullptr : static_cast<char*>(address);
}

bool fits(std::size_t bytes, int device) {
  return used_bytes[device] + bytes <= capacity();
}

cudaError_t allocate(void** out, std::size_t bytes, bool on_host) {
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  const int device = current_device();
  const std::size_t rounded =
      (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  const std::lock_guard lock(mutex);
  if (!on_host && !fits(rounded, device)) {
    return fail(cudaErrorMemoryAllocation);
  }
  char* address = map_addresses(rounded);
  if (address == nullptr) return fail(cudaErrorMemoryAllocation);
  blocks[address] = {rounded, device, on_host};
  if (!on_host) used_bytes[device] += rounded;
  *out = address;
  return cudaSuccess;
}

cudaError_t release(void* address, bool on_host) {
  if (address == nullptr) return cudaSuccess;
  const std::lock_guard lock(mutex);
  const auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end() || found->second.on_host != on_host) {
    return fail(cudaErrorInvalidValue);
  }
  const Block& block = found->second;
  if (!block.on_host) used_bytes[block.device] -= block.bytes;
  munmap(address, block.bytes);
  blocks.erase(found);
  return cudaSuccess;
}

// The block that holds the address, if any. The lock is held.
const Block* block_of(const void* address) {
  const auto* at = static_cast<const char*>(address);
  auto after = blocks.upper_bound(const_cast<char*>(at));
  if (after == blocks.begin()) return nullptr;
  --after;
  return at < after->first + after->second.bytes ? &after->second : nullptr;
}

cudaError_t copy(void* to, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t fill(void* to, int value, std::size_t bytes) {
  if (bytes == 0) return cudaSuccess;
  bool ours = false;
  {
    const std::lock_guard lock(mutex);
    ours = block_of(to) != nullptr;
  }
  if (value == 0 && ours) {
    standin_discard(to, bytes);
  } else {
    std::memset(to, value, bytes);
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace standin

using namespace standin;

extern "C" {

int standin_take(std::size_t bytes, int device) {
  const std::lock_guard lock(mutex);
  if (!fits(bytes, device)) return 1;
  used_bytes[device] += bytes;
  return 0;
}

void standin_give(std::size_t bytes, int device) {
  const std::lock_guard lock(mutex);
  used_bytes[device] -= bytes;
}

void* standin_reserve(std::size_t bytes, int device) {
  char* address = map_addresses(bytes);
  const std::lock_guard lock(mutex);
  if (address != nullptr) blocks[address] = {bytes, device, false};
  return address;
}

void standin_unreserve(void* address) {
  const std::lock_guard lock(mutex);
  const auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end()) return;
  munmap(address, found->second.bytes);
  blocks.erase(found);
}

void standin_discard(void* address, std::size_t bytes) {
  constexpr std::uintptr_t kHostPage = 4096;
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  const std::uintptr_t end = begin + bytes;
  const std::uintptr_t first = (begin + kHostPage - 1) / kHostPage * kHostPage;
  const std::uintptr_t last = end / kHostPage * kHostPage;
  if (last <= first) {
    std::memset(address, 0, bytes);
    return;
  }
  std::memset(address, 0, first - begin);
  madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  std::memset(reinterpret_cast<void*>(last), 0, end - last);
}

// For tests: the capacity of every device from now on, 0 for the card's own.
void standin_set_capacity(std::size_t bytes) {
  const std::lock_guard lock(mutex);
  capacity_bytes = bytes;
}

std::size_t standin_used(int device) {
  const std::lock_guard lock(mutex);
  return used_bytes[device];
}

cudaError_t cudaMalloc(void** out, size_t bytes) {
  return allocate(out, bytes, false);
}
cudaError_t cudaFree(void* address) { return release(address, false); }
cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t) {
  return allocate(out, bytes, false);
}
cudaError_t cudaFreeAsync(void* address, cudaStream_t) {
  return release(address, false);
}
cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned) {
  return allocate(out, bytes, true);
}
cudaError_t cudaFreeHost(void* address) { return release(address, true); }
cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const std::lock_guard lock(mutex);
  const std::size_t used = used_bytes[current_device()];
  *total = capacity();
  *free = capacity() > used ? capacity() - used : 0;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out,
                                     const void* address) {
  const std::lock_guard lock(mutex);
  *out = {};
  const Block* block = block_of(address);
  auto* plain = const_cast<void*>(address);
  if (block == nullptr) {
    out->type = cudaMemoryTypeUnregistered;
    out->device = -1;
    out->hostPointer = plain;
    return cudaSuccess;
  }
  out->type = block->on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  out->device = block->device;
  out->devicePointer = plain;
  out->hostPointer = block->on_host ? plain : nullptr;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes,
                       cudaMemcpyKind) {
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes,
                            cudaMemcpyKind, cudaStream_t) {
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int,
                                size_t bytes, cudaStream_t) {
  return copy(to, from, bytes);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from,
                              size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t) {
  for (size_t row = 0; row < height; ++row) {
    copy(static_cast<char*>(to) + row * to_pitch,
         static_cast<const char*>(from) + row * from_pitch, width);
  }
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return fill(to, value, bytes);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return fill(to, value, bytes);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  static void* const handle = standin_new_handle();
  *pool = static_cast<cudaMemPool_t>(handle);
  return cudaSuccess;
}

}  // extern "C"
