#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "memscale/core/trace/trace.h"

// Formulas that count the floating-point operations of an op from the sizes of
// its tensors. op_table.h says which op has which.

namespace memscale::flops {

using Sizes = std::span<const std::int64_t>;
// Nothing where the shapes are not those of the op's schema.
using Result = std::optional<std::int64_t>;

inline constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

// Products and sums stop at the largest number.
inline std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? kMax : result;
}
inline std::int64_t plus(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  return __builtin_add_overflow(a, b, &result) ? kMax : result;
}
inline std::int64_t count(Sizes sizes) {
  std::int64_t result = 1;
  for (const std::int64_t extent : sizes) result = times(result, extent);
  return result;
}

// The shapes of a call's tensors. One that is not there reads as a scalar's.
class Shapes final {
 public:
  Shapes(const Trace& trace, const Op& op) : trace_(trace), op_(op) {}

  Sizes in(std::size_t i) const { return at(op_.inputs, i); }
  Sizes out(std::size_t i) const { return at(op_.outputs, i); }
  std::size_t num_out() const { return op_.outputs.size(); }

 private:
  Sizes at(const std::vector<ValueId>& ids, std::size_t i) const {
    return i < ids.size() ? Sizes(trace_.at(ids[i]).sizes) : Sizes();
  }

  const Trace& trace_;
  const Op& op_;
};

Result mm(const Shapes& shapes);     // of the first two inputs
Result addmm(const Shapes& shapes);  // of the second and the third
Result grouped_mm(const Shapes& shapes);
Result linear(const Shapes& shapes);
Result matmul(const Shapes& shapes);
Result convolution(const Shapes& shapes);
Result convolution_transpose(const Shapes& shapes);
Result convolution_backward(const Shapes& shapes);
Result attention(const Shapes& shapes);
Result attention_backward(const Shapes& shapes);
Result rnn(const Shapes& shapes);
Result rnn_backward(const Shapes& shapes);
Result fourier(const Shapes& shapes);
Result by_element(const Shapes& shapes);  // of the largest output

// Whether the shapes are those of a transposed convolution. See
// Note [Transposed convolutions].
bool is_transposed_convolution(const Shapes& shapes);

}  // namespace memscale::flops
