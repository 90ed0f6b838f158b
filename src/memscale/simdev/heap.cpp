#include "memscale/simdev/heap.h"

#include <cstdlib>
#include <new>

namespace memscale::sim {

void* Heap::allocate(int64_t bytes) {
  // The first test also keeps charge() from overflowing.
  const bool fits = bytes <= capacity();
  const int64_t charged = fits ? charge(bytes) : 0;
  if (!fits || !allocated_.try_add(charged, capacity())) {
    ++ooms_;
    return nullptr;
  }
  // aligned_alloc wants a multiple of the alignment; `charged` is one.
  void* base = std::aligned_alloc(
      kBlockAlignment, static_cast<size_t>(charged) + kBlockOverhead);
  if (base == nullptr) {
    allocated_.subtract(charged);
    throw std::bad_alloc();
  }
  requested_.add(bytes);
  blocks_.add(1);
  ++total_blocks_;
  total_allocated_ += charged;
  total_requested_ += bytes;
  void* data = make_block(base, bytes, charged, this);
  if (observer_ != nullptr) observer_(data, charged, allocated_.current());
  return data;
}

void Heap::release(BlockHeader* block) noexcept {
  requested_.subtract(block->requested);
  blocks_.subtract(1);
  ++total_blocks_freed_;
  total_freed_ += block->charged;
  total_requested_freed_ += block->requested;
  const int64_t charged = block->charged;
  void* data = block + 1;
  block->mark = 0;
  std::free(block->base);
  allocated_.subtract(charged);
  if (observer_ != nullptr) {
    observer_(data, -charged, allocated_.current());
  }
}

bool Heap::owns(void* data) const noexcept {
  const BlockHeader* block = find_block(data);
  return block != nullptr && block->owner == this;
}

bool Heap::resize(int64_t capacity) {
  if (allocated_.current() != 0) return false;
  capacity_ = capacity;
  return true;
}

HeapStats Heap::stats() const {
  return {.capacity = capacity(),
          .allocated = allocated_.current(),
          .allocated_peak = allocated_.peak(),
          .requested = requested_.current(),
          .requested_peak = requested_.peak(),
          .blocks = blocks_.current(),
          .blocks_peak = blocks_.peak(),
          .total_blocks = total_blocks_,
          .total_allocated = total_allocated_,
          .total_freed = total_freed_,
          .total_requested = total_requested_,
          .total_requested_freed = total_requested_freed_,
          .total_blocks_freed = total_blocks_freed_,
          .ooms = ooms_};
}

void Heap::reset_peak() {
  allocated_.reset_peak();
  requested_.reset_peak();
  blocks_.reset_peak();
}

void Heap::reset_accumulated() {
  total_blocks_ = 0;
  total_allocated_ = 0;
  total_freed_ = 0;
  total_requested_ = 0;
  total_requested_freed_ = 0;
  total_blocks_freed_ = 0;
  ooms_ = 0;
}

}  // namespace memscale::sim
