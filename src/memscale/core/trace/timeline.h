#pragma once

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/base/ids.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

using BytesByCategory = std::array<Bytes, kNumCategories>;

// What is held while one op runs: all that lived before it, what it makes, and
// its workspace (a transient).
struct Instant {
  OpId op;
  Bytes bytes;
  BytesByCategory by_category;
};

// Bytes held by one layer (or, if the id is invalid, outside of all layers).
struct LayerShare {
  LayerId layer;
  Bytes bytes;
  BytesByCategory by_category;
};

// Bytes over a step, op by op, in one place, as its allocator hands them out:
// each storage rounded up to a multiple of `granularity` (512 B on
// accelerators, 1 on the CPU), and so is each workspace. Holds a copy of
// nothing: the trace must outlive it. Throws TraceError if the trace does not
// pass its check(), or if the granularity is not from 1 byte to 1 GiB.
class Timeline final {
 public:
  Timeline(const Trace& trace, Place place, Bytes granularity);
  Timeline(Trace&&, Place, Bytes) = delete;

  const Trace& trace() const { return *trace_; }

  // One for each op, in order.
  std::span<const Instant> instants() const { return instants_; }

  // The first instant with the most bytes; of a phase, if given. Nothing if
  // there is no such op.
  std::optional<Instant> peak() const;
  std::optional<Instant> peak(Phase phase) const;

  // Held between steps, when no op runs: parameters, buffers, inputs,
  // optimizer state; gradients only if the step begins with them.
  Bytes resident() const { return resident_; }

  // Who holds what while `op` runs, most bytes first (ties: by layer, outside
  // of all layers last). Sums to instants()[op].bytes; the op's workspace
  // belongs to its layer.
  std::vector<LayerShare> by_layer(OpId op) const;

  // The storages held while `op` runs, largest first (ties: by id).
  std::vector<StorageId> held(OpId op) const;

  // What the allocator hands out for a storage of this size.
  Bytes rounded(Bytes bytes) const { return round_up(bytes, granularity_); }

 private:
  bool is_held(const Storage& storage, OpId op) const;
  Bytes charged(const Storage& storage) const;  // rounded, for all alike
  Bytes workspace(const Op& op) const;  // rounded; nothing but on the device

  const Trace* trace_;
  Place place_;
  Bytes granularity_;
  Bytes resident_;
  std::vector<Instant> instants_;
};

}  // namespace memscale
