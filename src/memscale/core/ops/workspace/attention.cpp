#include <algorithm>

#include "memscale/core/ops/workspace/formulas.h"

// Attention as cpu_flash_attention computes it: each thread holds the scores of
// a tile of queries with a tile of keys.

namespace memscale::scratch {
namespace {

struct Tile {
  Int queries, keys, head, accumulator;

  // Tiles of queries grow with their number.
  Tile(const Tensor& query, const Tensor& key) {
    const Int length = query.size(-2);
    const Int most = length >= 768 ? 256 : length >= 192 ? 64 : 32;
    queries = std::min(most, length);
    keys = std::min<Int>(512, key.size(-2));
    head = query.size(-1);
    accumulator = query.element() == 8 ? 8 : kFloat;
  }

  // Of half precision, also a copy for the next product.
  Int scores(const Tensor& query) const {
    const Int copy = query.half() ? query.element() : 0;
    return queries * keys * (accumulator + copy);
  }
};

// `busy`: threads whose own temporaries are counted.
Int backward(const Call& call, Int busy) {
  const Tensor& query = call.in.at(1);
  const Tile tile(query, call.in.at(2));
  Int own = tile.queries * tile.accumulator;
  if (query.dtype() == Dtype::BFloat16) {
    // A product of bfloat16 sums into float32.
    own += std::max(tile.queries, tile.keys) * tile.head * kFloat + 256;
  }
  // The scores and their gradient.
  return call.threads * 2 * tile.scores(query) + busy * own;
}

}  // namespace

// The scores, each query's maximum and sum, and the result.
Result flash(const Call& call) {
  const Tensor& query = call.in.at(0);
  const Tile tile(query, call.in.at(1));
  const Int rows = tile.queries * (2 + tile.head) * tile.accumulator;
  return call.threads * (tile.scores(query) + rows);
}

Result flash_backward(const Call& call) { return backward(call, call.threads); }

// The simulated device does not see what worker threads allocate.
Result device_attention_backward(const Call& call) { return backward(call, 1); }

}  // namespace memscale::scratch
