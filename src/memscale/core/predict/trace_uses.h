#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "memscale/base/ids.h"
#include "memscale/core/tape/op_use.h"
#include "memscale/core/tape/tape_rules.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

// What a trace tells a tape of its forward ops, as they would be called on a
// target: the CPU or not, and a ReplayTarget.
class TraceUses final {
 public:
  TraceUses(const Trace& trace, bool on_cpu, const ReplayTarget& target)
      : trace_(trace), on_cpu_(on_cpu), target_(target) {}

  // Spans are valid until the next call.
  OpUse of(OpId op);
  std::span<const TensorUse> results_of(OpId op);
  std::span<const TensorUse> values(std::span<const ValueId> values);

  static StorageKey key(StorageId storage) {
    return storage.valid() ? storage.index() + 1 : 0;
  }
  static StorageId storage(StorageKey key) {
    return StorageId(static_cast<std::size_t>(key - 1));
  }

 private:
  TensorUse use_of(ValueId value) const;
  const ReplayRules& rules_of(std::string_view name);

  const Trace& trace_;
  const bool on_cpu_;
  const ReplayTarget target_;
  std::unordered_map<std::string_view, ReplayRules> rules_;
  std::vector<TensorUse> uses_;
};

// Which version each storage has while the forward ops of a trace run, as
// tapes see it.
class TraceVersions final {
 public:
  explicit TraceVersions(const Trace& trace)
      : trace_(trace), versions_(trace.storages.size()) {}

  std::uint32_t of(StorageId storage) const {
    return versions_[storage.index()];
  }
  void begin_op(const OpUse& use);
  void end_op(OpId op, const OpUse& use);
  // What a custom Function was given is another version when it is through.
  void leave_function(std::span<const TensorUse> tensors);

 private:
  std::uint32_t& of(const TensorUse& tensor) {
    return versions_[TraceUses::storage(tensor.storage).index()];
  }

  const Trace& trace_;
  std::vector<std::uint32_t> versions_;  // by storage
};

}  // namespace memscale
