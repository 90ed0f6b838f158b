#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memscale/base/enum_names.h"
#include "memscale/core/ops/replay_rules.h"

namespace memscale {

// What a layer keeps of the tensors that its forward makes; the rest is
// computed again in backward, op by op. All give the same bits.
enum class ReplayPolicy {
  Keep,   // everything, as without MemScale
  Cheap,  // what costs much per byte: matmul, attention, convolution
  Block,  // nothing but the layer's inputs
};

template <>
struct EnumNames<ReplayPolicy> {
  static constexpr std::string_view kWhat = "replay policy";
  static constexpr ReplayPolicy kLast = ReplayPolicy::Block;
  static constexpr std::array kTable = {
      EnumName{ReplayPolicy::Keep, "keep"},
      EnumName{ReplayPolicy::Cheap, "cheap"},
      EnumName{ReplayPolicy::Block, "block"},
  };
};

// One layer's choice, output by output: the ops of its forward in order, as a
// Trace has them, and which of their outputs stay. A call whose ops differ goes
// on by TapeRules::after_difference.
//
// Note [Ops of a keep set]
// Ops are compared that make or write bytes, in place or not. Views are left
// out, on both sides: which of view, _unsafe_view and _reshape_alias torch
// calls, and whether it detaches or lifts a tensor, depends on what kinds of
// tensors there are, and those of a trace are fakes. So are ops that return no
// tensor: a trace may know a number that a real step has to ask for.
struct KeepSet {
  std::vector<std::string> ops;
  std::vector<std::pair<std::size_t, std::size_t>>
      kept;  // (op, output), sorted

  bool keeps(std::size_t op, std::size_t output) const;
  // Where the op of that name is, if nothing that makes bytes comes between
  // `first` and it; the number of ops, if it is not there.
  std::size_t find(std::string_view name, std::size_t first) const;
  // Throws PlanError if an index is out of order or out of range.
  void check() const;

  bool operator==(const KeepSet&) const = default;
};

// What the tape of one layer's call is to do.
struct TapeRules {
  ReplayPolicy policy = ReplayPolicy::Keep;
  std::shared_ptr<const KeepSet> keep_set = nullptr;  // by policy
  std::size_t min_bytes = 0;  // smaller storages are kept
  // The device is taken for a CUDA card. (Those are known by themselves; this
  // lets another one stand in.)
  bool as_cuda = false;
  // What is kept of a call that has run other ops than its keep set knows, from
  // the first difference on. Block where less memory matters most: under a
  // budget.
  ReplayPolicy after_difference = ReplayPolicy::Cheap;

  bool keeps_all() const {
    return policy == ReplayPolicy::Keep && keep_set == nullptr;
  }
};

// Borders between layers that a lineage may cross. A block's input comes
// through several modules in a row; more than this many are alive at once in
// backward.
inline constexpr std::uint32_t kMaxDepth = 8;

}  // namespace memscale
