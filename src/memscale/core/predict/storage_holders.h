#pragma once

#include <cstdint>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/base/ids.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

// Counts who holds each storage of a trace that is being written, op by op: one
// whose last holder goes is freed with the op that was written last. Storages
// that were there before the step are nobody's to free.
class StorageHolders final {
 public:
  // Of all storages that the trace has; they are held by nobody yet.
  explicit StorageHolders(Trace& trace)
      : trace_(trace), counts_(trace.storages.size()) {}

  // A new storage, made by the last op, with one holder.
  StorageId make(Bytes bytes, Place place, Category category, LayerId layer) {
    const StorageId id(trace_.storages.size());
    trace_.storages.push_back({.bytes = bytes,
                               .place = place,
                               .category = category,
                               .layer = layer,
                               .born = last_op()});
    counts_.push_back(1);
    return id;
  }
  void hold(StorageId id) { ++counts_[id.index()]; }
  void drop(StorageId id) {
    if (--counts_[id.index()] > 0) return;
    Storage& storage = trace_.storages[id.index()];
    if (storage.born.valid()) storage.freed = last_op();
  }
  bool is_held(StorageId id) const {
    return counts_[id.index()] > 0 || !trace_.at(id).born.valid();
  }

 private:
  OpId last_op() const { return OpId(trace_.ops.size() - 1); }

  Trace& trace_;
  std::vector<std::uint32_t> counts_;  // by storage
};

}  // namespace memscale
