#include "memscale/runtime/observe/kernel_flags.h"

#include <ATen/Context.h>

#include <array>

namespace memscale {
namespace {

struct Flag {
  bool (*get)(const at::Context&);
  void (*set)(at::Context&, bool);
};

template <auto kGet, auto kSet>
constexpr Flag flag() {
  return {[](const at::Context& context) { return (context.*kGet)(); },
          [](at::Context& context, bool on) { (context.*kSet)(on); }};
}

constexpr std::array kFlags = {
    flag<&at::Context::userEnabledMkldnn, &at::Context::setUserEnabledMkldnn>(),
    flag<&at::Context::deterministicMkldnn,
         &at::Context::setDeterministicMkldnn>(),
    flag<&at::Context::userEnabledCuDNN, &at::Context::setUserEnabledCuDNN>(),
    flag<&at::Context::benchmarkCuDNN, &at::Context::setBenchmarkCuDNN>(),
    flag<&at::Context::deterministicCuDNN,
         &at::Context::setDeterministicCuDNN>(),
    Flag{[](const at::Context& context) {
           return context.deterministicAlgorithms();
         },
         [](at::Context& context, bool on) {
           context.setDeterministicAlgorithms(
               on, context.deterministicAlgorithmsWarnOnly());
         }},
};
static_assert(kFlags.size() <= 8 * sizeof(KernelFlags));

void set_flags(KernelFlags from, KernelFlags to) {
  for (std::size_t i = 0; i < kFlags.size(); ++i) {
    const unsigned bit = 1U << i;
    if (((from ^ to) & bit) != 0) {
      kFlags[i].set(at::globalContext(), (to & bit) != 0);
    }
  }
}

}  // namespace

KernelFlags kernel_flags() {
  unsigned flags = 0;
  for (std::size_t i = 0; i < kFlags.size(); ++i) {
    if (kFlags[i].get(at::globalContext())) flags |= 1U << i;
  }
  return static_cast<KernelFlags>(flags);
}

Tf32 allowed_tf32() {
  const at::Context& context = at::globalContext();
  // The older switches cannot be read once the newer ones have been set.
  const auto is_tf32 = [&](at::Float32Op op) {
    return context.float32Precision(at::Float32Backend::CUDA, op) ==
           at::Float32Precision::TF32;
  };
  return {.matmuls = is_tf32(at::Float32Op::MATMUL),
          .convolutions = is_tf32(at::Float32Op::CONV)};
}

KernelFlagsGuard::KernelFlagsGuard(KernelFlags flags)
    : before_(kernel_flags()), during_(flags) {
  set_flags(before_, during_);
}

KernelFlagsGuard::~KernelFlagsGuard() { set_flags(during_, before_); }

}  // namespace memscale
