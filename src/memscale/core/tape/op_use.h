#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "memscale/core/tape/tape_rules.h"
#include "memscale/core/tape/why.h"
#include "memscale/core/trace/trace.h"

// What a tape has to know of one call of an operator. It is filled from tensors
// while a model trains (runtime) and from a trace (core/predict): whatever is
// decided from it is decided once.

namespace memscale {

// Which storage, and which tensor: numbers that only TapeBytes understands.
// No storage has the key 0.
using StorageKey = std::uint64_t;
using TensorKey = std::uint64_t;

struct TensorUse {
  StorageKey storage = 0;  // 0: there is no tensor, or not a plain one
  TensorKey tensor = 0;
  std::int64_t bytes = 0;  // of the storage
  Access access = Access::Read;
  bool is_leaf = false;     // no op that autograd knows made it
  bool is_foreign = false;  // its memory is not torch's own
  // Something happens to it as soon as it has its gradient: an optimizer that
  // steps in backward.
  bool changes_in_backward = false;
  bool on_cpu = false;
  // Bytes of an element, if it is of 16 to 64 bits and floating; otherwise 0.
  std::uint8_t float_bytes = 0;
};

// What decides, beside the operator, whether a call can be repeated.
struct CallFacts {
  bool in_function = false;       // inside a custom autograd Function
  bool in_mode = false;           // under a TorchDispatchMode
  bool has_all_arguments = true;  // as many as the schema has
  bool all_plain = true;          // each tensor is a view of bytes of its own
  bool accumulates = false;       // its argument `accumulate` is true
  bool transposed = false;        // its argument `transposed` is true
  bool not_waited_for = false;    // copies from a device to the host, async
};

// Why such a call must not be repeated on that target. Replayed: it may be.
Why why_not(const ReplayRules& rules, const CallFacts& facts,
            const ReplayTarget& target);

// The argument whose shape tells how much work is in a product.
struct Factor {
  std::span<const std::int64_t> sizes;
  std::int64_t element_bytes;
};

// Whether the results are worth keeping for the work that is in them. `factor`:
// the argument ReplayRules::factor, if it is a tensor.
bool is_expensive(const ReplayRules& rules, bool on_cpu,
                  const std::optional<Factor>& factor);

// Whether a tensor of these strides reaches each of so many bytes, once.
bool covers(std::span<const std::int64_t> sizes,
            std::span<const std::int64_t> strides, std::int64_t offset,
            std::int64_t element_bytes, std::int64_t bytes);

struct OpUse {
  std::string_view name;
  const ReplayRules* rules = nullptr;
  Why why = Why::Replayed;  // it must not be repeated
  bool expensive = false;
  bool is_view = false;  // by its schema it returns views, and writes nothing
  bool holds = true;     // see Note [Held when read]
  std::span<const TensorUse> tensors;
};

}  // namespace memscale
