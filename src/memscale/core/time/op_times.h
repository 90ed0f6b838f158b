#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "memscale/core/time/cost_model.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

// An op of forward that ran, and how long, as the calling thread sees it.
struct TimedOp {
  std::size_t layer = 0;  // its place among the model's layers
  std::string name;       // as in a trace
  std::int64_t nanoseconds = 0;
};

// How long the ops of real calls took, to put into the trace of such a call.
// Only of devices that compute while they are called. Thread-safe.
class OpTimes final {
 public:
  // What one call ran. Of each op the shortest time counts: whatever else the
  // machine did meanwhile, it took no less.
  void add_call(std::span<const TimedOp> ops);

  // The same step with Op::nanoseconds: as measured, for the forward ops of
  // layers that ran just what the trace has; ops that do the same work get the
  // same time, the shortest. All others get `cost`'s, scaled by what the
  // measured ones took over what it says of them. `layers`: their names.
  // Unchanged if nothing was measured.
  Trace applied_to(const Trace& trace, const CostModel& cost,
                   std::span<const std::string> layers) const;

 private:
  struct Layer {
    std::vector<std::string> names;
    std::vector<std::int64_t> nanoseconds;
    bool varies = false;  // not the same ops in each call
  };
  std::vector<std::int64_t> measured(const Trace& trace,
                                     std::span<const std::string> layers) const;

  mutable std::mutex mutex_;
  std::map<std::size_t, Layer> layers_;
};

}  // namespace memscale
