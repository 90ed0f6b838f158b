#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/base/ids.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

// Writes a Trace as a step goes by: what exists before it, then ops in order,
// and between them frees, saves and releases. Not thread-safe: the recorder
// holds a lock.
class TraceBuilder final {
 public:
  LayerId add_layer(std::string name);

  // Bytes that are there before the step.
  StorageId add_resident(Bytes bytes, Place place, Category category,
                         LayerId layer);
  // Bytes made by the op that is running, or by the last one that did.
  StorageId add_storage(Bytes bytes, Place place);
  // The id of an equal value, or of a new one. `version` is set here.
  ValueId add_value(Value value);

  // Ops do not nest. The layer and phase are those set below.
  OpId begin_op(Op op);
  void end_op(std::vector<ValueId> outputs);
  // What the running op's kernel was seen to take beside its outputs.
  void set_workspace(Bytes bytes);
  // The running op was not one to record. It must have made nothing.
  void cancel_op();
  bool op_is_running() const { return running_; }
  // The op that runs or ran last; invalid before the first.
  OpId last_op() const;

  // A write into the storage: later values of it are of a new version.
  void bump_version(StorageId storage);
  std::uint32_t version(StorageId storage) const;
  // The storage is this large now (resize_, out=).
  void grow(StorageId storage, Bytes bytes);

  // No tensor holds the storage any more. `after`: the last op that needed it,
  // if that is known better than "the last one that ran". `let_go_known`:
  // unless it was told before, the program held it until now.
  void free(StorageId storage, OpId after = {}, bool let_go_known = true);

  // From now on only saves hold the storage.
  void let_go(StorageId storage);
  // The model's call returns it.
  void set_returned(StorageId storage);
  // The program, as it is traced, lets go of it sooner than it would otherwise.
  void forget(StorageId storage);
  bool is_forgotten(StorageId storage) const;
  // Now it would have let go of all that was forgotten.
  void end_forgotten();

  // The gradient of the op that runs (or ran last) needs the value.
  // `by_function`: it is a custom Function's.
  std::size_t add_save(ValueId value, bool by_function = false);
  void release_save(std::size_t save);

  void set_phase(Phase phase) { phase_ = phase; }
  Phase phase() const { return phase_; }
  void set_layer(LayerId layer) { layer_ = layer; }
  // The layer of what follows, until it is left again. In forward the trace has
  // an event for it. leave_layer() is false if none was entered.
  void enter_layer(LayerId layer, bool no_grad = false);
  bool leave_layer();
  // Outside of all layers, which were not left.
  void leave_all_layers();
  // A custom Function begins or ends in forward; it may write these.
  void add_function(Event::Kind kind, std::vector<ValueId> values);
  LayerId layer() const { return layer_; }
  void set_category(StorageId storage, Category category);
  // In the optimizer's step this storage, of a parameter or its gradient,
  // stands for one of each of these parameters.
  void set_stands_for(StorageId storage, std::vector<StorageId> parameters);
  // What the optimizer made and keeps for `parameter` and those that it stands
  // for: one each, in their layers, there before the step and after.
  void make_state(StorageId storage, StorageId parameter);
  void add_note(std::string note);
  void set_saves_unknown() { trace_.saves_known = false; }

  const Trace& trace() const { return trace_; }
  // For core/trace/repeat.cpp, which appends whole layers.
  Trace& mutable_trace() { return trace_; }
  void index_values_from(std::size_t first_value);

  // The trace, with activations told from transients. The builder is empty
  // afterwards.
  Trace finish();

 private:
  void add_event(Event event);
  void multiply_foreach_temporaries();
  void tell_activations();

  Trace trace_;
  Phase phase_ = Phase::Forward;
  LayerId layer_;
  std::vector<LayerId> outer_layers_;
  bool running_ = false;
  std::vector<std::uint32_t> versions_;      // by storage
  std::vector<std::vector<ValueId>> views_;  // by storage
  std::unordered_map<StorageId, std::vector<StorageId>> stands_for_;
  std::vector<StorageId> forgotten_;
};

}  // namespace memscale
