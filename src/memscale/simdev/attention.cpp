// Fused attention: no score matrix in device memory, with and without dropout,
// as on a card. Without dropout it is the CPU's own flash kernel; with it, a
// tiled kernel of ours, because the CPU has none.
#include <ATen/Parallel.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>

#include "memscale/simdev/generator.h"
#include "memscale/simdev/host_call.h"
#include "memscale/simdev/registration.h"

namespace memscale::sim {
namespace {

// Rows of the score matrix that exist at once. Scores of a tile are what a
// card keeps on chip: host scratch, not charged.
constexpr int64_t kQueryTile = 128;

struct Problem {
  at::Tensor query, key, value;    // [batch, heads, length, width]
  std::optional<at::Tensor> bias;  // [batch, heads, queries, keys], expanded
  double dropout_p = 0;
  bool is_causal = false;
  double scale = 1;
  uint64_t seed = 0;

  int64_t heads() const { return query.size(1); }
  // Query heads that share one key head (grouped-query attention).
  int64_t group() const { return query.size(1) / key.size(1); }
  int64_t num_tiles() const {
    return (query.size(2) + kQueryTile - 1) / kQueryTile;
  }
};

at::ScalarType compute_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Problem make_problem(const at::Tensor& query, const at::Tensor& key,
                     const at::Tensor& value,
                     const std::optional<at::Tensor>& bias, double dropout_p,
                     bool is_causal, std::optional<double> scale,
                     uint64_t seed) {
  Problem problem{query,
                  key,
                  value,
                  {},
                  dropout_p,
                  is_causal,
                  scale.value_or(1 / std::sqrt(double(query.size(-1)))),
                  seed};
  if (bias.has_value()) {
    problem.bias = bias->expand(
        {query.size(0), query.size(1), query.size(2), key.size(2)});
  }
  return problem;
}

// One tile: some rows of one head of one batch entry, and as many keys as the
// last of them may see.
struct Tile {
  int64_t batch, head, first, rows, keys, index;

  Tile(const Problem& problem, int64_t batch_index, int64_t head_index,
       int64_t tile)
      : batch(batch_index),
        head(head_index),
        first(tile * kQueryTile),
        rows(std::min(kQueryTile, problem.query.size(2) - first)),
        keys(problem.is_causal ? std::min(first + rows, problem.key.size(2))
                               : problem.key.size(2)),
        index((batch_index * problem.heads() + head_index) *
                  problem.num_tiles() +
              tile) {}

  at::Tensor of(const at::Tensor& tensor) const {
    return tensor.select(0, batch).select(0, head).narrow(0, first, rows);
  }
  at::Tensor seen(const at::Tensor& keys_or_values) const {
    return keys_or_values.narrow(0, 0, keys);
  }
};

at::Tensor head_of(const at::Tensor& tensor, int64_t batch, int64_t head) {
  return tensor.select(0, batch).select(0, head).to(compute_type(tensor));
}

at::Tensor scores(const Problem& problem, const Tile& tile,
                  const at::Tensor& query, const at::Tensor& key) {
  at::Tensor result = at::mm(query, key.t()).mul_(problem.scale);
  if (problem.bias) {
    result.add_(tile.of(*problem.bias).narrow(1, 0, tile.keys));
  }
  if (problem.is_causal) {
    const at::Tensor row =
        at::arange(tile.first, tile.first + tile.rows).unsqueeze(1);
    result.masked_fill_(at::arange(tile.keys).gt(row), -INFINITY);
  }
  return result;
}

// The tile's dropout factors: 0 or 1 / (1 - p). Forward and backward draw the
// same ones, from the seed and the tile's place alone.
at::Tensor dropout_factors(const Problem& problem, const Tile& tile,
                           const at::Tensor& like) {
  if (problem.dropout_p == 1) return at::zeros_like(like);
  at::Generator generator = at::detail::createCPUGenerator(
      problem.seed + static_cast<uint64_t>(tile.index));
  return at::empty_like(like)
      .bernoulli_(1 - problem.dropout_p, generator)
      .div_(1 - problem.dropout_p);
}

// exp(scores - logsumexp); a row that may attend to nothing gets zeros.
at::Tensor probabilities(const at::Tensor& scores, const at::Tensor& lse) {
  const at::Tensor safe = lse.masked_fill(lse.eq(-INFINITY), 0).unsqueeze(1);
  return scores.sub(safe).exp_();
}

void forward(const Problem& problem, const at::Tensor& output,
             const at::Tensor& logsumexp) {
  const int64_t heads = problem.heads();
  at::parallel_for(
      0, problem.query.size(0) * heads, 1, [&](int64_t begin, int64_t end) {
        const UnchargedScope on_chip;
        for (int64_t i = begin; i < end; ++i) {
          const int64_t batch = i / heads, head = i % heads;
          const int64_t key_head = head / problem.group();
          const at::Tensor key = head_of(problem.key, batch, key_head);
          const at::Tensor value = head_of(problem.value, batch, key_head);
          for (int64_t t = 0; t < problem.num_tiles(); ++t) {
            const Tile tile(problem, batch, head, t);
            const at::Tensor query =
                tile.of(problem.query).to(compute_type(problem.query));
            const at::Tensor s = scores(problem, tile, query, tile.seen(key));
            const at::Tensor lse = at::logsumexp(s, 1);
            at::Tensor p = probabilities(s, lse);
            p.mul_(dropout_factors(problem, tile, p));
            tile.of(output).copy_(at::mm(p, tile.seen(value)));
            tile.of(logsumexp).copy_(lse);
          }
        }
      });
}

struct Gradients {
  at::Tensor query, key, value;
};

void backward(const Problem& problem, const at::Tensor& grad_output,
              const at::Tensor& output, const at::Tensor& logsumexp,
              const Gradients& gradients) {
  const int64_t key_heads = problem.key.size(1);
  at::parallel_for(
      0, problem.query.size(0) * key_heads, 1, [&](int64_t begin, int64_t end) {
        const UnchargedScope on_chip;
        for (int64_t i = begin; i < end; ++i) {
          const int64_t batch = i / key_heads, key_head = i % key_heads;
          const at::Tensor key = head_of(problem.key, batch, key_head);
          const at::Tensor value = head_of(problem.value, batch, key_head);
          at::Tensor grad_key = at::zeros(key.sizes(), key.options());
          at::Tensor grad_value = at::zeros(value.sizes(), value.options());
          for (int64_t g = 0; g < problem.group() * problem.num_tiles(); ++g) {
            const Tile tile(
                problem, batch,
                key_head * problem.group() + g / problem.num_tiles(),
                g % problem.num_tiles());
            const at::ScalarType type = compute_type(problem.query);
            const at::Tensor query = tile.of(problem.query).to(type);
            const at::Tensor grad = tile.of(grad_output).to(type);
            const at::Tensor k = tile.seen(key);
            const at::Tensor p = probabilities(scores(problem, tile, query, k),
                                               tile.of(logsumexp).to(type));
            const at::Tensor factors = dropout_factors(problem, tile, p);
            tile.seen(grad_value).add_(at::mm(p.mul(factors).t(), grad));
            // dS = P * (dP - rowsum(dO * O)), the flash-attention identity,
            // which holds with dropout too.
            at::Tensor grad_p =
                at::mm(grad, tile.seen(value).t()).mul_(factors);
            const at::Tensor row_sum =
                grad.mul(tile.of(output).to(type)).sum(1, /*keepdim=*/true);
            const at::Tensor grad_s =
                grad_p.sub_(row_sum).mul_(p).mul_(problem.scale);
            tile.of(gradients.query).copy_(at::mm(grad_s, k));
            tile.seen(grad_key).add_(at::mm(grad_s.t(), query));
          }
          gradients.key.select(0, batch).select(0, key_head).copy_(grad_key);
          gradients.value.select(0, batch)
              .select(0, key_head)
              .copy_(grad_value);
        }
      });
}

int64_t choose_backend(const at::Tensor& query, const at::Tensor& key,
                       const at::Tensor& value,
                       const std::optional<at::Tensor>& mask, double,
                       bool is_causal, std::optional<double> scale,
                       bool enable_gqa) {
  // torch.func has no batching rule for the fused operator.
  constexpr c10::DispatchKeySet kTransforms(
      {c10::DispatchKey::FuncTorchBatched,
       c10::DispatchKey::FuncTorchGradWrapper});
  for (const at::Tensor* tensor : {&query, &key, &value}) {
    if (tensor->key_set().has_any(kTransforms)) {
      return static_cast<int64_t>(at::SDPBackend::math);
    }
  }
  // What the CPU's flash kernel can do, ours can do with dropout as well. The
  // choice reads metadata only, so that it works for fake tensors too.
  const int64_t on_cpu = at::native::_fused_sdp_choice_cpp(
      query, key, value, mask, /*dropout_p=*/0.0, is_causal, scale, enable_gqa);
  return on_cpu == static_cast<int64_t>(at::SDPBackend::flash_attention)
             ? static_cast<int64_t>(at::SDPBackend::overrideable)
             : on_cpu;
}

using ForwardResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt,
               c10::SymInt, at::Tensor, at::Tensor, at::Tensor>;

ForwardResult attention(const at::Tensor& query, const at::Tensor& key,
                        const at::Tensor& value,
                        const std::optional<at::Tensor>& bias, double dropout_p,
                        bool is_causal, bool, std::optional<double> scale) {
  HostCall call;
  const at::Tensor q = call.alias(query);
  const at::Tensor k = call.alias(key);
  const at::Tensor v = call.alias(value);
  const std::optional<at::Tensor> b = call.alias(bias);

  at::Tensor output, logsumexp;
  at::Tensor seed = at::zeros({}, q.options().dtype(at::kLong));
  if (dropout_p > 0) {
    seed.random_(host_generator({}));  // one draw a call, not negative
    // The query's layout, as the kernels of the CPU and of cards give it.
    output = q.size(3) == v.size(3)
                 ? at::empty_like(q)
                 : at::empty({q.size(0), q.size(2), q.size(1), v.size(3)},
                             q.options())
                       .transpose(1, 2);
    logsumexp = at::empty({q.size(0), q.size(1), q.size(2)},
                          q.options().dtype(compute_type(q)));
    forward(make_problem(q, k, v, b, dropout_p, is_causal, scale,
                         static_cast<uint64_t>(seed.item<int64_t>())),
            output, logsumexp);
  } else {
    std::tie(output, logsumexp) =
        at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal,
                                                        b, scale);
  }
  return {call.adopt(output), call.adopt(logsumexp), at::Tensor(),
          at::Tensor(),       query.sym_size(2),     key.sym_size(2),
          call.adopt(seed),   at::Tensor(),          at::Tensor()};
}

using BackwardResult =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

BackwardResult attention_backward(
    const at::Tensor& grad_output, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
    std::array<bool, 4> wanted, const at::Tensor& output,
    const at::Tensor& logsumexp, const at::Tensor&, const at::Tensor&,
    c10::SymInt, c10::SymInt, double dropout_p, bool is_causal,
    const at::Tensor& seed, const at::Tensor&, std::optional<double> scale) {
  TORCH_CHECK(!wanted[3] || !bias.defined(),
              "fused attention on sim has no gradient for attn_mask; "
              "scaled_dot_product_attention takes the math path for it");
  HostCall call;
  const at::Tensor q = call.alias(query);
  const at::Tensor k = call.alias(key);
  const at::Tensor v = call.alias(value);
  const at::Tensor grad = call.alias(grad_output);
  const at::Tensor out = call.alias(output);
  const at::Tensor lse = call.alias(logsumexp);
  const auto b = call.alias(std::optional(bias));

  Gradients gradients;
  if (dropout_p > 0) {
    gradients = {at::empty_like(q), at::empty_like(k), at::empty_like(v)};
    const auto seed_value = call.alias(seed).item<int64_t>();
    backward(make_problem(q, k, v, b, dropout_p, is_causal, scale,
                          static_cast<uint64_t>(seed_value)),
             grad, out, lse, gradients);
  } else {
    std::tie(gradients.query, gradients.key, gradients.value) =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, b, scale);
  }
  return {call.adopt(gradients.query), call.adopt(gradients.key),
          call.adopt(gradients.value), at::Tensor()};
}

}  // namespace

void register_attention() {
  torch::Library& aten = device_kernels();
  aten.impl("_fused_sdp_choice", TORCH_FN(choose_backend));
  // scaled_dot_product_attention asks the stub, not the operator.
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(
      &choose_backend);
  aten.impl("_scaled_dot_product_fused_attention_overrideable",
            TORCH_FN(attention));
  aten.impl("_scaled_dot_product_fused_attention_overrideable_backward",
            TORCH_FN(attention_backward));
}

}  // namespace memscale::sim
