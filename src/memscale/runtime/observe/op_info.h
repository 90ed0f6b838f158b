#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "memscale/core/tape/tape_rules.h"

namespace memscale {

// What the dispatcher knows of an operator, looked up once.
struct OpInfo {
  std::string name;  // "aten::add.Tensor"
  bool random = false;
  bool mutates = false;
  bool opaque = false;  // not one of torch's own
  // It may write every tensor that it is given: Note [Unseen writes].
  bool may_write = false;
  bool ignored = false;  // bookkeeping of profilers
  // All its results are views of its arguments, and it writes nothing.
  bool is_view = false;
  // A view of which a tape has to know nothing but what it is a view of.
  bool is_mere_view = false;
  std::vector<std::size_t> written;  // arguments that the schema says it writes
  ReplayRules rules;
  // Arguments by place: running statistics, "training", the generator,
  // "accumulate", "transposed", "non_blocking".
  std::vector<std::size_t> statistics;
  std::optional<std::size_t> training;
  std::optional<std::size_t> generator;
  std::optional<std::size_t> accumulate;
  std::optional<std::size_t> transposed;
  std::optional<std::size_t> non_blocking;
  bool may_differ = false;  // when called again: see call_facts.h
  c10::OperatorHandle handle;

  // Whether calls on this backend decompose before autograd sees them.
  bool decomposes(c10::DispatchKey backend) const;
};

// The operator that a RecordFunction is about; nullptr if it is not one (a
// backward node, a custom Function, a user's range). Thread-safe; the result
// lives for ever.
const OpInfo* find_op_info(const at::RecordFunction& fn);

}  // namespace memscale
