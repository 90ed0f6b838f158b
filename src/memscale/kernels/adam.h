#pragma once

#include <cstddef>
#include <cstdint>

// One step of Adam or AdamW over a range of elements, in one pass. What is done
// to an element, in float and in this order (each operation rounded, none
// fused, so that every implementation gives the same bits):
//
//   g     = grad * grad_multiplier + l2 * param
//   param = param * decay
//   m     = beta1 * m + one_minus_beta1 * g
//   v     = beta2 * v + (one_minus_beta2 * g) * g
//   denom = sqrt(v) * inverse_bias_correction2_sqrt + eps
//   param = param - (step_size * m) / denom
//
// This is torch's AdamW and Adam up to the rounding of single operations. The
// step is taken with the new m and v as they are before being quantised.

namespace memscale::kernels {

// torch.optim's arguments, in double as Python has them.
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  bool decoupled = true;  // AdamW; false: weight decay is added to the gradient
  bool maximize = false;
};

// The coefficients of one step, each computed in double and rounded once.
struct AdamStep {
  float grad_multiplier = 1;  // 1 / loss scale; negative to maximize
  float l2 = 0;
  float decay = 1;
  float beta1 = 0;
  float one_minus_beta1 = 0;
  float beta2 = 0;
  float one_minus_beta2 = 0;
  float inverse_bias_correction2_sqrt = 1;
  float eps = 0;
  float step_size = 0;

  // Bf16 parameters only: round up or down at random, in proportion to the
  // distance, instead of to nearest. The draw is a hash of the seed and the
  // element's index, so it does not depend on how the work is split. Take
  // another seed for each tensor and step. See Note [stochastic rounding].
  bool stochastic_rounding = false;
  std::uint64_t seed = 0;
};

// The coefficients of step number `step`, counted from 1. `grad_multiplier` is
// what gradients are still to be multiplied by (1 / loss scale).
AdamStep adam_step(const AdamOptions& options, std::int64_t step,
                   double grad_multiplier = 1);

// Moments at one byte each: m by the signed map, v by the unsigned, one absmax
// for each block (see blockwise.h). With absmax 0 all codes mean 0, so memory
// full of zeros is a state of zeros.
struct State8 {
  std::uint8_t* m = nullptr;
  std::uint8_t* v = nullptr;
  float* m_absmax = nullptr;
  float* v_absmax = nullptr;
};

// Moments as floats of type S.
template <typename S>
struct State {
  S* m = nullptr;
  S* v = nullptr;
};

// `first` is the index in its tensor of the first element given; a multiple of
// kBlock. All pointers are to that element (absmax: to its block).
template <typename P>
using Adam8 = void(const AdamStep& step, P* params, const P* grads,
                   const State8& state, std::size_t count, std::uint64_t first);

template <typename P, typename S>
using Adam = void(const AdamStep& step, P* params, const P* grads,
                  const State<S>& state, std::size_t count,
                  std::uint64_t first);

}  // namespace memscale::kernels
