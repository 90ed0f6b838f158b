#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "memscale/runtime/geometry.h"
#include "memscale/runtime/tape.h"

namespace memscale {

// Note [After the call]
// What a call returned, was given, or read (parameters) may be changed in place
// before or during backward; eager does not mind unless autograd saved it. So
// storages that closed tapes need are claimed, and copied before a write, as
// within the call. Backward runs where it likes (on the CPU in the thread that
// asked, on a card in autograd's own), and hooks of users that write run there
// too: there is one list for the process.
//
// Thread-safe. Tapes are called outside of the lock.
class Claims final {
 public:
  static Claims& of_process();

  // Closes the tape, and claims what it needs.
  void add(const std::shared_ptr<Tape>& tape);

  bool empty() const { return size_ == 0; }

  // What tapes need of these bytes has to be copied before they are written.
  void before_write(const at::Tensor& tensor);
  void before_write(const StoragePtr& storage);

  // Autograd holds this tensor for a later layer: an earlier one need not
  // replay it.
  void offer(const at::Tensor& tensor);

  // Forgets what no tape needs any longer. Whether anything is left.
  bool forget_unneeded();

 private:
  struct Claimed {
    std::weak_ptr<Tape> tape;
    Tape::StateId state;
    WeakStoragePtr storage;  // so that its address stays its own
  };
  using Map = std::unordered_multimap<const c10::StorageImpl*, Claimed>;

  std::vector<Claimed> find(const c10::StorageImpl* storage, bool take);

  std::mutex mutex_;
  Map claims_;
  std::atomic<std::size_t> size_{0};  // of claims_
};

}  // namespace memscale
