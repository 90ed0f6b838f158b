#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "memscale/kernels/kernels.h"

// The case table that every table of kernels is run through, and how its
// results are compared with the reference's: by bits, all NaNs being equal.

namespace memscale::kernels {

enum class Pattern {
  Normal,
  Wide,       // magnitudes from 1e-30 to 1e30
  Denormals,  // about the smallest normal number
  Huge,       // 1e30, whose square is infinite
  Zeros,      // of both signs
  Sparse,     // mostly zeros, whole blocks too
  Steep,      // magnitudes from 1 down to the smallest, in every block
  OneNan,
  OneInfinity,
};

struct Case {
  std::size_t count;
  Pattern pattern;
};

inline std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const std::size_t count : {0, 1, 255, 256, 257, 4096}) {
    for (int i = 0; i <= static_cast<int>(Pattern::OneInfinity); ++i) {
      cases.push_back({count, static_cast<Pattern>(i)});
    }
  }
  cases.push_back({100003, Pattern::Normal});
  cases.push_back({100003, Pattern::Wide});
  return cases;
}

inline std::string to_string(const Case& c) {
  constexpr const char* kNames[] = {"Normal", "Wide",   "Denormals",
                                    "Huge",   "Zeros",  "Sparse",
                                    "Steep",  "OneNan", "OneInfinity"};
  return std::string(kNames[static_cast<int>(c.pattern)]) + " x " +
         std::to_string(c.count);
}

inline float draw_value(Pattern pattern, std::size_t i, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(-30, 30);
  const float sign = (random() & 1U) != 0 ? 1.0F : -1.0F;
  switch (pattern) {
    case Pattern::Normal:
      return normal(random);
    case Pattern::Wide:
      return sign * std::pow(10.0F, uniform(random));
    case Pattern::Denormals:
      return std::ldexp(normal(random), -127 - static_cast<int>(i / 512));
    case Pattern::Huge:
      return 1e30F * normal(random);
    case Pattern::Zeros:
      return sign * 0.0F;
    case Pattern::Sparse:
      return i / kBlock % 2 == 0 && i % 17 == 0 ? normal(random) : sign * 0.0F;
    case Pattern::Steep:
      return std::ldexp(sign, -static_cast<int>(i % 150));
    case Pattern::OneNan:
      return i % 1000 == 5 ? std::numeric_limits<float>::quiet_NaN()
                           : normal(random);
    case Pattern::OneInfinity:
      return i % 1000 == 7 ? sign * std::numeric_limits<float>::infinity()
                           : normal(random);
  }
  return 0;
}

inline std::vector<float> values_of(const Case& c, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<float> values(c.count);
  for (std::size_t i = 0; i < c.count; ++i) {
    values[i] = draw_value(c.pattern, i, random);
  }
  return values;
}

inline std::uint32_t bits_of(float x) {
  return std::isnan(x) ? 0x7FC00000U : std::bit_cast<std::uint32_t>(x);
}
inline std::uint32_t bits_of(Bf16 x) {
  return (x.bits & 0x7FFFU) > 0x7F80U ? 0x7FC0U : x.bits;
}
inline std::uint32_t bits_of(Fp16 x) {
  return (x.bits & 0x7FFFU) > 0x7C00U ? 0x7E00U : x.bits;
}
inline std::uint32_t bits_of(std::uint8_t x) { return x; }

// The first difference, if any.
template <typename T>
testing::AssertionResult same_bits(const std::vector<T>& got,
                                   const std::vector<T>& wanted) {
  if (got.size() != wanted.size()) {
    return testing::AssertionFailure() << "sizes differ";
  }
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (bits_of(got[i]) == bits_of(wanted[i])) continue;
    return testing::AssertionFailure()
           << "element " << i << ": bits " << std::hex << bits_of(got[i])
           << ", reference " << bits_of(wanted[i]);
  }
  return testing::AssertionSuccess();
}

// A test body for each table there is; `kernels_under_test` is where tables
// that are not CPU levels join.
const std::vector<const KernelTable*>& kernels_under_test();

class EveryTable : public testing::TestWithParam<const KernelTable*> {};

#define MEMSCALE_FOR_EVERY_TABLE(suite)                        \
  INSTANTIATE_TEST_SUITE_P(                                    \
      Kernels, suite, testing::ValuesIn(kernels_under_test()), \
      [](const auto& table) { return std::string(table.param->name); })

}  // namespace memscale::kernels
