#include "memscale/core/op_cost.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <span>
#include <string_view>

namespace memscale {
namespace {

using Sizes = std::span<const std::int64_t>;
// Nothing where the shapes are not those of the op's schema.
using Flops = std::optional<std::int64_t>;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? kMax : result;
}

std::int64_t plus(std::int64_t a, std::int64_t b) {
  std::int64_t result = 0;
  return __builtin_add_overflow(a, b, &result) ? kMax : result;
}

std::int64_t count(Sizes sizes) {
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

// a (..., k) by b (..., k, columns): every element of a meets every column.
// A vector b has one. `First` is a's place among the inputs.
template <std::size_t First>
Flops product(const Shapes& shapes) {
  const Sizes a = shapes.in(First);
  const Sizes b = shapes.in(First + 1);
  if (a.empty() || b.empty()) return std::nullopt;
  return times(2, times(count(a), b.size() > 1 ? b.back() : 1));
}

// The same with a weight that stands transposed, (columns, k) or (k).
Flops linear(const Shapes& shapes) {
  const Sizes weight = shapes.in(1);
  if (shapes.in(0).empty() || weight.empty()) return std::nullopt;
  const std::int64_t columns = weight.size() > 1 ? weight.front() : 1;
  return times(2, times(count(shapes.in(0)), columns));
}

// Either operand may be broadcast, so the output says how often k is walked.
Flops matmul(const Shapes& shapes) {
  const Sizes a = shapes.in(0);
  if (a.empty() || shapes.num_out() == 0) return std::nullopt;
  return times(2, times(count(shapes.out(0)), a.back()));
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
Flops convolution(Sizes in, Sizes weight, Sizes out, bool transposed = false) {
  const bool fits = weight.size() > 2 && in.size() == weight.size() &&
                    out.size() == weight.size();
  if (!fits) return std::nullopt;
  const Sizes side = transposed || is_transposed(in, weight, out) ? in : out;
  return times(2, times(count(side), count(weight.subspan(1))));
}

Flops convolution_forward(const Shapes& shapes) {
  return convolution(shapes.in(0), shapes.in(1), shapes.out(0));
}

Flops convolution_transpose(const Shapes& shapes) {
  return convolution(shapes.in(0), shapes.in(1), shapes.out(0), true);
}

// The gradients of input and weight cost a forward each; that of the bias, the
// only one with a single dimension, next to nothing.
Flops convolution_backward(const Shapes& shapes) {
  const Flops forward = convolution(shapes.in(1), shapes.in(2), shapes.in(0));
  std::int64_t gradients = 0;
  for (std::size_t i = 0; i < shapes.num_out(); ++i) {
    if (shapes.out(i).size() > 2) ++gradients;
  }
  if (!forward || gradients == 0) return std::nullopt;
  return times(gradients, *forward);
}

// Query (..., queries, d), key (..., keys, d), value (..., keys, dv). The query
// has the most heads; those of key and value may be shared. Each product over
// all pairs costs 2 d or 2 dv a pair.
Flops attention(Sizes query, Sizes key, Sizes value, std::int64_t products_of_d,
                std::int64_t products_of_dv) {
  if (query.size() < 2 || key.size() < 2 || value.size() < 2) {
    return std::nullopt;
  }
  const std::int64_t pairs =
      times(count(query.first(query.size() - 1)), key[key.size() - 2]);
  return times(2, times(pairs, plus(times(products_of_d, query.back()),
                                    times(products_of_dv, value.back()))));
}

// Scores, and what they weigh.
Flops attention_forward(const Shapes& shapes) {
  return attention(shapes.in(0), shapes.in(1), shapes.in(2), 1, 1);
}

// Over d: the scores again, the gradients of query and of key. Over dv: those
// of the value and of the scores.
Flops attention_backward(const Shapes& shapes) {
  return attention(shapes.in(1), shapes.in(2), shapes.in(3), 3, 2);
}

// Input (steps, batch, features) and both weights of one layer, gates stacked:
// each row meets each weight once.
Flops rnn_forward(const Shapes& shapes) {
  const Sizes input = shapes.in(0);
  if (input.empty() || shapes.in(1).size() != 2 || shapes.in(2).size() != 2) {
    return std::nullopt;
  }
  const std::int64_t rows = count(input.first(input.size() - 1));
  const std::int64_t weights = plus(count(shapes.in(1)), count(shapes.in(2)));
  return times(2, times(rows, weights));
}

// The gradients of the input and of the weights.
Flops rnn_backward(const Shapes& shapes) {
  const Flops forward = rnn_forward(shapes);
  return forward ? Flops(times(2, *forward)) : std::nullopt;
}

struct Counter {
  std::string_view name;
  Flops (*flops)(const Shapes&);
};

constexpr std::array kCounters = {
    Counter{"mm", product<0>},
    Counter{"_int_mm", product<0>},
    Counter{"_scaled_mm", product<0>},
    Counter{"bmm", product<0>},
    Counter{"mv", product<0>},
    Counter{"dot", product<0>},
    Counter{"vdot", product<0>},
    Counter{"addmm", product<1>},
    Counter{"_addmm_activation", product<1>},
    Counter{"addbmm", product<1>},
    Counter{"baddbmm", product<1>},
    Counter{"addmv", product<1>},
    Counter{"linear", linear},
    Counter{"matmul", matmul},
    Counter{"convolution", convolution_forward},
    Counter{"_convolution", convolution_forward},
    Counter{"convolution_overrideable", convolution_forward},
    Counter{"mkldnn_convolution", convolution_forward},
    Counter{"cudnn_convolution", convolution_forward},
    Counter{"cudnn_convolution_relu", convolution_forward},
    Counter{"cudnn_convolution_add_relu", convolution_forward},
    Counter{"cudnn_convolution_transpose", convolution_transpose},
    Counter{"convolution_backward", convolution_backward},
    Counter{"convolution_backward_overrideable", convolution_backward},
    Counter{"mkldnn_rnn_layer", rnn_forward},
    Counter{"mkldnn_rnn_layer_backward", rnn_backward},
};

// "aten::addmm_.out" is "addmm". Other namespaces' ops are not known here.
std::string_view base_name(std::string_view name) {
  constexpr std::string_view kAten = "aten::";
  if (!name.starts_with(kAten)) return "";
  name.remove_prefix(kAten.size());
  name = name.substr(0, name.find('.'));
  if (name.ends_with('_')) name.remove_suffix(1);
  return name;
}

// torch has a name for every kernel of attention, and more with each version.
bool is_attention(std::string_view name) {
  if (name.starts_with('_')) name.remove_prefix(1);
  return name.starts_with("scaled_dot_product_") &&
         name.find("attention") != std::string_view::npos;
}

Flops known_flops(std::string_view name, const Shapes& shapes) {
  if (is_attention(name)) {
    return name.ends_with("_backward") ? attention_backward(shapes)
                                       : attention_forward(shapes);
  }
  const auto* found = std::ranges::find(kCounters, name, &Counter::name);
  return found == kCounters.end() ? std::nullopt : found->flops(shapes);
}

std::int64_t largest_output(const Shapes& shapes) {
  std::int64_t most = 0;
  for (std::size_t i = 0; i < shapes.num_out(); ++i) {
    most = std::max(most, count(shapes.out(i)));
  }
  return most;
}

}  // namespace

bool is_transposed_convolution(const Trace& trace, const Op& op) {
  if (op.name.find("convolution") == op.name.npos) return false;
  const Shapes shapes(trace, op);
  const Sizes in = shapes.in(0);
  const Sizes weight = shapes.in(1);
  const Sizes out = shapes.out(0);
  return weight.size() > 2 && in.size() == weight.size() &&
         out.size() == weight.size() && is_transposed(in, weight, out);
}

OpCost op_cost(const Trace& trace, const Op& op) {
  if (op.view) return {};
  const Shapes shapes(trace, op);
  const Flops known = known_flops(base_name(op.name), shapes);
  OpCost cost{.flops = known ? *known : largest_output(shapes), .moved = {}};
  for (const auto* ids : {&op.inputs, &op.outputs}) {
    for (const ValueId id : *ids) {
      const Value& value = trace.at(id);
      const std::int64_t bytes =
          times(count(value.sizes), itemsize_of(value.dtype));
      cost.moved = Bytes(plus(cost.moved.count(), bytes));
    }
  }
  return cost;
}

}  // namespace memscale
