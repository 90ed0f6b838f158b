#include "memscale/core/replay_rules.h"

#include <algorithm>
#include <array>
#include <span>

#include "memscale/base/error.h"

namespace memscale {
namespace {

using Names = std::span<const std::string_view>;

// Names without "aten::" and overload.
struct Product {
  std::string_view name;
  Work work;
  std::size_t factor;
};
constexpr std::array kProducts = {
    Product{"mm", Work::Matmul, 0},
    Product{"bmm", Work::Matmul, 0},
    Product{"mv", Work::Matmul, 0},
    Product{"_int_mm", Work::Matmul, 0},
    Product{"_scaled_mm", Work::Matmul, 0},
    Product{"linear", Work::Matmul, 1},
    Product{"mkldnn_linear", Work::Matmul, 1},
    Product{"addmm", Work::Matmul, 1},
    Product{"addmm_", Work::Matmul, 1},
    Product{"_addmm_activation", Work::Matmul, 1},
    Product{"addmv", Work::Matmul, 1},
    Product{"baddbmm", Work::Matmul, 1},
    Product{"baddbmm_", Work::Matmul, 1},
    Product{"convolution", Work::Convolution, 1},
    Product{"_convolution", Work::Convolution, 1},
    Product{"convolution_overrideable", Work::Convolution, 1},
    Product{"mkldnn_convolution", Work::Convolution, 1},
    Product{"cudnn_convolution", Work::Convolution, 1},
    Product{"miopen_convolution", Work::Convolution, 1},
    Product{"miopen_depthwise_convolution", Work::Convolution, 1},
};

constexpr std::array<std::string_view, 43> kMuch = {
    "addbmm", "addbmm_", "dot", "vdot", "_trilinear", "_grouped_mm",
    "_scaled_grouped_mm", "_weight_int4pack_mm", "_weight_int8pack_mm",
    // attention
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward", "_efficient_attention_forward",
    "_cudnn_attention_forward", "_native_multi_head_attention",
    // convolution, where the filter does not tell
    "cudnn_convolution_transpose", "miopen_convolution_transpose",
    "_slow_conv2d_forward", "slow_conv3d_forward", "conv_depthwise3d",
    "_conv_depthwise2d", "slow_conv_transpose2d", "slow_conv_transpose3d",
    "slow_conv_dilated2d", "slow_conv_dilated3d",
    // recurrence
    "lstm", "gru", "mkldnn_rnn_layer", "_cudnn_rnn", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "miopen_rnn",
    // the rest: more than a few passes over the bytes
    "_cdist_forward", "_pdist_forward", "sort", "topk", "grid_sampler_3d",
    "_ctc_loss", "_fft_c2c", "_fft_r2c"};

// 2 ns an element and more, twenty times an addition, where a matmul of a
// hundred factors takes as long. (The fused activations take less than one.)
constexpr std::array<std::string_view, 9> kSlowOnCpu = {
    "tanh", "atan",   "asinh",   "acosh", "atanh",
    "mish", "lgamma", "digamma", "erfinv"};

constexpr std::array<std::string_view, 20> kFactories = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "_empty_affine_quantized",
    "zeros",
    "zeros_like",
    "new_zeros",
    "ones",
    "ones_like",
    "new_ones",
    "full",
    "full_like",
    "new_full",
    "_efficientzerotensor",
    "scalar_tensor",
    "from_file",
    "_cudnn_init_dropout_state"};

constexpr std::array<std::string_view, 12> kOverwriting = {
    "copy_",       "fill_",    "zero_",        "bernoulli_",
    "normal_",     "uniform_", "exponential_", "geometric_",
    "log_normal_", "cauchy_",  "random_",      "_foreach_zero_"};

constexpr std::array<std::string_view, 5> kStatistics = {
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm",
    "_native_batch_norm_legit", "_batch_norm_with_update"};

// Change what a tensor is, not what it holds; or read the clock, as it were.
constexpr std::array<std::string_view, 15> kUnrepeatable = {
    "resize_",
    "resize_as_",
    "resize",
    "set_",
    "set_data",
    "swap_",
    "_resize_output_",
    "unsqueeze_",
    "squeeze_",
    "transpose_",
    "as_strided_",
    "t_",
    "batch_norm_update_stats",
    "_fused_moving_avg_obs_fq_helper",
    "record_stream"};

// Several threads write to one place, if indices are repeated; with
// accumulate=True they add there.
constexpr std::array<std::string_view, 8> kUnorderedAnywhere = {
    "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put",
    "put",       "put_",       "index_copy",       "index_copy_"};

// Forward ops of torch.use_deterministic_algorithms' two lists, and those that
// share a kernel with one of them (scans: cumprod, logcumsumexp). Of kthvalue
// and median it is the index among equals.
constexpr std::array<std::string_view, 31> kUnorderedOnCuda = {
    "index_add", "index_add_", "index_reduce", "index_reduce_", "scatter",
    "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
    "scatter_reduce_", "cumsum", "cumsum_", "cumprod", "cumprod_",
    "logcumsumexp", "_logcumsumexp", "kthvalue", "median", "nanmedian",
    "bincount", "histc", "nll_loss2d_forward", "_cudnn_ctc_loss",
    "miopen_ctc_loss", "segment_reduce", "max_unpool2d", "max_unpool3d",
    // A transposed convolution is the gradient of a plain one.
    "cudnn_convolution_transpose", "miopen_convolution_transpose",
    "slow_conv_transpose2d", "slow_conv_transpose3d"};

// Their dropout draws from a state that is hidden in an argument, and moves on
// with each call.
constexpr std::array<std::string_view, 3> kHiddenState = {
    "_cudnn_rnn", "miopen_rnn", "_cudnn_init_dropout_state"};

// Other shapes of the same bytes. Torch chooses between them by what else is
// there: a fake tensor is viewed where a real one is aliased.
constexpr std::array<std::string_view, 4> kReshapes = {
    "aten::view", "aten::_unsafe_view", "aten::_reshape_alias",
    "aten::as_strided"};

bool has(Names names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

}  // namespace

bool is_same_op(std::string_view a, std::string_view b) {
  if (a == b || (has(kReshapes, a) && has(kReshapes, b))) return true;
  // "aten::add_.Tensor" is "aten::add", then "_", then ".Tensor".
  if (a.size() < b.size()) std::swap(a, b);
  const std::size_t end = std::min(a.find('.'), a.size());
  return end > 1 && a[end - 1] == '_' &&
         a.substr(0, end - 1) == b.substr(0, end - 1) &&
         a.substr(end) == b.substr(std::min(end - 1, b.size()));
}

bool KeepSet::keeps(std::size_t op, std::size_t output) const {
  return std::ranges::binary_search(kept, std::pair(op, output));
}

void KeepSet::check() const {
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (kept[i].first >= ops.size()) {
      throw PlanError(str("keep_set.kept[", i, "] must name one of ",
                          ops.size(), " ops, got ", kept[i].first));
    }
    if (i > 0 && kept[i] <= kept[i - 1]) {
      throw PlanError(
          str("keep_set.kept must be sorted without repetition, "
              "kept[",
              i, "] is not after kept[", i - 1, "]"));
    }
  }
}

ReplayRules find_replay_rules(std::string_view name) {
  ReplayRules rules;
  if (!name.starts_with("aten::")) {
    // Nobody has promised that calling it twice gives the same.
    if (!name.starts_with("torchvision::")) {
      rules.never = "not one of torch's own ops";
    }
    return rules;
  }
  std::string_view base = name.substr(6);
  const std::size_t dot = base.find('.');
  const bool is_out = dot != base.npos && base.find("out", dot) != base.npos;
  base = base.substr(0, dot);
  // Seen to give other bits the second time, with its pivoting driver.
  if (base == "linalg_lstsq") rules.never = "does not give the same twice";
  if (has(kUnrepeatable, base)) rules.never = "changes what a tensor is";
  if (has(kHiddenState, base)) {
    rules.never = "draws dropout from a hidden state";
  }
  if (has(kMuch, base) || base.starts_with("linalg_") ||
      base.starts_with("_linalg_")) {
    rules.work = Work::Much;
  }
  for (const Product& product : kProducts) {
    if (product.name != base) continue;
    rules.work = product.work;
    rules.factor = product.factor;
  }
  if (base == "max_pool2d_with_indices" || base == "max_pool3d_with_indices") {
    rules.slow_on_cpu = true;
    rules.indices = 1;
  }
  if (has(kSlowOnCpu, base)) rules.slow_on_cpu = true;
  rules.is_factory = has(kFactories, base);
  rules.overwrites = is_out || has(kOverwriting, base);
  rules.draws_bits = base == "bernoulli_";
  rules.updates_statistics = has(kStatistics, base);
  rules.unordered = has(kUnorderedAnywhere, base);
  rules.unordered_on_cuda = has(kUnorderedOnCuda, base);
  rules.is_convolution = base.find("convolution") != base.npos;
  return rules;
}

const char* why_not_on(const ReplayTarget& target, const ReplayRules& rules,
                       bool transposed) {
  if (rules.unordered) return kUnordered;
  if (!target.on_cuda) return nullptr;
  if (rules.unordered_on_cuda || (rules.is_convolution && transposed)) {
    return kUnordered;
  }
  // What was found to be fastest is remembered by thread, and backward has its
  // own; timing again there may end otherwise.
  if (target.benchmarks && rules.is_convolution) return kBenchmarked;
  return nullptr;
}

}  // namespace memscale
