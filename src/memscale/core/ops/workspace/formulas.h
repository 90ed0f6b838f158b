#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "memscale/core/trace/trace.h"

// What the formulas for workspaces share. op_table.h says which op has which.
// They are measured op by op, see tests/cpp/core/ops/workspace_test.cpp; names
// in their comments are those of torch's sources.

namespace memscale::scratch {

using Int = std::int64_t;
using Result = std::optional<Int>;  // bytes; nothing: unknown

constexpr Int kFloat = 4;  // bytes; half precision is summed in float32
constexpr Int kPage = 4096;

constexpr Int div_up(Int a, Int b) { return (a + b - 1) / b; }
constexpr Int up(Int a, Int multiple) { return div_up(a, multiple) * multiple; }

// A value with the questions that formulas ask.
class Tensor final {
 public:
  explicit Tensor(const Value& value) : value_(&value) {}

  // If not, nothing else may be asked.
  bool known() const {
    return kind() != DtypeKind::Packed &&
           value_->sizes.size() == value_->strides.size();
  }
  Dtype dtype() const { return value_->dtype; }
  DtypeKind kind() const { return kind_of(dtype()); }
  Int element() const { return itemsize_of(dtype()); }
  bool half() const { return kind() == DtypeKind::Floating && element() <= 2; }
  std::span<const Int> sizes() const { return value_->sizes; }
  Int dim() const { return static_cast<Int>(value_->sizes.size()); }
  // Counted from the end if negative. Throws std::out_of_range.
  Int size(Int d) const { return value_->sizes.at(place(d)); }
  Int stride(Int d) const { return value_->strides.at(place(d)); }
  // Of the sizes from `first` on.
  Int product(Int first) const;
  Int numel() const { return product(0); }
  Int bytes() const { return numel() * element(); }

  bool contiguous() const;
  // NHWC or NDHWC; as torch, true as well of shapes where both are the same.
  bool channels_last() const;
  // suggest_memory_format(): where shapes leave it open (sides of 1), strides
  // tell, and kernels follow them.
  bool suggests_channels_last() const;
  bool dense() const { return contiguous() || channels_last(); }
  // What contiguous() allocates.
  Int contiguous_copy() const { return contiguous() ? 0 : bytes(); }
  Int dense_copy() const { return dense() ? 0 : bytes(); }

 private:
  std::size_t place(Int d) const {
    return static_cast<std::size_t>(d < 0 ? d + dim() : d);
  }

  const Value* value_;
};

struct Call {
  std::string_view overload;
  std::vector<Tensor> in, out;
  bool mutates = false;
  bool transposed = false;  // of a convolution
  Int threads = 1;
};

// Nothing if a tensor is not known.
std::optional<Call> call_of(const Trace& trace, const Op& op, int num_threads);

// Formulas may throw std::out_of_range: fewer tensors or dimensions than the
// op's schema has.

// workspace.cpp: nothing at all, and copies of what is not contiguous, or of
// what is neither NCHW nor NHWC
Result none(const Call& call);
Result contiguous_first(const Call& call);
Result contiguous_second(const Call& call);
Result contiguous_last(const Call& call);
Result contiguous_inputs(const Call& call);
Result dense_first(const Call& call);
Result dense_inputs(const Call& call);
Result first_and_output(const Call& call);
template <Int N>
Result copies_of_first(const Call& call) {
  return N * call.in.at(0).bytes();
}
template <Int N>
Result copies_of_output(const Call& call) {
  return N * call.out.at(0).bytes();
}

// elementwise.cpp: casts and copies
Result elementwise(const Call& call);
Result elementwise_masked(const Call& call);
Result masked_fill(const Call& call);
Result foreach_cast(const Call& call);
Result foreach_number(const Call& call);
Result complex_magnitude(const Call& call);
Result copy(const Call& call);
Result select_backward(const Call& call);

// reductions.cpp: sums, losses, normalisation
Result accumulation(const Call& call);
Result sum(const Call& call);
Result mean(const Call& call);
Result norm(const Call& call);
Result extremum(const Call& call);
Result kthvalue(const Call& call);
Result median(const Call& call);
Result safe_softmax(const Call& call);
Result elementwise_loss(const Call& call);
Result resized_loss(const Call& call);
Result bce_with_logits(const Call& call);
Result layer_norm_backward(const Call& call);
Result batch_norm(const Call& call);
Result batch_norm_backward(const Call& call);

// matmul.cpp
Result mm(const Call& call);
Result addmm(const Call& call);
Result euclidean_distance(const Call& call);

// indexing.cpp
Result index(const Call& call);
Result index_put(const Call& call);
Result gather_scatter(const Call& call);
Result scatter(const Call& call);
Result scatter_reduce(const Call& call);
Result masked_select(const Call& call);
Result embedding_bag_backward(const Call& call);

// images.cpp
Result im2col(const Call& call);
Result upsample_nearest(const Call& call);
Result upsample_linear(const Call& call);
Result upsample_cubic(const Call& call);
Result upsample_nearest_2d(const Call& call);
Result upsample_linear_2d(const Call& call);
Result upsample_antialias(const Call& call);
Result upsample_antialias_backward(const Call& call);
Result affine_grid(const Call& call);
Result max_pool_backward(const Call& call);

// convolution.cpp
Result convolution(const Call& call);
Result convolution_backward(const Call& call);

// attention.cpp
Result flash(const Call& call);
Result flash_backward(const Call& call);
Result device_attention_backward(const Call& call);

// recurrent.cpp
Result lstm(const Call& call);
Result lstm_backward(const Call& call);
Result lstm_reserve(const Call& call);
Result lstm_cell(const Call& call);
Result lstm_cell_backward(const Call& call);

}  // namespace memscale::scratch
