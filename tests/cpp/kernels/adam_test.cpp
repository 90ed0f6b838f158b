#include "memscale/kernels/adam.h"

#include <algorithm>

#include "kernel_cases.h"

namespace memscale::kernels {
namespace {

float to_float(Bf16 x) {
  return std::bit_cast<float>(std::uint32_t{x.bits} << 16U);
}

template <typename P>
std::vector<P> converted(const std::vector<float>& values) {
  std::vector<P> result(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(values[i]);
    if constexpr (std::is_same_v<P, float>) {
      result[i] = values[i];
    } else if constexpr (std::is_same_v<P, Bf16>) {
      result[i].bits = static_cast<std::uint16_t>(bits >> 16U);
    } else {
      // Any bits do; fp16 has no room for the patterns' exponents.
      result[i].bits = static_cast<std::uint16_t>(bits >> 12U);
    }
  }
  return result;
}

// Parameters and state of one kind, stepped by the kernels of one table.
template <typename P, typename S>
struct Training {
  std::vector<P> params;
  std::vector<S> m;
  std::vector<S> v;
  std::vector<float> m_absmax;
  std::vector<float> v_absmax;

  explicit Training(std::vector<P> initial)
      : params(std::move(initial)), m(params.size()), v(params.size()) {
    if constexpr (std::is_same_v<S, std::uint8_t>) {
      std::ranges::fill(m, kSignedZero);
      m_absmax.resize(num_blocks(params.size()));
      v_absmax.resize(num_blocks(params.size()));
    }
  }

  void step(const KernelTable& k, const AdamStep& coefficients,
            const std::vector<P>& grads, std::size_t begin = 0,
            std::size_t end = SIZE_MAX) {
    const std::size_t count = std::min(end, params.size()) - begin;
    P* p = params.data() + begin;
    const P* g = grads.data() + begin;
    if constexpr (std::is_same_v<S, std::uint8_t>) {
      const State8 state{m.data() + begin, v.data() + begin,
                         m_absmax.data() + begin / kBlock,
                         v_absmax.data() + begin / kBlock};
      if constexpr (std::is_same_v<P, float>) {
        k.adam8_f32(coefficients, p, g, state, count, begin);
      } else if constexpr (std::is_same_v<P, Bf16>) {
        k.adam8_bf16(coefficients, p, g, state, count, begin);
      } else {
        k.adam8_f16(coefficients, p, g, state, count, begin);
      }
    } else {
      const State<S> state{m.data() + begin, v.data() + begin};
      if constexpr (std::is_same_v<P, float>) {
        k.adam_f32(coefficients, p, g, state, count, begin);
      } else if constexpr (std::is_same_v<S, Bf16>) {
        k.adam_bf16_state_bf16(coefficients, p, g, state, count, begin);
      } else if constexpr (std::is_same_v<P, Bf16>) {
        k.adam_bf16_state_f32(coefficients, p, g, state, count, begin);
      } else {
        k.adam_f16_state_f32(coefficients, p, g, state, count, begin);
      }
    }
  }
};

template <typename P, typename S>
testing::AssertionResult same(const Training<P, S>& got,
                              const Training<P, S>& wanted) {
  const testing::AssertionResult results[] = {
      same_bits(got.params, wanted.params) << " (params)",
      same_bits(got.m, wanted.m) << " (m)",
      same_bits(got.v, wanted.v) << " (v)",
      same_bits(got.m_absmax, wanted.m_absmax) << " (absmax of m)",
      same_bits(got.v_absmax, wanted.v_absmax) << " (absmax of v)"};
  for (const auto& result : results) {
    if (!result) return result;
  }
  return testing::AssertionSuccess();
}

// Every table beside the reference, which is slow and so steps only once.
template <typename P, typename S>
void check_all_cases() {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(to_string(c));
    Training<P, S> wanted(
        converted<P>(values_of({c.count, Pattern::Normal}, 7)));
    std::vector<Training<P, S>> runs(kernels_under_test().size(), wanted);
    const int num_steps = c.count > 10'000 ? 2 : 6;
    for (int i = 1; i <= num_steps; ++i) {
      AdamOptions options;
      options.weight_decay = i % 3 == 0 ? 0 : 0.1;
      options.decoupled = i % 2 == 0;
      options.maximize = i == 4;
      AdamStep step = adam_step(options, i, i == 5 ? 1.0 / 1024 : 1);
      step.stochastic_rounding = i % 2 == 0;
      step.seed = static_cast<std::uint64_t>(i);
      // Patterns with one bad value: healthy first, then bad, then healthy.
      const bool healthy = i != 2 && c.pattern >= Pattern::OneNan;
      const std::vector<P> grads = converted<P>(
          values_of({c.count, healthy ? Pattern::Normal : c.pattern}, 10 + i));
      wanted.step(reference_kernels(), step, grads);
      for (std::size_t k = 0; k < runs.size(); ++k) {
        runs[k].step(*kernels_under_test()[k], step, grads);
        ASSERT_TRUE(same(runs[k], wanted))
            << kernels_under_test()[k]->name << ", step " << i;
      }
    }
  }
}

TEST(AllAdamKernels, EqualTheReferenceWithEightBitState) {
  check_all_cases<float, std::uint8_t>();
  check_all_cases<Bf16, std::uint8_t>();
  check_all_cases<Fp16, std::uint8_t>();
}

TEST(AllAdamKernels, EqualTheReferenceWithFloatState) {
  check_all_cases<float, float>();
  check_all_cases<Bf16, float>();
  check_all_cases<Bf16, Bf16>();
  check_all_cases<Fp16, float>();
}

class AdamKernels : public EveryTable {
 protected:
  const KernelTable& k_ = *GetParam();

  template <typename P, typename S>
  void check_splits() {
    const std::size_t count = 4096 + 77;
    const Case c{count, Pattern::Normal};
    const std::vector<P> grads = converted<P>(values_of(c, 3));
    AdamStep step = adam_step({}, 1);
    step.stochastic_rounding = true;
    Training<P, S> whole(converted<P>(values_of(c, 4)));
    Training<P, S> split = whole;
    whole.step(k_, step, grads);
    split.step(k_, step, grads, 2560, count);
    split.step(k_, step, grads, 0, 256);
    split.step(k_, step, grads, 256, 2560);
    ASSERT_TRUE(same(split, whole));
  }
};

TEST_P(AdamKernels, SplitsGiveTheSameBits) {
  check_splits<float, std::uint8_t>();
  check_splits<Bf16, std::uint8_t>();
  check_splits<Fp16, std::uint8_t>();
  check_splits<float, float>();
  check_splits<Bf16, float>();
  check_splits<Bf16, Bf16>();
  check_splits<Fp16, float>();
}

// The formulas of Adam in double, on a few elements.
TEST_P(AdamKernels, FollowsTheFormula) {
  for (const bool decoupled : {true, false}) {
    AdamOptions options;
    options.weight_decay = 0.1;
    options.decoupled = decoupled;
    Training<float, float> run({0.5F, -2.0F, 3.0F});
    std::vector<double> p = {0.5, -2.0, 3.0};
    std::vector<double> m(3);
    std::vector<double> v(3);
    for (int t = 1; t <= 20; ++t) {
      const std::vector<float> grads =
          values_of({3, Pattern::Normal}, static_cast<unsigned>(t));
      run.step(k_, adam_step(options, t), grads);
      for (int i = 0; i < 3; ++i) {
        double g = grads[i];
        if (decoupled) {
          p[i] *= 1 - options.lr * options.weight_decay;
        } else {
          g += options.weight_decay * p[i];
        }
        m[i] = options.beta1 * m[i] + (1 - options.beta1) * g;
        v[i] = options.beta2 * v[i] + (1 - options.beta2) * g * g;
        const double m_hat = m[i] / (1 - std::pow(options.beta1, t));
        const double v_hat = v[i] / (1 - std::pow(options.beta2, t));
        p[i] -= options.lr * m_hat / (std::sqrt(v_hat) + options.eps);
      }
    }
    for (int i = 0; i < 3; ++i) EXPECT_NEAR(run.params[i], p[i], 1e-6);
  }
}

// Many steps beside full-precision state: the byte-wide state must not drift.
TEST_P(AdamKernels, EightBitStateStaysNearFullPrecision) {
  const Case c{1000, Pattern::Normal};
  Training<float, std::uint8_t> small(values_of(c, 1));
  Training<float, float> full(values_of(c, 1));
  const std::vector<float> start = full.params;
  for (int t = 1; t <= 100; ++t) {
    const std::vector<float> grads =
        values_of(c, 100 + static_cast<unsigned>(t));
    small.step(k_, adam_step({}, t), grads);
    full.step(k_, adam_step({}, t), grads);
  }
  double moved = 0;
  double apart = 0;
  for (std::size_t i = 0; i < c.count; ++i) {
    moved += std::abs(full.params[i] - start[i]);
    apart += std::abs(full.params[i] - small.params[i]);
  }
  EXPECT_LT(apart, 0.05 * moved);
}

// Elements whose v is too small beside their block's largest to be told from 0,
// but whose m is not: see Note [positive stays positive] in blockwise.h.
TEST_P(AdamKernels, NoStepIsLargeWhenSmallGradientsEnd) {
  AdamOptions options;
  options.weight_decay = 0;
  const std::size_t count = kBlock + 50;  // a whole block and a short one
  const auto is_small = [](std::size_t i) { return i % 30 == 7; };
  Training<float, std::uint8_t> run(std::vector<float>(count, 0.0F));
  std::vector<float> grads(count, 1.0F);
  float largest = 0;  // of all steps
  for (int t = 1; t <= 60; ++t) {
    for (std::size_t i = 0; i < count; ++i) {
      if (is_small(i)) grads[i] = t <= 20 ? 1e-4F : 0.0F;
    }
    const std::vector<float> before = run.params;
    run.step(k_, adam_step(options, t), grads);
    for (std::size_t i = 0; i < count; ++i) {
      largest = std::max(largest, std::abs(run.params[i] - before[i]));
    }
  }
  EXPECT_LE(largest, 1.5 * options.lr);
}

TEST_P(AdamKernels, ZeroedMemoryIsAStateOfZeros) {
  const Case c{600, Pattern::Sparse};
  Training<float, std::uint8_t> run(values_of({600, Pattern::Normal}, 1));
  Training<float, std::uint8_t> zeroed = run;
  std::ranges::fill(zeroed.m, 0);
  run.step(k_, adam_step({}, 1), values_of(c, 2));
  zeroed.step(k_, adam_step({}, 1), values_of(c, 2));
  EXPECT_TRUE(same(zeroed, run));
}

TEST_P(AdamKernels, OneBadGradientMakesItsBlockNan) {
  Training<float, std::uint8_t> run(values_of({600, Pattern::Normal}, 1));
  std::vector<float> grads = values_of({600, Pattern::Normal}, 2);
  grads[300] = std::numeric_limits<float>::infinity();
  run.step(k_, adam_step({}, 1), grads);
  EXPECT_TRUE(std::isnan(run.params[300]));
  grads[300] = 0;
  run.step(k_, adam_step({}, 2), grads);
  for (std::size_t i = 0; i < 600; ++i) {
    EXPECT_EQ(std::isnan(run.params[i]), i / kBlock == 1) << i;
  }
}

TEST_P(AdamKernels, StochasticRoundingKeepsTheMean) {
  // A step of a hundredth of the distance between neighbours of 1 in bf16:
  // rounding to nearest would never move.
  const std::size_t count = 100'000;
  AdamOptions options;
  options.lr = 0x1p-7 / 100;
  options.weight_decay = 0;
  const std::vector<Bf16> ones(count, Bf16{0x3F80});
  const std::vector<Bf16> grads(count, Bf16{0xBF80});  // -1: upwards
  AdamStep step = adam_step(options, 1);
  Training<Bf16, float> nearest(ones);
  nearest.step(k_, step, grads);
  EXPECT_TRUE(same_bits(nearest.params, ones));
  step.stochastic_rounding = true;
  double means[2] = {};
  for (const int seed : {0, 1}) {
    step.seed = static_cast<std::uint64_t>(seed);
    Training<Bf16, float> run(ones);
    run.step(k_, step, grads);
    for (const Bf16 p : run.params) means[seed] += to_float(p) - 1;
    means[seed] /= static_cast<double>(count);
    // Standard deviation of the mean: 3 % of it.
    EXPECT_NEAR(means[seed], options.lr, 0.15 * options.lr);
  }
  EXPECT_NE(means[0], means[1]);
}

MEMSCALE_FOR_EVERY_TABLE(AdamKernels);

}  // namespace
}  // namespace memscale::kernels
