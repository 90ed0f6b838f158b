#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "memscale/core/tape/tape_bytes.h"
#include "memscale/runtime/observe/geometry.h"
#include "memscale/runtime/observe/kernel_flags.h"
#include "memscale/runtime/observe/streams.h"
#include "memscale/runtime/replay/replay_stats.h"

namespace memscale {

struct OpInfo;
class SavedTensor;
class TensorTape;

// A call of an op, as it is made again: what core/tape does not know of a node.
struct TensorCall {
  struct Reference {
    std::uint32_t argument;
    std::int32_t element;  // of a list; -1: not a list
    Geometry geometry;
  };
  struct List {
    std::uint32_t argument;
    std::uint32_t length;
    bool of_optional;
  };

  const OpInfo* op = nullptr;
  std::vector<c10::IValue> arguments;  // tensors are left out
  std::vector<Reference> references;
  std::vector<List> lists;
  at::Generator generator;  // as it was; undefined: not random
  // What it made, in fewer bits; then it is not called again. Host memory.
  StoragePtr packed;
  caffe2::TypeMeta default_type;  // some results' dtypes depend on it
  KernelFlags kernel_flags = 0;
  bool grad_mode = false;

  // Keeps the memory of its arrays, for the next call.
  void clear() {
    arguments.clear();
    references.clear();
    lists.clear();
    generator = at::Generator();
  }
};

// TapeBytes over tensors.
//
// Note [Whole storages]
// A program may free a storage by hand (resize_(0), as reversible layers and
// sharded parameters do) and fill it again. So a state knows where its bytes
// were and how many: what has moved or shrunk since is neither read nor copied.
//
// Note [Why replay is bit-equal]
// The same kernel is called on the same bytes at the same strides, with the
// same arguments, generator state, kernel flags and grad mode, below autograd
// and autocast, which had their say when it was recorded. Nothing is replayed
// from bytes whose version differs from the recorded one, and nothing is
// written but memory of our own. What backward is given shares one version
// counter for each state: who writes into it makes every later use raise.
class TensorBytes final : public TapeBytes {
 public:
  TensorBytes(TensorTape& tape, std::shared_ptr<ReplayStats> stats);
  ~TensorBytes() override;

  // The op that makes the states which are added from now on; null: no op of
  // the tape does.
  void set_maker(const OpInfo* op) { maker_ = op; }
  // The call that becomes the next node, if it does: to be filled while its op
  // runs, and cleared when that has ended.
  TensorCall& call() { return call_; }
  // No more ops.
  void close();
  // A save that the tape is about to be asked about.
  SaveKey add_save(const std::shared_ptr<SavedTensor>& save);

  // The storage, for as long as it has the state's bytes.
  const WeakStoragePtr& original(StateId state) const {
    return states_[state].original;
  }
  c10::Device device(StateId state) const { return states_[state].device; }
  // Whether saves of the state see what was written into its storage.
  bool is_changed(StateId state) const {
    return states_[state].changed != nullptr;
  }
  // A tensor over the bytes of a state that is held, or that is changed.
  at::Tensor tensor(StateId state, const Geometry& geometry);

  std::int64_t add_state(StateId state, const TensorUse& tensor) override;
  bool is_current(StateId state) const override;
  bool is_alive(StateId state) const override;
  bool has_original(StateId state) const override;
  bool is_whole(StateId state) const override;
  bool hold(StateId state) override;
  void let_go(StateId state) override;
  void lose_original(StateId state) override;
  bool copy_out(StateId state) override;
  void show_writes(StateId state) override;
  void end_state(StateId state) override;
  void add_node(NodeId node) override;
  void clear_node(NodeId node) override;
  // In fewer bits, to the bit: packed_results.cpp.
  bool pack(NodeId node, StateId result, Packing packing) override;
  void run(NodeId node, std::span<const Destination> targets,
           std::span<const Made> written,
           std::span<const Made> results) override;
  void unpack(NodeId node, StateId result) override;
  bool is_waiting(SaveKey save) const override;
  void drop_save(SaveKey save, StateId state) override;
  void keep_save(SaveKey save, StateId state, Why why) override;
  [[noreturn]] void fail(StateId state, Failure failure) const override;
  std::shared_ptr<void> take_dead() override;

 private:
  struct State {
    std::size_t bytes = 0;
    c10::Device device = c10::kCPU;
    c10::StreamId stream = 0;  // on which it was made: see Note [Streams]
    StoragePtr held;
    WeakStoragePtr original{StoragePtr()};
    const c10::StorageImpl* storage = nullptr;  // of the original
    const void* data = nullptr;                 // where its bytes were
    c10::VariableVersion counter;
    std::uint32_t version = 0;
    // Of the tensors over memory of our own that backward was given.
    c10::VariableVersion handed_out{c10::VariableVersion::DISABLED};
    // The storage, once it was written: autograd's saves see that, unless the
    // write gave them a new version, and then they raise.
    StoragePtr changed;
    const OpInfo* op = nullptr;  // that made it, if that is known
    bool ours = false;           // held is memory of our own
    bool is_counted = false;
    bool is_dropped = false;  // at least one save is
  };
  struct Saved {
    std::weak_ptr<SavedTensor> save;
    bool is_kept = false;
  };

  static bool is_whole(const State& state, const c10::StorageImpl& storage);
  static bool has_version(const State& state);
  void bury(StoragePtr& storage);
  void adopt(StateId state, const StoragePtr& storage, const TensorCall& call);
  std::vector<StoragePtr> make_targets(const TensorCall& call,
                                       std::span<const Destination> targets);
  std::vector<c10::IValue> make_stack(const TensorCall& call,
                                      std::span<const Destination> targets,
                                      const std::vector<StoragePtr>& memory);
  void pack_bits(TensorCall& call, const State& state,
                 const StoragePtr& storage);
  void pack_indices(TensorCall& call, const State& state,
                    const StoragePtr& storage);
  // Whether its bytes are there, and still the ones that were recorded.
  static void check(const State& state, const Geometry& geometry);
  // Before this thread reads what is held of it, on the device.
  static void use_here(const State& state);

  TensorTape& tape_;
  const std::shared_ptr<ReplayStats> stats_;
  const OpInfo* maker_ = nullptr;
  TensorCall call_;
  std::vector<State> states_;
  std::vector<TensorCall> nodes_;
  std::vector<Saved> saves_;
  std::vector<StoragePtr> buried_;
};

}  // namespace memscale
