#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "memscale/base/ids.h"
#include "memscale/core/predicted_tape.h"
#include "memscale/core/replay_rules.h"
#include "memscale/core/step_schedule.h"
#include "memscale/core/trace.h"

namespace memscale {

// runtime/replay.h without tensors: a call of the model, whose ops go to the
// tape of the layer that they are of. Two calls of one layer in a row, with no
// op of another between, are taken for one: a trace does not tell them apart.
class PredictedCall final {
 public:
  PredictedCall(std::span<const TapeRules> layers, const StepSchedule& schedule,
                PredictedStep& step);

  // Ops of forward, in order; each is the last of the trace that is written.
  // Before an op is written there, its layer is entered.
  void enter(LayerId layer);
  void run(OpId op);
  bool is_entered() const { return layer_.valid(); }
  // With what the model returns: its caller is taken to hold it.
  void leave(std::span<const StorageId> outputs);

 private:
  struct Claim {
    PredictedTape* tape;
    PredictedTape::StateId state;
  };

  PredictedTape* open_tape();
  void close_tape();
  void before_writes(const Op& op);
  void add_history(OpId op);
  void save(std::size_t save);

  const std::span<const TapeRules> layers_;
  const StepSchedule& schedule_;
  PredictedStep& step_;
  const LayerTree tree_;
  LayerId layer_;
  PredictedTape* tape_ = nullptr;  // the open one
  std::vector<std::unique_ptr<PredictedTape>> tapes_;
  // Storages that closed tapes hold, or would replay.
  std::unordered_map<StorageId, std::vector<Claim>> claims_;
};

}  // namespace memscale
