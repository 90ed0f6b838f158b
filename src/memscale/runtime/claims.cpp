#include "memscale/runtime/claims.h"

#include <algorithm>
#include <utility>

namespace memscale {
namespace {

// So few are looked at each time.
constexpr std::size_t kFewClaims = 256;

}  // namespace

bool Claims::is_same(const Claimed& a, const Claimed& b) {
  return a.state == b.state && !a.tape.owner_before(b.tape) &&
         !b.tape.owner_before(a.tape);
}

Claims& Claims::of_process() {
  // Never destroyed: threads of autograd may outlive static objects.
  static auto& claims = *new Claims();
  return claims;
}

void Claims::open(const std::shared_ptr<Tape>& tape) {
  const std::lock_guard lock(mutex_);
  open_.push_back(tape);
  num_open_ = open_.size();
}

void Claims::add(const std::shared_ptr<Tape>& tape) {
  std::vector<Tape::Claim> needed = tape->close();
  const std::lock_guard lock(mutex_);
  std::erase_if(open_, [&](const std::weak_ptr<Tape>& each) {
    const auto alive = each.lock();
    return alive == nullptr || alive == tape;
  });
  num_open_ = open_.size();
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
  if (size_ == 0 || !is_plain(*tensor.unsafeGetTensorImpl())) return;
  before_write(own_storage(tensor));
}

void Claims::before_write(const StoragePtr& storage) {
  for (const Claimed& claimed : find(storage.get(), /*take=*/true)) {
    if (const auto tape = claimed.tape.lock()) {
      tape->before_write(claimed.state, storage);
    }
  }
}

void Claims::write_aside(const at::Tensor& tensor) {
  if (num_open_ == 0 || !is_plain(*tensor.unsafeGetTensorImpl())) return;
  std::vector<std::weak_ptr<Tape>> open;
  {
    const std::lock_guard lock(mutex_);
    open = open_;
  }
  for (const std::weak_ptr<Tape>& each : open) {
    if (const auto tape = each.lock()) tape->write_aside(own_storage(tensor));
  }
}

void Claims::offer(const at::Tensor& tensor) {
  if (size_ == 0 || !is_plain(*tensor.unsafeGetTensorImpl())) return;
  for (const Claimed& claimed : find(storage_of(tensor), /*take=*/false)) {
    if (const auto tape = claimed.tape.lock()) {
      tape->offer(claimed.state, own_storage(tensor));
    }
  }
}

bool Claims::forget_unneeded() {
  if (size_ == 0) return false;
  // Tapes are asked outside of the lock: they may let go of anything.
  std::vector<std::pair<Map::key_type, Claimed>> entries;
  {
    const std::lock_guard lock(mutex_);
    entries.assign(claims_.begin(), claims_.end());
  }
  std::erase_if(entries, [](const auto& entry) {
    const std::shared_ptr<Tape> tape = entry.second.tape.lock();
    return tape != nullptr && tape->needs_original(entry.second.state);
  });
  const std::lock_guard lock(mutex_);
  for (const auto& [storage, unneeded] : entries) {
    const auto [begin, end] = claims_.equal_range(storage);
    const auto found = std::find_if(begin, end, [&](const auto& entry) {
      return is_same(entry.second, unneeded);
    });
    if (found != end) claims_.erase(found);
  }
  size_ = claims_.size();
  next_sweep_ = 2 * size_;
  return size_ > 0;
}

bool Claims::forget_some() {
  const bool is_worth_a_look = size_ <= kFewClaims || size_ > next_sweep_;
  return is_worth_a_look ? forget_unneeded() : size_ > 0;
}

}  // namespace memscale
