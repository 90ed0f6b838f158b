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

  // A tape that a thread records: others may write what it rests on, in a
  // backward inside of forward.
  void open(const std::shared_ptr<Tape>& tape);
  // Closes the tape, and claims what it needs.
  void add(const std::shared_ptr<Tape>& tape);

  bool empty() const { return size_ == 0 && num_open_ == 0; }

  // What tapes need of these bytes has to be copied before they are written.
  void before_write(const at::Tensor& tensor);
  void before_write(const StoragePtr& storage);

  // The same for tapes that are open: by a thread that records none of them.
  void write_aside(const at::Tensor& tensor);

  // Autograd holds this tensor for a later layer: an earlier one need not
  // replay it.
  void offer(const at::Tensor& tensor);

  // Forgets what no tape needs any longer. Whether anything is left.
  bool forget_unneeded();
  // The same, but of many only once there are twice as many as were left the
  // last time: a program may have thousands of graphs alive.
  bool forget_some();

 private:
  struct Claimed {
    std::weak_ptr<Tape> tape;
    Tape::StateId state;
    WeakStoragePtr storage;  // so that its address stays its own
  };
  using Map = std::unordered_multimap<const c10::StorageImpl*, Claimed>;

  static bool is_same(const Claimed& a, const Claimed& b);
  std::vector<Claimed> find(const c10::StorageImpl* storage, bool take);

  std::mutex mutex_;
  Map claims_;
  std::atomic<std::size_t> size_{0};  // of claims_
  std::atomic<std::size_t> next_sweep_{0};
  std::vector<std::weak_ptr<Tape>> open_;
  std::atomic<std::size_t> num_open_{0};
};

}  // namespace memscale
