#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "memscale/core/trace/repeat.h"
#include "memscale/core/trace/trace.h"
#include "memscale/core/trace/trace_builder.h"
#include "memscale/runtime/observe/leaf_ops.h"

namespace memscale {

// Sees every op of a step, real or fake, and writes it into a core::Trace.
//
// Between start() and stop() it observes the calling thread and the threads on
// which autograd continues its work (torch hands thread-local observers on).
// Other threads are not seen; two threads may each have a recorder of their
// own. It reads metadata only: no op is called from a callback, and on fake
// tensors nothing enters Python. Methods may be called from any thread.
// What counts as an op: Note [Leaf ops].
//
// Note [When a storage dies]
// Nothing tells us: before each op the recorder looks, through weak pointers,
// at every storage that may have died since the last one. Storages that only
// saves hold are not looked at; a SaveHandle reports its own end. So few are
// left to look at, and a storage's address is never taken for another's.
class Recorder final : public c10::DebugInfoBase,
                       public std::enable_shared_from_this<Recorder> {
 public:
  // Whether a tensor that has a Python subclass is a fake one, to be recorded
  // as if it were real. Called without the GIL; must not throw.
  using IsFake = bool (*)(const c10::TensorImpl&);

  // `fake_run`: all tensors are fakes, and no kernel really runs.
  static std::shared_ptr<Recorder> make(c10::Device device, IsFake is_fake,
                                        bool fake_run);
  ~Recorder() override;

  // Observe this thread from now on; throws TraceError if another recorder
  // does. stop() must come from the same thread.
  void start();
  void stop();
  // Record nothing more, from whatever thread; the threads that are observed
  // may be observed by another recorder from now on.
  void abandon();
  // Whether saves are pending: a backward is still to come.
  bool has_saves();

  // ---- what the caller knows and the dispatcher does not ----
  LayerId add_layer(std::string name);
  // A tensor that exists before the step.
  void add_resident(const at::Tensor& tensor, Category category, LayerId layer);
  void enter_layer(LayerId layer);
  void leave_layer();
  void set_phase(Phase phase);
  Phase phase();
  void set_category(const at::Tensor& tensor, Category category);
  // The model's call returns it.
  void set_returned(const at::Tensor& tensor);
  // The caller lets go of it sooner than the program would, which does so at
  // end_forgotten(), with all others.
  void forget(const at::Tensor& tensor);
  void end_forgotten();

  // ---- the optimizer's step, on one parameter of each kind ----
  // This parameter (or its gradient) stands for one of each of these.
  void set_stands_for(const at::Tensor& tensor,
                      const std::vector<at::Tensor>& parameters);
  // A tensor that the optimizer made and keeps for this parameter, and for each
  // that it stands for: there before the step as well.
  void set_state(const at::Tensor& tensor, const at::Tensor& parameter);
  void add_note(std::string note);
  void set_saves_unknown();

  // While paused, ops of any thread go unrecorded (our own, on fake tensors).
  void pause() { ++paused_; }
  void resume() { --paused_; }

  // From now on `stand_in` is, to the recorder, the storage of `tensor`.
  void bind_same(const at::Tensor& stand_in, const at::Tensor& tensor);

  // ---- recomputation: a checkpointed layer, recorded as if it were not ----
  // Until end_recompute(), ops are those of the call's forward once more: they
  // are not recorded, and what they make is bound to what the first ones made.
  void begin_recompute(const LayerCall& call);
  void end_recompute();

  // ---- saves ----
  struct Saved {
    std::size_t save;
    at::Tensor tensor;  // undefined if it is not to be held
    std::size_t references;
  };
  // `hold`: the caller holds the tensor for autograd, until release().
  Saved save(const at::Tensor& tensor, bool hold);
  void release(std::size_t save, std::size_t references) noexcept;
  // From now on `tensor` is, to the recorder, what was saved.
  void bind_saved(std::size_t save, const at::Tensor& tensor);

  // ---- equal layers: see core/trace/repeat.h ----
  // A call that is traced: between begin and end, its forward.
  LayerCall begin_call(LayerId layer, const std::vector<at::Tensor>& parameters,
                       const std::vector<at::Tensor>& inputs);
  void end_call(LayerCall& call);
  // After its backward. Gradients by parameter; undefined: it has none.
  void find_backward(LayerCall& call, const std::vector<at::Tensor>& gradients);
  // A call that is copied. Tensors that stand for its results are bound to
  // them: the place-th storage that the forward made.
  LayerCall repeat_forward(const LayerCall& model, LayerId layer,
                           const std::vector<at::Tensor>& parameters,
                           const std::vector<at::Tensor>& inputs);
  std::optional<std::size_t> place_of(const LayerCall& call,
                                      const at::Tensor& tensor);
  void bind_result(const LayerCall& call, std::size_t place,
                   const at::Tensor& tensor);
  void repeat_backward(const LayerCall& model, LayerCall& call,
                       const at::Tensor& gradient);
  void bind_gradient(const LayerCall& call, const at::Tensor& gradient);
  void close_repeat(const LayerCall& model, const LayerCall& call);
  std::optional<std::string> difference(const LayerCall& a, const LayerCall& b);

  // The trace so far, finished. The recorder must be stopped.
  Trace finish();

  // ---- a step that runs under replay: recorded as if it were plain ----
  // Note [A replayed step, recorded]
  // Replay drops saved tensors, holds others for longer than the program
  // would, and calls ops again. None of that is in the trace: ops of a tape go
  // unobserved, what a save gives back is bound to what was saved, and a
  // storage that the program let go of in forward ends with its last save.
  // Where replay held a storage all the way to its last save, nobody can tell
  // when the program let go of it: that is left open (see StepSchedule).
  void set_replayed();
  // Whether it observes this thread.
  bool observes_here() const;

 private:
  struct OpContext;
  struct Watched {
    c10::weak_intrusive_ptr<c10::StorageImpl> impl;
    StorageId storage;
  };
  // What stands behind one StorageId at run time.
  struct Holders {
    std::uint32_t impls = 0;     // watched StorageImpls bound to it
    std::uint32_t saves = 0;     // pending
    std::size_t references = 0;  // of those saves, to its StorageImpl
    OpId last_needed;            // see TraceBuilder::free
    OpId released;               // the op after which the last save ended
  };

  Recorder(c10::Device device, IsFake is_fake, bool fake_run);

  static std::unique_ptr<at::ObserverContext> on_start(
      const at::RecordFunction& fn);
  static void on_end(const at::RecordFunction& fn,
                     at::ObserverContext* context);

  template <typename F>
  void guarded(const F& work) noexcept;
  void begin_op(const OpInfo& info, const at::RecordFunction& fn,
                OpContext& context);
  void end_op(const at::RecordFunction& fn, OpContext& context);
  void begin_function(const std::vector<at::Tensor>& arguments);
  void end_function(const std::vector<at::Tensor>& arguments);
  void add_function(Event::Kind kind, const std::vector<at::Tensor>& arguments);
  void cancel_op();
  void bind_lifted(const at::RecordFunction& fn);
  void end_recomputed_op(const at::RecordFunction& fn, const OpInfo& info,
                         const std::vector<at::Tensor>& arguments);
  void begin_node(std::int64_t sequence_number);

  // Whether it is one block of bytes that is its own: not sparse, not a
  // wrapper.
  bool has_own_bytes(const c10::TensorImpl& tensor) const;
  StorageId storage_id(const c10::TensorImpl& tensor);
  ValueId value_id(const at::Tensor& tensor);
  std::vector<ValueId> value_ids(std::span<const c10::IValue> values);
  void watch(c10::StorageImpl* impl, StorageId storage);
  void find_dead();
  void maybe_free(StorageId storage);
  void unpin(StorageId storage);  // one save fewer
  // Nothing is recorded any more: hold no tensor of the program.
  void let_go_of_all();
  Holders& holders(StorageId storage);
  static bool is_in_function();  // whether this thread is in a custom one
  bool accumulates_in_place(const at::RecordFunction& fn) const;
  bool fills_new_zeros(const OpInfo& info, const Op& op) const;
  LayerCall new_call(LayerId layer, const std::vector<at::Tensor>& parameters,
                     const std::vector<at::Tensor>& inputs);
  void bind(const at::Tensor& tensor, StorageId storage);

  const c10::Device device_;
  const LeafOps leaf_ops_;
  const IsFake is_fake_;
  const bool is_fake_run_;
  std::mutex mutex_;
  TraceBuilder builder_;
  std::atomic<int> paused_{0};
  std::atomic<bool> is_abandoned_{false};
  bool finished_ = false;
  bool replayed_ = false;
  std::string failure_;  // what ended the recording; empty: nothing did
  std::optional<at::CallbackHandle> handle_;

  std::unordered_map<const c10::StorageImpl*, StorageId> storage_ids_;
  std::vector<Watched> watched_;
  std::unordered_map<StorageId, std::vector<Watched>> parked_;  // saved ones
  std::vector<at::Tensor> residents_;  // so that no address is used again
  std::vector<Holders> holders_;       // by StorageId
  std::vector<StorageId> hinted_;      // that have a last_needed

  // Autograd numbers its nodes as it makes them: from these a backward node
  // finds the layer and the op that made it.
  struct Numbered {
    std::uint64_t number;
    LayerId layer;
    OpId op;
  };
  std::vector<Numbered> numbered_;
  OpId node_op_;  // that made the backward node which runs or ran last
  std::thread::id forward_thread_;
  // The ops that are being recomputed: those that are still to come.
  std::optional<IdRange> recomputed_;
};

// A save as the recorder knows it, for as long as autograd has it.
class RecordedSave final {
 public:
  // `hold`: as for Recorder::save().
  RecordedSave(std::shared_ptr<Recorder> recorder, const at::Tensor& tensor,
               bool hold);
  ~RecordedSave();
  RecordedSave(const RecordedSave&) = delete;
  RecordedSave& operator=(const RecordedSave&) = delete;

  // Undefined if it is not held.
  const at::Tensor& tensor() const { return saved_.tensor; }
  void bind(const at::Tensor& tensor) const;

 private:
  std::shared_ptr<Recorder> recorder_;
  Recorder::Saved saved_;
};

}  // namespace memscale
