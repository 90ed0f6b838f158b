#include "memscale/kernels/adam.h"

#include <cmath>

namespace memscale::kernels {

AdamStep adam_step(const AdamOptions& options, std::int64_t step,
                   double grad_multiplier) {
  const auto number = static_cast<double>(step);
  const double correction1 = 1 - std::pow(options.beta1, number);
  const double correction2 = 1 - std::pow(options.beta2, number);
  const double decay = options.weight_decay;
  AdamStep result;
  result.grad_multiplier =
      static_cast<float>(options.maximize ? -grad_multiplier : grad_multiplier);
  result.l2 = static_cast<float>(options.decoupled ? 0 : decay);
  result.decay =
      static_cast<float>(options.decoupled ? 1 - options.lr * decay : 1);
  result.beta1 = static_cast<float>(options.beta1);
  result.one_minus_beta1 = static_cast<float>(1 - options.beta1);
  result.beta2 = static_cast<float>(options.beta2);
  result.one_minus_beta2 = static_cast<float>(1 - options.beta2);
  result.inverse_bias_correction2_sqrt =
      static_cast<float>(1 / std::sqrt(correction2));
  result.eps = static_cast<float>(options.eps);
  result.step_size = static_cast<float>(options.lr / correction1);
  return result;
}

}  // namespace memscale::kernels
