#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "memscale/core/tape/locked_tape.h"
#include "memscale/core/tape/tape.h"
#include "memscale/core/tape/tape_rules.h"
#include "memscale/runtime/observe/geometry.h"
#include "memscale/runtime/replay/replay_stats.h"
#include "memscale/runtime/replay/tensor_bytes.h"

namespace memscale {

struct OpInfo;
class SavedTensor;

// A storage as core/tape knows it: by its address, for as long as somebody has
// a pointer to it.
inline StorageKey key_of(const c10::StorageImpl* storage) {
  return reinterpret_cast<StorageKey>(storage);
}

// A tape over tensors: what it decides is in core/tape, the bytes are in
// TensorBytes. Here are calls as the dispatcher makes them, and threads: a tape
// is recorded by one, and then asked by any. decide() and release() never wait.
class TensorTape final : public std::enable_shared_from_this<TensorTape> {
 public:
  TensorTape(TapeRules rules, std::shared_ptr<ReplayStats> stats);
  ~TensorTape();

  ReplayPolicy policy() const { return rules_.policy; }

  // ---- forward: one thread, until close() ----
  void begin_op(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs,
                bool in_function);
  void end_op(c10::ArrayRef<c10::IValue> outputs, std::size_t num_expected);
  // In place of both, for an op that makes nothing but views of these.
  void add_view(c10::ArrayRef<const c10::IValue> inputs);
  // Around a custom Function, with the plain tensors that it may write: Note
  // [Unseen writes].
  void begin_function(c10::ArrayRef<at::Tensor> arguments);
  void end_function(c10::ArrayRef<at::Tensor> arguments);
  // Decides for one save: `save` holds the tensor, and may be made to drop it.
  // True: it stays held, and came from outside of this tape. While another
  // thread replays, it stays held.
  bool decide(const at::Tensor& tensor,
              const std::shared_ptr<SavedTensor>& save);
  void add_output(StorageKey storage);
  void decide_again();
  void cross_border();
  bool spans_layers();
  // A state that this tape must be asked about before its storage is written.
  struct Claimed {
    StorageKey storage;
    StateId state;
    WeakStoragePtr guard;  // so that its address stays its own
  };
  std::vector<Claimed> close();

  // ---- between tapes ----
  void before_write(StateId state);
  void write_aside(StorageKey storage);
  bool needs_original(StateId state);
  void offer(StateId state);

  // ---- backward: any thread ----
  at::Tensor materialise(StateId state, const Geometry& geometry);
  c10::Device device_of(StateId state);
  void release(StateId state) noexcept { locked_.release(state); }

 private:
  class Scope;

  // What an op gets: fills uses_, and a call of it if it can be made again.
  OpUse describe(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs,
                 bool in_function);
  void fill_call(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs);

  const TapeRules rules_;
  const std::shared_ptr<ReplayStats> stats_;
  TensorBytes bytes_;
  LockedTape locked_;

  // The op that runs now.
  const OpInfo* op_ = nullptr;
  std::vector<TensorUse> uses_;
  std::vector<at::Tensor> written_;  // aliases: arguments do not outlive an op
};

}  // namespace memscale
