#include "memscale/core/ops/flops.h"

#include <algorithm>

namespace memscale::flops {
namespace {

// a (..., k) by b (..., k, columns): every element of a meets every column.
// A vector b has one. `First` is a's place among the inputs.
template <std::size_t First>
Result product(const Shapes& shapes) {
  const Sizes a = shapes.in(First);
  const Sizes b = shapes.in(First + 1);
  if (a.empty() || b.empty()) return std::nullopt;
  return times(2, times(count(a), b.size() > 1 ? b.back() : 1));
}

// `rows` channels, split into groups, with `columns` channels on the far side.
bool divides_into(std::int64_t rows, std::int64_t per_group,
                  std::int64_t columns) {
  if (per_group == 0 || columns % per_group != 0) return false;
  const std::int64_t groups = columns / per_group;
  return groups > 0 && rows % groups == 0;
}

// See Note [Transposed convolutions].
bool is_transposed(Sizes in, Sizes weight, Sizes out) {
  const bool plain =
      out[1] == weight[0] && divides_into(weight[0], weight[1], in[1]);
  const bool transposed =
      in[1] == weight[0] && divides_into(weight[0], weight[1], out[1]);
  if (plain != transposed) return transposed;
  return count(out.subspan(2)) > count(in.subspan(2));
}

// Each element of the side that the kernel slides over (the output; of a
// transposed one, the input) meets one filter. `transposed` is what the op's
// name says.
Result convolution_of(Sizes in, Sizes weight, Sizes out,
                      bool transposed = false) {
  const bool fits = weight.size() > 2 && in.size() == weight.size() &&
                    out.size() == weight.size();
  if (!fits) return std::nullopt;
  const Sizes side = transposed || is_transposed(in, weight, out) ? in : out;
  return times(2, times(count(side), count(weight.subspan(1))));
}

// Query (..., queries, d), key (..., keys, d), value (..., keys, dv). The query
// has the most heads; those of key and value may be shared. Each product over
// all pairs costs 2 d or 2 dv a pair.
Result attention_of(Sizes query, Sizes key, Sizes value,
                    std::int64_t products_of_d, std::int64_t products_of_dv) {
  if (query.size() < 2 || key.size() < 2 || value.size() < 2) {
    return std::nullopt;
  }
  const std::int64_t pairs =
      times(count(query.first(query.size() - 1)), key[key.size() - 2]);
  return times(2, times(pairs, plus(times(products_of_d, query.back()),
                                    times(products_of_dv, value.back()))));
}

}  // namespace

Result mm(const Shapes& shapes) { return product<0>(shapes); }
Result addmm(const Shapes& shapes) { return product<1>(shapes); }

// Rows of one matrix and a matrix for each group of them, or the other way
// round: each row meets one. With groups along the product, as in the gradient
// of the matrices, all of it is walked once.
Result grouped_mm(const Shapes& shapes) {
  const bool groups_of_columns =
      shapes.in(0).size() == 3 && shapes.in(1).size() == 2;
  return groups_of_columns ? matmul(shapes) : product<0>(shapes);
}

// The same with a weight that stands transposed, (columns, k) or (k).
Result linear(const Shapes& shapes) {
  const Sizes weight = shapes.in(1);
  if (shapes.in(0).empty() || weight.empty()) return std::nullopt;
  const std::int64_t columns = weight.size() > 1 ? weight.front() : 1;
  return times(2, times(count(shapes.in(0)), columns));
}

// Either operand may be broadcast, so the output says how often k is walked.
Result matmul(const Shapes& shapes) {
  const Sizes a = shapes.in(0);
  if (a.empty() || shapes.num_out() == 0) return std::nullopt;
  return times(2, times(count(shapes.out(0)), a.back()));
}

Result convolution(const Shapes& shapes) {
  return convolution_of(shapes.in(0), shapes.in(1), shapes.out(0));
}

Result convolution_transpose(const Shapes& shapes) {
  return convolution_of(shapes.in(0), shapes.in(1), shapes.out(0), true);
}

// The gradients of input and weight cost a forward each; that of the bias, the
// only one with a single dimension, next to nothing.
Result convolution_backward(const Shapes& shapes) {
  const Result forward =
      convolution_of(shapes.in(1), shapes.in(2), shapes.in(0));
  std::int64_t gradients = 0;
  for (std::size_t i = 0; i < shapes.num_out(); ++i) {
    if (shapes.out(i).size() > 2) ++gradients;
  }
  if (!forward || gradients == 0) return std::nullopt;
  return times(gradients, *forward);
}

// Scores, and what they weigh.
Result attention(const Shapes& shapes) {
  return attention_of(shapes.in(0), shapes.in(1), shapes.in(2), 1, 1);
}

// Over d: the scores again, the gradients of query and of key. Over dv: those
// of the value and of the scores.
Result attention_backward(const Shapes& shapes) {
  return attention_of(shapes.in(1), shapes.in(2), shapes.in(3), 3, 2);
}

// Input (steps, batch, features) and both weights of one layer, gates stacked:
// each row meets each weight once.
Result rnn(const Shapes& shapes) {
  const Sizes input = shapes.in(0);
  if (input.empty() || shapes.in(1).size() != 2 || shapes.in(2).size() != 2) {
    return std::nullopt;
  }
  const std::int64_t rows = count(input.first(input.size() - 1));
  const std::int64_t weights = plus(count(shapes.in(1)), count(shapes.in(2)));
  return times(2, times(rows, weights));
}

// The gradients of the input and of the weights.
Result rnn_backward(const Shapes& shapes) {
  const Result forward = rnn(shapes);
  return forward ? Result(times(2, *forward)) : std::nullopt;
}

// 5 n log2 n along the longest dimension; which ones it is over, shapes do not
// tell.
Result fourier(const Shapes& shapes) {
  const Sizes in = shapes.in(0);
  if (in.empty()) return std::nullopt;
  std::int64_t doublings = 0;
  for (std::int64_t n = *std::ranges::max_element(in); n > 1; n /= 2) {
    ++doublings;
  }
  return times(5 * std::max<std::int64_t>(doublings, 1), count(in));
}

Result by_element(const Shapes& shapes) {
  std::int64_t most = 0;
  for (std::size_t i = 0; i < shapes.num_out(); ++i) {
    most = std::max(most, count(shapes.out(i)));
  }
  return most;
}

bool is_transposed_convolution(const Shapes& shapes) {
  const Sizes in = shapes.in(0);
  const Sizes weight = shapes.in(1);
  const Sizes out = shapes.out(0);
  return weight.size() > 2 && in.size() == weight.size() &&
         out.size() == weight.size() && is_transposed(in, weight, out);
}

}  // namespace memscale::flops
