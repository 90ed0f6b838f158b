#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memscale/core/tape/tape_bytes.h"

namespace memscale {

// The state that each storage is in now. A flat hash table: it is asked several
// times for every op of a training step.
class KeyMap final {
 public:
  // kNone: none is known.
  StateId find(StorageKey key) const {
    if (slots_.empty()) return kNone;
    return slots_[slot_of(key)].state;
  }
  // kNone: none is known from now on.
  void set(StorageKey key, StateId state) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    Slot& slot = slots_[slot_of(key)];
    if (slot.key == 0) ++size_;
    slot = {key, state};
  }
  void clear() {
    slots_ = {};
    size_ = 0;
  }

 private:
  struct Slot {
    StorageKey key = 0;
    StateId state = kNone;
  };

  // That of the key, or the empty one where it belongs.
  std::size_t slot_of(StorageKey key) const {
    const std::size_t mask = slots_.size() - 1;
    // Fibonacci hashing: the upper bits are the well mixed ones.
    std::size_t at = (key * 0x9E3779B97F4A7C15ULL) >>
                     (64U - static_cast<unsigned>(std::countr_zero(mask + 1)));
    while (slots_[at].key != key && slots_[at].key != 0) at = (at + 1) & mask;
    return at;
  }
  void grow() {
    std::vector<Slot> old(slots_.empty() ? 32 : 2 * slots_.size());
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.key != 0) slots_[slot_of(slot.key)] = slot;
    }
  }

  std::vector<Slot> slots_;  // a power of two
  std::size_t size_ = 0;
};

}  // namespace memscale
