#pragma once

#include <cstddef>
#include <cstdint>

namespace memscale {

struct BlockHeader;

// Who a block's bytes are charged to, and who takes them back.
class BlockOwner {
 public:
  virtual void release(BlockHeader* block) noexcept = 0;

 protected:
  ~BlockOwner() = default;
};

// Note [Blocks carry their header]
// Every block that MemScale hands to torch starts with this header, right
// before the data. torch's raw_allocate demands that a DataPtr's context is
// the data pointer itself, so there is no other place for size and owner; and
// a block that a CPU kernel allocated must be able to become device memory
// without a copy, so host and device blocks look alike.
//
// Note [Foreign raw pointers]
// raw_deallocate may hand us a pointer that was allocated before we were
// installed. Such a pointer has no header, and the bytes before it may not be
// mapped. So data never starts a page: the header then shares a page with the
// data and can be read whoever owns it. The mark, which depends on the
// address and is cleared on release, tells the two apart.
struct alignas(64) BlockHeader {
  uint64_t mark;
  int64_t requested;  // bytes asked for
  int64_t charged;    // bytes counted, after the owner's rounding
  BlockOwner* owner;
  void* base;  // what the owner got from the allocator below
};
static_assert(sizeof(BlockHeader) == 64);

inline constexpr size_t kBlockAlignment = 64;
inline constexpr size_t kPageBytes = 4096;
// Room to ask for beyond the data: the header, and one step off a page start.
inline constexpr size_t kBlockOverhead = 2 * sizeof(BlockHeader);

inline uint64_t block_mark(const void* data) noexcept {
  return reinterpret_cast<uintptr_t>(data) ^ 0x9e3779b97f4a7c15ULL;
}

// Lays a block into `base`, which is 64-byte aligned and holds at least
// requested + kBlockOverhead bytes. Returns the data pointer, also aligned.
inline void* make_block(void* base, int64_t requested, int64_t charged,
                        BlockOwner* owner) noexcept {
  auto* header = static_cast<BlockHeader*>(base);
  if (reinterpret_cast<uintptr_t>(header + 1) % kPageBytes == 0) ++header;
  void* data = header + 1;
  *header = {block_mark(data), requested, charged, owner, base};
  return data;
}

// The header of `data`, or nullptr where `data` is not the start of a live
// block. Safe for any pointer into mapped memory.
inline BlockHeader* find_block(void* data) noexcept {
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address % kBlockAlignment != 0 || address % kPageBytes == 0) {
    return nullptr;
  }
  auto* header = static_cast<BlockHeader*>(data) - 1;
  return header->mark == block_mark(data) ? header : nullptr;
}

}  // namespace memscale
