#include <algorithm>

#include "memscale/core/ops/workspace/formulas.h"

// Recurrent layers: oneDNN's LSTM and the simulated device's cells.

namespace memscale::scratch {
namespace {

constexpr Int kRest = 568;  // bytes, measured whatever the shape

Int pages(Int elements) { return up(elements * kFloat, kPage); }

// oneDNN's get_good_ld: whole cache lines, but no multiple of 1 KiB.
Int padded_row(Int elements) {
  const Int lines = up(elements, 16);
  return lines % 256 == 0 ? lines + 16 : lines;
}

// One layer in float32: input (steps, batch, features).
struct Lstm {
  Int steps, batch, features, hidden;
  explicit Lstm(const Call& call)
      : steps(call.in.at(0).size(0)),
        batch(call.in.at(0).size(1)),
        features(call.in.at(0).size(2)),
        hidden(call.in.at(2).size(1)) {}

  Int weights() const {
    return (features + hidden) * padded_row(4 * hidden) * kFloat;
  }
  Int gates() const { return pages(steps * batch * padded_row(4 * hidden)); }
  Int state() const { return pages(batch * padded_row(hidden)); }
  Int bias() const { return 4 * hidden * kFloat; }

  // What forward keeps for backward: areas of whole pages for the gates, for
  // states before and after every step, and for one value a cell. Fitted to
  // 22 shapes, then exact for 120 others.
  Int reserve() const {
    const Int states = 2 * (steps + 1) * batch;
    return gates() +
           3 * pages(states * padded_row(std::max(features, hidden))) +
           2 * pages(states * hidden) +
           pages(steps * batch * padded_row(hidden));
  }
};

bool in_float32(const Call& call) {
  return call.in.at(0).dtype() == Dtype::Float32;
}

// Without gradients a layer returns no workspace for backward, and takes
// another scratch. Fake tensors have an empty one either way, so that a traced
// layer always seems to train.
bool trains(const Call& call) { return call.out.size() == 4; }

}  // namespace

Result lstm(const Call& call) {
  if (!trains(call) || !in_float32(call)) return {};
  const Lstm layer(call);
  return layer.weights() + layer.gates() + 2 * layer.state() + layer.bias() +
         kPage + kRest;
}

Result lstm_backward(const Call& call) {
  if (!in_float32(call)) return {};
  const Lstm layer(call);
  Int copies = 0;
  for (const Tensor& tensor : call.in) copies += tensor.contiguous_copy();
  // Weights are taken as they are unless their rows are to be padded.
  for (const Int row : {layer.features, layer.hidden}) {
    if (padded_row(row) != row) {
      copies += 4 * layer.hidden * padded_row(row) * kFloat;
    }
  }
  return layer.weights() + layer.gates() + 4 * layer.state() + copies + kPage +
         kRest;
}

Result lstm_cell(const Call& call) { return call.in.at(0).bytes() * 3 / 2; }
Result lstm_cell_backward(const Call& call) {
  return call.out.at(0).bytes() * 9 / 2 + kPage;
}

Result lstm_reserve(const Call& call) {
  if (!trains(call) || !in_float32(call)) return {};
  return Lstm(call).reserve();
}

}  // namespace memscale::scratch
