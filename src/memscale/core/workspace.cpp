#include "memscale/core/workspace.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string_view>
#include <unordered_map>

#include "memscale/base/error.h"
#include "memscale/core/workspace_impl.h"

// The table of ops. Formulas that need more than a line are in the files that
// workspace_impl.h names, by family.

namespace memscale {
namespace scratch {
namespace {

Result none(const Call&) { return 0; }

// Copies of what is not contiguous, or of what is neither NCHW nor NHWC.
Result contiguous_first(const Call& call) {
  return call.in.at(0).contiguous_copy();
}
Result contiguous_second(const Call& call) {
  return call.in.at(1).contiguous_copy();
}
Result contiguous_last(const Call& call) {
  return call.in.at(call.in.size() - 1).contiguous_copy();
}
Result contiguous_inputs(const Call& call) {
  Int total = 0;
  for (const Tensor& in : call.in) total += in.contiguous_copy();
  return total;
}
Result dense_first(const Call& call) { return call.in.at(0).dense_copy(); }
Result dense_inputs(const Call& call) {
  Int total = 0;
  for (const Tensor& in : call.in) total += in.dense_copy();
  return total;
}

template <Int N>
Result copies_of_first(const Call& call) {
  return N * call.in.at(0).bytes();
}
template <Int N>
Result copies_of_output(const Call& call) {
  return N * call.out.at(0).bytes();
}
Result first_and_output(const Call& call) {
  return call.in.at(0).bytes() + call.out.at(0).bytes();
}

struct Row {
  std::string_view names;  // base names, or with an overload, by blanks
  Formula formula;
};

// clang-format off
constexpr std::array kRows = {
  // Views and factories.
  Row{"view _unsafe_view reshape alias detach expand permute transpose t squeeze unsqueeze slice select split "
      "split_with_sizes unsafe_split chunk unbind as_strided view_as_complex view_as_real unfold diagonal "
      "lift_fresh lift narrow real imag "
      "empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros zero ones ones_like "
      "new_ones full full_like new_full fill arange linspace eye scalar_tensor tril_indices triu_indices resize "
      "set_ _local_scalar_dense item _efficientzerotensor _amp_foreach_non_finite_check_and_unscale", none},
  // Random numbers.
  Row{"rand rand_like randn randn_like randint randint_like randperm bernoulli normal uniform exponential random "
      "native_dropout native_dropout_backward cauchy geometric log_normal", none},
  // Elementwise.
  Row{"add sub rsub mul div pow maximum minimum fmin fmax atan2 fmod remainder floor_divide lerp addcmul addcdiv "
      "eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor xlogy hypot "
      "copysign nextafter heaviside logaddexp logaddexp2 clamp clamp_min clamp_max", elementwise},
  Row{"where masked_fill", elementwise_masked},
  Row{"abs", complex_magnitude},
  Row{"neg exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh "
      "asinh acosh atanh erf erfc erfinv sigmoid logit relu relu6 gelu silu mish elu celu selu leaky_relu "
      "hardtanh hardswish hardsigmoid softplus threshold floor ceil round trunc frac sign sgn square sinc "
      "bitwise_not logical_not isnan isinf isfinite nan_to_num lgamma digamma polar complex conj_physical "
      "_prelu_kernel softshrink hardshrink glu angle positive special_entr "
      "gelu_backward silu_backward mish_backward elu_backward leaky_relu_backward hardtanh_backward "
      "hardswish_backward hardsigmoid_backward softplus_backward threshold_backward tanh_backward sigmoid_backward "
      "logit_backward glu_backward log_sigmoid_backward _prelu_kernel_backward rrelu_with_noise_backward "
      "softshrink_backward hardshrink_backward", none},
  Row{"log_sigmoid_forward rrelu_with_noise", contiguous_first},
  Row{"masked_scatter", contiguous_last},
  // Copies.
  Row{"copy clone contiguous", copy},
  Row{"_to_copy to cat stack repeat flip roll rot90 constant_pad_nd tril triu channel_shuffle pixel_shuffle "
      "pixel_unshuffle slice_backward slice_scatter select_scatter diagonal_backward unfold_backward col2im "
      "reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward replication_pad1d_backward "
      "replication_pad2d replication_pad2d_backward repeat_interleave", none},
  Row{"select_backward", select_backward},
  Row{"reflection_pad1d replication_pad1d", contiguous_first},
  Row{"im2col", im2col},
  // Reductions.
  Row{"sum nansum", sum},
  Row{"mean", mean},
  Row{"cumsum cumprod prod", accumulation},
  Row{"max min", contiguous_first},
  Row{"max.dim max.other min.dim min.other amax amin aminmax argmax argmin all any var std var_mean std_mean "
      "cummax cummin logcumsumexp count_nonzero histc bincount", none},
  Row{"linalg_vector_norm norm", norm},
  Row{"logsumexp multinomial", first_and_output},
  Row{"sort topk argsort searchsorted bucketize nonzero isin", none},
  Row{"kthvalue", kthvalue},
  Row{"median.dim nanmedian.dim", copies_of_first<1>},
  Row{"_unique2 unique_dim", copies_of_first<3>},
  Row{"_softmax _log_softmax", contiguous_first},
  Row{"_softmax_backward_data _log_softmax_backward_data", contiguous_inputs},
  Row{"_safe_softmax", safe_softmax},
  // Losses.
  Row{"nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss_backward "
      "smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward multi_margin_loss "
      "multi_margin_loss_backward kl_div_backward", none},
  Row{"mse_loss smooth_l1_loss huber_loss", elementwise_loss},
  Row{"binary_cross_entropy soft_margin_loss", resized_loss},
  Row{"binary_cross_entropy_with_logits", bce_with_logits},
  Row{"soft_margin_loss_backward", copies_of_output<2>},
  // Products of matrices.
  Row{"mm bmm", mm},
  Row{"addmm baddbmm", addmm},
  Row{"mv dot vdot outer addmv addr _grouped_mm", none},
  Row{"_euclidean_dist", euclidean_distance},
  // Normalisation.
  Row{"native_layer_norm", contiguous_first},
  Row{"native_layer_norm_backward", layer_norm_backward},
  Row{"native_group_norm", dense_first},
  Row{"native_group_norm_backward", dense_inputs},
  Row{"native_batch_norm _native_batch_norm_legit _batch_norm_with_update", batch_norm},
  Row{"native_batch_norm_backward batch_norm_backward", batch_norm_backward},
  // Indexing.
  Row{"index _unsafe_index", index},
  Row{"index_put _unsafe_index_put _index_put_impl", index_put},
  Row{"index_select", contiguous_first},
  Row{"embedding", contiguous_second},
  Row{"embedding_dense_backward", contiguous_inputs},
  Row{"_embedding_bag", none},
  Row{"_embedding_bag_backward _embedding_bag_dense_backward", embedding_bag_backward},
  Row{"index_add index_copy index_fill masked_fill.Tensor scatter.value one_hot take put", none},
  Row{"gather scatter scatter_add", gather_scatter},
  Row{"scatter_reduce", scatter_reduce},
  Row{"masked_select masked_scatter_backward", masked_select},
  // Images.
  Row{"avg_pool2d avg_pool2d_backward avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool2d_backward "
      "adaptive_max_pool2d adaptive_max_pool2d_backward max_pool2d_with_indices max_pool3d_with_indices "
      "max_pool3d_with_indices_backward max_unpool2d grid_sampler_2d grid_sampler_2d_backward "
      "upsample_nearest1d_backward upsample_linear1d_backward", none},
  Row{"avg_pool3d_backward", contiguous_first},
  Row{"max_pool2d_with_indices_backward", max_pool_backward},
  Row{"upsample_nearest2d _upsample_nearest_exact2d", upsample_nearest_2d},
  Row{"upsample_bilinear2d", upsample_linear_2d},
  Row{"upsample_nearest1d _upsample_nearest_exact1d", upsample_nearest},
  Row{"upsample_linear1d", upsample_linear},
  Row{"upsample_bicubic2d", upsample_cubic},
  Row{"upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward", dense_first},
  Row{"upsample_bicubic2d_backward", contiguous_first},
  Row{"_upsample_bilinear2d_aa _upsample_bicubic2d_aa", upsample_antialias},
  Row{"_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward", upsample_antialias_backward},
  Row{"affine_grid_generator", affine_grid},
  Row{"convolution _convolution", convolution},
  Row{"convolution_backward", convolution_backward},
  // Attention.
  Row{"_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable", flash},
  Row{"_scaled_dot_product_flash_attention_for_cpu_backward", flash_backward},
  Row{"_scaled_dot_product_fused_attention_overrideable_backward", device_attention_backward},
  // Recurrent layers.
  Row{"mkldnn_rnn_layer", lstm},
  Row{"mkldnn_rnn_layer_backward", lstm_backward},
  Row{"_thnn_fused_gru_cell", copies_of_first<3>},
  Row{"_thnn_fused_gru_cell_backward", copies_of_output<1>},
  Row{"_thnn_fused_lstm_cell", lstm_cell},
  Row{"_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
  // Signals.
  Row{"_fft_c2c _fft_r2c _fft_c2r", none},
};
// clang-format on

const std::unordered_map<std::string_view, Formula>& table() {
  static const auto instance = [] {
    std::unordered_map<std::string_view, Formula> result;
    for (const Row& row : kRows) {
      std::string_view rest = row.names;
      while (!rest.empty()) {
        const std::size_t blank = std::min(rest.find(' '), rest.size());
        result.emplace(rest.substr(0, blank), row.formula);
        rest.remove_prefix(std::min(blank + 1, rest.size()));
      }
    }
    return result;
  }();
  return instance;
}

Formula find(std::string_view name) {
  const auto found = table().find(name);
  return found == table().end() ? nullptr : found->second;
}

// "aten::add_.Tensor": by "add_.Tensor", else by "add".
Formula formula_of(std::string_view name) {
  constexpr std::string_view kNamespace = "aten::";
  if (!name.starts_with(kNamespace)) return nullptr;
  name.remove_prefix(kNamespace.size());
  if (const Formula exact = find(name)) return exact;
  name = name.substr(0, name.find('.'));
  if (const Formula base = find(name)) return base;
  if (name.starts_with("_fused_")) return none;
  if (name.starts_with("_foreach_")) return foreach_cast;
  while (name.ends_with('_')) name.remove_suffix(1);
  return find(name);
}

}  // namespace
}  // namespace scratch

std::optional<Bytes> workspace(const Trace& trace, const Op& op,
                               int num_threads) {
  if (num_threads < 1) {
    throw InternalError(str("workspace for ", num_threads, " threads"));
  }
  if (op.view) return Bytes();
  if (op.opaque) return std::nullopt;
  const scratch::Formula formula = scratch::formula_of(op.name);
  if (!formula) return std::nullopt;
  if (formula == scratch::none) return Bytes();
  const auto call = scratch::call_of(trace, op, num_threads);
  if (!call) return std::nullopt;
  // at() throws where an op has fewer tensors or dimensions than its formula
  // needs: a version of torch that this table does not know.
  try {
    const scratch::Result bytes = formula(*call);
    return bytes ? std::optional(Bytes(*bytes)) : std::nullopt;
  } catch (const std::out_of_range&) {
    return std::nullopt;
  }
}

}  // namespace memscale
