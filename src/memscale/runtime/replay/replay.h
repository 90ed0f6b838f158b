#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "memscale/core/time/op_times.h"
#include "memscale/runtime/observe/leaf_ops.h"
#include "memscale/runtime/record/recorder.h"
#include "memscale/runtime/replay/op_timer.h"
#include "memscale/runtime/replay/replay_stats.h"
#include "memscale/runtime/replay/saved_tensor.h"
#include "memscale/runtime/replay/tensor_tape.h"

namespace memscale {

// Recomputation of one model's layers, op by op.
//
// A call of the model is enter(), then enter_layer() and leave_layer() as its
// layers run, then leave(); meanwhile autograd's saved-tensor hooks are pack()
// and SavedTensor::unpack(). Which tape an op goes to: ModelCall.
//
// Any number of threads may call the model; each call belongs to the thread
// that entered. Ops of other threads are not seen, and their results are kept.
class Replay final : public std::enable_shared_from_this<Replay> {
 public:
  // `layers`: what to do in each; the first is the model itself, outside of
  // the others.
  Replay(c10::Device device, std::vector<TapeRules> layers);
  ~Replay();

  // As many as before. Calls that have begun go on as they began.
  void set_layers(std::vector<TapeRules> layers);

  // From the next call on, add how long its ops take to `times`; null: don't.
  // Waits for calls that were timed.
  void time_ops(std::shared_ptr<OpTimes> times);

  // From the next call of this thread on, the recorder is told of layers, saves
  // and results; null: nobody is. See Note [A replayed step, recorded].
  void record(std::shared_ptr<Recorder> recorder);

  // False: this call is left alone (nothing to differentiate, or the thread is
  // in a call of a model already). Then leave() must not be called either.
  bool enter();
  // With what the call returns: its caller is taken to hold it until backward.
  void leave(const std::vector<at::Tensor>& outputs);
  // This thread is not training now: it is observed only if graphs are alive
  // that rest on what may be written.
  static void rest();
  // Of the call that this thread is in; nothing happens if it is in none.
  void enter_layer(std::size_t layer);
  void leave_layer();
  // Around a part that is compiled: its ops are the compiler's, and no tape
  // sees them.
  void enter_compiled();
  void leave_compiled();
  // Whether this thread is in a call of this model.
  bool is_entered() const;

  std::shared_ptr<SavedTensor> pack(const at::Tensor& tensor);
  // The object that autograd calls for pack(), if it is one of Python's: told
  // apart from hooks of others, never called.
  void set_pack_hook(const void* hook) { pack_hook_ = hook; }

  // A storage is about to be resized by hand, which no op tells. Any thread.
  static void before_resize(const StoragePtr& storage);

  ReplayStats& stats() { return *stats_; }

  struct Call;

 private:
  struct OpContext;
  static std::unique_ptr<at::ObserverContext> on_start(
      const at::RecordFunction& fn);
  static void on_end(const at::RecordFunction& fn,
                     at::ObserverContext* context);
  static std::unique_ptr<at::ObserverContext> begin_function(
      const at::RecordFunction& fn);
  static void end_function(OpContext& context);
  static void before_function_backward();

  const LeafOps leaf_ops_;
  OpTimer timer_;
  // Replaced, never changed: calls of other threads read the one they have.
  using Layers = std::shared_ptr<const std::vector<TapeRules>>;
  struct Settings {
    Layers layers;
    std::shared_ptr<OpTimes> times;
    std::shared_ptr<Recorder> recorder;
  };
  Settings settings() const;

  mutable std::mutex mutex_;  // of settings_
  Settings settings_;
  const std::shared_ptr<ReplayStats> stats_;
  const void* pack_hook_ = nullptr;
};

}  // namespace memscale
