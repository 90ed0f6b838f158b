#include "memscale/runtime/claims.h"

#include <utility>

namespace memscale {

Claims& Claims::of_process() {
  // Never destroyed: threads of autograd may outlive static objects.
  static auto& claims = *new Claims();
  return claims;
}

void Claims::add(const std::shared_ptr<Tape>& tape) {
  std::vector<Tape::Claim> needed = tape->close();
  const std::lock_guard lock(mutex_);
  for (Tape::Claim& claim : needed) {
    claims_.emplace(claim.storage.get(),
                    Claimed{tape, claim.state, WeakStoragePtr(claim.storage)});
  }
  size_ = claims_.size();
}

std::vector<Claims::Claimed> Claims::find(const c10::StorageImpl* storage,
                                          bool take) {
  const std::lock_guard lock(mutex_);
  const auto [begin, end] = claims_.equal_range(storage);
  std::vector<Claimed> found;
  for (auto it = begin; it != end; ++it) found.push_back(it->second);
  if (take) {
    claims_.erase(begin, end);
    size_ = claims_.size();
  }
  return found;
}

void Claims::before_write(const at::Tensor& tensor) {
  if (empty() || !is_plain(*tensor.unsafeGetTensorImpl())) return;
  before_write(own_storage(tensor));
}

void Claims::before_write(const StoragePtr& storage) {
  for (const Claimed& claimed : find(storage.get(), /*take=*/true)) {
    if (const auto tape = claimed.tape.lock()) {
      tape->before_write(claimed.state, storage);
    }
  }
}

void Claims::offer(const at::Tensor& tensor) {
  if (empty() || !is_plain(*tensor.unsafeGetTensorImpl())) return;
  for (const Claimed& claimed : find(storage_of(tensor), /*take=*/false)) {
    if (const auto tape = claimed.tape.lock()) {
      tape->offer(claimed.state, own_storage(tensor));
    }
  }
}

bool Claims::forget_unneeded() {
  if (empty()) return false;
  // A tape may end with the last of these pointers: after the lock.
  std::vector<std::shared_ptr<Tape>> alive;
  const std::lock_guard lock(mutex_);
  std::erase_if(claims_, [&](const auto& entry) {
    std::shared_ptr<Tape> tape = entry.second.tape.lock();
    if (tape == nullptr) return true;
    const bool is_needed = tape->needs_original(entry.second.state);
    alive.push_back(std::move(tape));
    return !is_needed;
  });
  size_ = claims_.size();
  return !claims_.empty();
}

}  // namespace memscale
