#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memscale/core/tape/op_use.h"
#include "memscale/core/tape/tape_bytes.h"

namespace memscale {

// Note [After the call]
// What a call returned, was given, or read (parameters) may be changed in place
// before or during backward; eager does not mind unless autograd saved it. So
// storages that closed tapes need are claimed, and copied before a write, as
// within the call. Backward runs where it likes (on the CPU in the thread that
// asked, on a card in autograd's own), and hooks of users that write run there
// too: while models train there is one list for the process.
//
// T is a kind of tape. It has close(), which returns a vector of T::Claimed
// (storage, state, and `guard`, which lives as long as the claim, so that the
// key stays the storage's own); before_write(StateId), offer(StateId),
// needs_original(StateId) and write_aside(StorageKey).
//
// Thread-safe. Tapes are called outside of the lock.
template <typename T>
class Claims final {
 public:
  // A tape that a thread records: others may write what it rests on, in a
  // backward inside of forward.
  void open(const std::shared_ptr<T>& tape) {
    const std::lock_guard lock(mutex_);
    open_.push_back(tape);
    num_open_ = open_.size();
  }

  // Closes the tape, and claims what it needs.
  void add(const std::shared_ptr<T>& tape) {
    std::vector<typename T::Claimed> needed = tape->close();
    const std::lock_guard lock(mutex_);
    std::erase_if(open_, [&](const std::weak_ptr<T>& each) {
      const auto alive = each.lock();
      return alive == nullptr || alive == tape;
    });
    num_open_ = open_.size();
    for (typename T::Claimed& claimed : needed) {
      const StorageKey storage = claimed.storage;
      claims_.emplace(storage, Entry{tape, std::move(claimed)});
    }
    size_ = claims_.size();
  }

  bool empty() const { return size_ == 0 && num_open_ == 0; }
  bool has_open() const { return num_open_ > 0; }

  // What closed tapes need of these bytes is copied before they are written.
  void before_write(StorageKey storage) {
    if (size_ == 0) return;
    for (const Entry& entry : find(storage, /*take=*/true)) {
      if (const auto tape = entry.tape.lock()) {
        tape->before_write(entry.claimed.state);
      }
    }
  }

  // The same for tapes that are open: by a thread that records none of them.
  void write_aside(StorageKey storage) {
    if (num_open_ == 0) return;
    std::vector<std::weak_ptr<T>> open;
    {
      const std::lock_guard lock(mutex_);
      open = open_;
    }
    for (const std::weak_ptr<T>& each : open) {
      if (const auto tape = each.lock()) tape->write_aside(storage);
    }
  }

  // Autograd holds a tensor with this storage for a later layer: an earlier one
  // need not replay it.
  void offer(StorageKey storage) {
    if (size_ == 0) return;
    for (const Entry& entry : find(storage, /*take=*/false)) {
      if (const auto tape = entry.tape.lock()) {
        tape->offer(entry.claimed.state);
      }
    }
  }

  // Forgets what no tape needs any longer. Whether anything is left.
  bool forget_unneeded() {
    if (size_ == 0) return false;
    // Tapes are asked outside of the lock: they may let go of anything.
    std::vector<std::pair<StorageKey, Entry>> entries;
    {
      const std::lock_guard lock(mutex_);
      entries.assign(claims_.begin(), claims_.end());
    }
    std::erase_if(entries, [](const auto& entry) {
      const std::shared_ptr<T> tape = entry.second.tape.lock();
      return tape != nullptr &&
             tape->needs_original(entry.second.claimed.state);
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

  // The same, but of many only once there are twice as many as were left the
  // last time: a program may have thousands of graphs alive.
  bool forget_some() {
    const bool is_worth_a_look = size_ <= kFew || size_ > next_sweep_;
    return is_worth_a_look ? forget_unneeded() : size_ > 0;
  }

 private:
  struct Entry {
    std::weak_ptr<T> tape;
    T::Claimed claimed;
  };
  // So few are looked at each time.
  static constexpr std::size_t kFew = 256;

  static bool is_same(const Entry& a, const Entry& b) {
    return a.claimed.state == b.claimed.state && !a.tape.owner_before(b.tape) &&
           !b.tape.owner_before(a.tape);
  }

  std::vector<Entry> find(StorageKey storage, bool take) {
    const std::lock_guard lock(mutex_);
    const auto [begin, end] = claims_.equal_range(storage);
    std::vector<Entry> found;
    for (auto it = begin; it != end; ++it) found.push_back(it->second);
    if (take) {
      claims_.erase(begin, end);
      size_ = claims_.size();
    }
    return found;
  }

  std::mutex mutex_;
  std::unordered_multimap<StorageKey, Entry> claims_;
  std::atomic<std::size_t> size_{0};  // of claims_
  std::atomic<std::size_t> next_sweep_{0};
  std::vector<std::weak_ptr<T>> open_;
  std::atomic<std::size_t> num_open_{0};
};

}  // namespace memscale
