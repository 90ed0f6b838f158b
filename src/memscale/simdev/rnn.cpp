// Recurrent layers. torch sends LSTM and GRU on an accelerator to fused cells
// that have no CPU kernel; and the CPU itself trains a float LSTM through a
// fused oneDNN layer. The device takes that layer where the CPU does, which
// keeps both bit-equal, and has fused cells for everything else.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "memscale/simdev/host_call.h"
#include "memscale/simdev/registration.h"

namespace memscale::sim {
namespace {

using Tensor = at::Tensor;
using TensorTriple = std::tuple<Tensor, Tensor, Tensor>;

// oneDNN's number for an LSTM, as mkldnn_rnn_layer takes it.
constexpr int64_t kLstmMode = 2;

// Layer by layer and direction by direction through oneDNN's fused layer,
// which is differentiable.
TensorTriple lstm_layers(const Tensor& input, at::TensorList hx,
                         at::TensorList params, bool has_biases,
                         int64_t num_layers, double dropout_p, bool train,
                         bool bidirectional, bool batch_first) {
  const Tensor h0 = hx[0].contiguous();
  const Tensor c0 = hx[1].contiguous();
  const int64_t num_directions = bidirectional ? 2 : 1;
  const size_t per_direction = has_biases ? 4 : 2;
  std::vector<Tensor> all_h, all_c;
  Tensor x = (batch_first ? input.transpose(0, 1) : input).contiguous();
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < num_directions; ++direction) {
      const int64_t index = layer * num_directions + direction;
      const Tensor* weights = &params[per_direction * index];
      const auto bias = [&](size_t i) {
        return has_biases ? weights[i]
                          : at::zeros(weights[i - 2].sizes(),
                                      weights[i - 2].options());
      };
      auto [y, hy, cy, workspace] = at::mkldnn_rnn_layer(
          x, weights[0], weights[1], bias(2), bias(3), h0[index], c0[index],
          /*reverse=*/direction > 0, /*batch_sizes=*/{}, kLstmMode, h0.size(2),
          num_layers, has_biases, bidirectional, batch_first, train);
      outputs.push_back(y);
      all_h.push_back(hy);
      all_c.push_back(cy);
    }
    x = num_directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (dropout_p != 0 && train && layer + 1 < num_layers) {
      x = at::dropout(x, dropout_p, /*train=*/true);
    }
  }
  return {batch_first ? x.transpose(0, 1) : x, at::stack(all_h, 0),
          at::stack(all_c, 0)};
}

TensorTriple lstm(const Tensor& input, at::TensorList hx, at::TensorList params,
                  bool has_biases, int64_t num_layers, double dropout_p,
                  bool train, bool bidirectional, bool batch_first) {
  const bool is_float = input.scalar_type() == at::kFloat && hx.size() == 2 &&
                        hx[0].scalar_type() == at::kFloat && !params.empty() &&
                        params[0].scalar_type() == at::kFloat;
  // A projection makes the hidden state narrower than the cell state.
  const bool projects = hx.size() == 2 && hx[0].size(-1) != hx[1].size(-1);
  const int64_t num_params =
      num_layers * (bidirectional ? 2 : 1) * (has_biases ? 4 : 2);
  if (is_float && !projects && input.numel() != 0 && input.dim() == 3 &&
      static_cast<int64_t>(params.size()) == num_params &&
      at::globalContext().userEnabledMkldnn()) {
    return lstm_layers(input, hx, params, has_biases, num_layers, dropout_p,
                       train, bidirectional, batch_first);
  }
  return at::native::lstm(input, hx, params, has_biases, num_layers, dropout_p,
                          train, bidirectional, batch_first);
}

Tensor or_zero(HostCall& call, const std::optional<Tensor>& tensor,
               const Tensor& like) {
  const auto given = call.alias(tensor);
  return given ? *given : at::zeros(like.sizes(), like.options());
}

Tensor add_bias(HostCall& call, const Tensor& gates,
                const std::optional<Tensor>& bias) {
  const auto given = call.alias(bias);
  return given ? gates + *given : gates;
}

// The workspace holds the activated gates i, f, g, o side by side.
TensorTriple lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                       const Tensor& cx, const std::optional<Tensor>& b_input,
                       const std::optional<Tensor>& b_hidden) {
  HostCall call;
  Tensor workspace = add_bias(call, call.alias(input_gates), b_input) +
                     add_bias(call, call.alias(hidden_gates), b_hidden);
  auto gates = workspace.unsafe_chunk(4, 1);
  const Tensor i = gates[0].sigmoid_();
  const Tensor f = gates[1].sigmoid_();
  const Tensor g = gates[2].tanh_();
  const Tensor o = gates[3].sigmoid_();
  const Tensor cy = f * call.alias(cx) + i * g;
  const Tensor hy = o * cy.tanh();
  return {call.adopt(hy), call.adopt(cy), call.adopt(workspace)};
}

// Gradients of the pre-activation gates, of cx, and of the biases.
TensorTriple lstm_cell_backward(const std::optional<Tensor>& grad_hy,
                                const std::optional<Tensor>& grad_cy,
                                const Tensor& cx, const Tensor& cy,
                                const Tensor& workspace, bool has_bias) {
  HostCall call;
  const Tensor host_cy = call.alias(cy);
  auto gates = call.alias(workspace).unsafe_chunk(4, 1);
  const Tensor &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const Tensor dh = or_zero(call, grad_hy, host_cy);
  const Tensor tanh_c = host_cy.tanh();
  const Tensor dc =
      or_zero(call, grad_cy, host_cy) + dh * o * (1 - tanh_c * tanh_c);
  const Tensor grad_gates =
      at::cat({dc * g * i * (1 - i), dc * call.alias(cx) * f * (1 - f),
               dc * i * (1 - g * g), dh * tanh_c * o * (1 - o)},
              1);
  const Tensor grad_bias =
      has_bias ? grad_gates.sum(0, /*keepdim=*/false) : Tensor();
  return {call.adopt(grad_gates), call.adopt(dc * f), call.adopt(grad_bias)};
}

// The workspace holds r, z, n, hx and the hidden part of n before the gate.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates,
                                    const Tensor& hidden_gates,
                                    const Tensor& hx,
                                    const std::optional<Tensor>& b_input,
                                    const std::optional<Tensor>& b_hidden) {
  HostCall call;
  auto from_x =
      add_bias(call, call.alias(input_gates), b_input).unsafe_chunk(3, 1);
  auto from_h =
      add_bias(call, call.alias(hidden_gates), b_hidden).unsafe_chunk(3, 1);
  const Tensor h = call.alias(hx);
  const Tensor r = (from_x[0] + from_h[0]).sigmoid_();
  const Tensor z = (from_x[1] + from_h[1]).sigmoid_();
  const Tensor n = (from_x[2] + r * from_h[2]).tanh_();
  const Tensor hy = (h - n) * z + n;
  return {call.adopt(hy), call.adopt(at::cat({r, z, n, h, from_h[2]}, 1))};
}

// Gradients of input gates, hidden gates, hx, input bias and hidden bias.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  HostCall call;
  const Tensor dh = call.alias(grad_hy);
  auto saved = call.alias(workspace).unsafe_chunk(5, 1);
  const Tensor &r = saved[0], &z = saved[1], &n = saved[2], &h = saved[3],
               &hidden_n = saved[4];
  const Tensor dn = dh * (1 - z) * (1 - n * n);
  const Tensor dz = dh * (h - n) * z * (1 - z);
  const Tensor dr = dn * hidden_n * r * (1 - r);
  const Tensor grad_input = at::cat({dr, dz, dn}, 1);
  const Tensor grad_hidden = at::cat({dr, dz, dn * r}, 1);
  Tensor grad_b_input, grad_b_hidden;
  if (has_bias) {
    grad_b_input = grad_input.sum(0, /*keepdim=*/false);
    grad_b_hidden = grad_hidden.sum(0, /*keepdim=*/false);
  }
  return {call.adopt(grad_input), call.adopt(grad_hidden), call.adopt(dh * z),
          call.adopt(grad_b_input), call.adopt(grad_b_hidden)};
}

}  // namespace

void register_rnn() {
  torch::Library& kernels = device_kernels();
  kernels.impl("lstm.input", TORCH_FN(lstm));
  kernels.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  kernels.impl("_thnn_fused_lstm_cell_backward_impl",
               TORCH_FN(lstm_cell_backward));
  kernels.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  kernels.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  static auto* composite = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1,
      __FILE__, __LINE__);
  composite->impl("lstm.input", TORCH_FN(lstm));
}

}  // namespace memscale::sim
