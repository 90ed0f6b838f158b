#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "memscale/base/ids.h"
#include "memscale/core/trace/trace.h"
#include "memscale/core/trace/trace_builder.h"

// Equal layers need not be traced again.
//
// Of a row of equal layers the first two and the last two are traced; those
// between are copied: their forward ops from the second layer, their backward
// ops from the last but one, whose backward runs before theirs. Afterwards the
// second layer's own backward is compared with the copied one, and the last
// layers' forward with the copied one: a row whose layers turn out to differ
// is traced again, all of it.

namespace memscale {

// A half-open range of ids.
struct IdRange {
  std::size_t begin = 0;
  std::size_t end = 0;

  std::size_t size() const { return end - begin; }
  bool contains(std::size_t id) const { return begin <= id && id < end; }
  bool operator==(const IdRange&) const = default;
};

// What one call of a layer added to the trace.
struct Section {
  IdRange ops;
  IdRange storages;
  IdRange saves;
  IdRange events{};
};

struct LayerCall {
  LayerId layer;
  std::vector<StorageId> parameters;  // and buffers, in a fixed order
  std::vector<StorageId> inputs;      // of the tensors passed in, in order
  Section forward;
  std::optional<Section> backward;
  // Known with `backward`. The gradient that came in, and the one that goes
  // out to the layer's input (it may be the same storage).
  StorageId gradient_in;
  StorageId gradient_out;
  std::vector<StorageId> parameter_gradients;  // by parameter; may be invalid
};

// Appends a copy of model's forward for another layer: `next` brings layer,
// parameters and inputs, and gets its forward section.
void repeat_forward(TraceBuilder& builder, const LayerCall& model,
                    LayerCall& next);

// The ops of the layer's backward: those that carry its id in the backward
// phase. They must be without a gap and take in one gradient; if not, throws
// TraceError saying why. `parameter_gradients` must be set before.
void find_backward(const Trace& trace, LayerCall& call);

// Appends a copy of model's backward for `next`, whose incoming gradient is
// `gradient_in`; fills its backward, gradient_out and parameter_gradients.
// Returns the storages that are held from outside (inputs, the incoming
// gradient) and that the layer's backward is the last to need, each with the op
// that does. Throws TraceError if one of them is gone already: then the model
// held it in a way that the copy does not.
struct LastNeed {
  StorageId storage;
  OpId op;
};
std::vector<LastNeed> repeat_backward(TraceBuilder& builder,
                                      const LayerCall& model, LayerCall& next,
                                      StorageId gradient_in);

// After the step: storages of `copy` that outlived its backward are let go
// where the model's were (autocast's cached weights, at the end of forward).
void close_repeat(TraceBuilder& builder, const LayerCall& model,
                  const LayerCall& copy);

// What differs between two calls that should be alike, forward and (if both
// have it) backward; nothing if they are.
std::optional<std::string> difference(const Trace& trace, const LayerCall& a,
                                      const LayerCall& b);

}  // namespace memscale
