#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "memscale/core/ops/op_table.h"

namespace memscale {

// Why a result is kept, for users.
inline constexpr char kUnordered[] = "sums in no fixed order";
inline constexpr char kBenchmarked[] =
    "cudnn.benchmark may choose another algorithm in backward";

// What replay has to know of one operator: "aten::add.Tensor". The facts of its
// row (see OpRow), as they hold for this overload, in place or not.
struct ReplayRules {
  std::string_view never;  // empty: it may be called again
  Work work = Work::Little;
  std::size_t factor = 0;
  bool slow_on_cpu = false;
  std::optional<std::size_t> indices;
  bool is_factory = false;
  bool overwrites = false;
  // What it writes are random zeros and ones.
  bool draws_bits = false;
  bool updates_statistics = false;
  bool unordered = false;
  bool unordered_on_cuda = false;
  bool is_convolution = false;
  bool fills_zeros = false;
};

ReplayRules find_replay_rules(std::string_view name);

// What of the device decides whether an op gives the same bits twice.
struct ReplayTarget {
  bool on_cuda = false;
  bool benchmarks = false;  // torch.backends.cudnn.benchmark
};

// Why an op of this kind may give other bits when it is called again there;
// null: it does not. `transposed`: a convolution that is.
const char* why_not_on(const ReplayTarget& target, const ReplayRules& rules,
                       bool transposed);

// Whether both are the same op, in place or not: torch chooses among those by
// what kinds of tensors there are, and a trace's tensors are fakes.
bool is_same_op(std::string_view a, std::string_view b);

// Whether a result is worth keeping under ReplayPolicy::Cheap: so many
// multiplications went into each of its elements, of so many bytes. Below the
// bound, a product costs no more than reading and writing its bytes a few
// times: attention's scores, narrow and depthwise convolutions.
constexpr bool is_worth_keeping(std::int64_t multiplications,
                                std::int64_t element_bytes) {
  return 2 * multiplications >= 64 * element_bytes;
}

}  // namespace memscale
