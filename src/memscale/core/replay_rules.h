#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memscale/base/enum_names.h"

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
// Trace has them, and which of their outputs stay. A call whose ops differ is
// treated as Cheap from the first difference on.
struct KeepSet {
  std::vector<std::string> ops;
  std::vector<std::pair<std::size_t, std::size_t>>
      kept;  // (op, output), sorted

  bool keeps(std::size_t op, std::size_t output) const;
  // Throws PlanError if an index is out of order or out of range.
  void check() const;

  bool operator==(const KeepSet&) const = default;
};

// Whether both are the same op, in place or not, or both give the same bytes
// another shape: where torch may choose, it does so by what kinds of tensors
// there are, and a trace's are fakes.
bool is_same_op(std::string_view a, std::string_view b);

// What the tape of one layer's call is to do.
struct TapeRules {
  ReplayPolicy policy = ReplayPolicy::Keep;
  std::shared_ptr<const KeepSet> keep_set = nullptr;  // by policy
  std::size_t min_bytes = 0;  // smaller storages are kept
  // The device is taken for a CUDA card. (Those are known by themselves; this
  // lets another one stand in.)
  bool as_cuda = false;

  bool keeps_all() const {
    return policy == ReplayPolicy::Keep && keep_set == nullptr;
  }
};

// Borders between layers that a lineage may cross. A block's input comes
// through several modules in a row; more than this many are alive at once in
// backward.
inline constexpr std::uint32_t kMaxDepth = 8;

// Why a result is kept, for users.
inline constexpr char kUnordered[] = "sums in no fixed order";
inline constexpr char kBenchmarked[] =
    "cudnn.benchmark may choose another algorithm in backward";

// How much work is in an element of an op's results, by kind of op.
enum class Work {
  Little,       // a few passes over the bytes
  Much,         // whatever its arguments are
  Matmul,       // by the inner dimension: last of the argument `factor`
  Convolution,  // by the size of a filter: of the weight, the argument `factor`
};

// What is known of an operator by its name alone: "aten::add.Tensor".
struct ReplayRules {
  // Not to be called a second time: why. Empty if it may be.
  std::string_view never;
  // How much work is in an element of its results.
  Work work = Work::Little;
  std::size_t factor = 0;
  // Its kernel for the CPU is so slow that its results are worth keeping.
  bool slow_on_cpu = false;
  // The result that is indices into a plane of its first argument.
  std::optional<std::size_t> indices;
  // Makes memory that something the dispatcher cannot see may fill: raw
  // pointers, kernels of other libraries.
  bool is_factory = false;
  // Writes every element of the tensors it writes, and reads none of them.
  bool overwrites = false;
  // What it writes are random zeros and ones.
  bool draws_bits = false;
  // Updates running statistics that its other results do not depend on, if its
  // argument "training" is true or absent; the schema does not always tell.
  bool updates_statistics = false;
  // The order of its sums, or of its writes to one place, is not fixed: on any
  // device with several threads, on CUDA.
  bool unordered = false;
  bool unordered_on_cuda = false;
  // cuDNN chooses its algorithm, by timing them if benchmarks are on.
  bool is_convolution = false;
};

// What of the device decides whether an op gives the same bits twice.
struct ReplayTarget {
  bool on_cuda = false;
  bool benchmarks = false;  // torch.backends.cudnn.benchmark
};

// Why an op of this kind may give other bits when it is called again there;
// null: it does not. `transposed`: a convolution that is.
const char* why_not_on(const ReplayTarget& target, const ReplayRules& rules,
                       bool transposed);

ReplayRules find_replay_rules(std::string_view name);

// Whether a result is worth keeping under ReplayPolicy::Cheap: so many
// multiplications went into each of its elements, of so many bytes. Below the
// bound, a product costs no more than reading and writing its bytes a few
// times: attention's scores, narrow and depthwise convolutions.
constexpr bool is_worth_keeping(std::int64_t multiplications,
                                std::int64_t element_bytes) {
  return 2 * multiplications >= 64 * element_bytes;
}

}  // namespace memscale
