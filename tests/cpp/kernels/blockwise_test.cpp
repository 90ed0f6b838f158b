#include "memscale/kernels/blockwise.h"

#include <rapidcheck.h>

#include <algorithm>
#include <set>
#include <span>

#include "kernel_cases.h"

namespace memscale::kernels {
namespace {

struct Quantised {
  std::vector<std::uint8_t> codes;
  std::vector<float> absmax;
};

Quantised quantised(Quantise* quantise, const std::vector<float>& values) {
  // One more of each, to see that nothing else is written.
  Quantised result{std::vector<std::uint8_t>(values.size() + 1, 0xA5),
                   std::vector<float>(num_blocks(values.size()) + 1, 0xA5)};
  quantise(values.data(), values.size(), result.codes.data(),
           result.absmax.data());
  EXPECT_EQ(result.codes.back(), 0xA5);
  EXPECT_EQ(result.absmax.back(), 0xA5);
  result.codes.pop_back();
  result.absmax.pop_back();
  return result;
}

std::vector<float> dequantised(Dequantise* dequantise, const Quantised& from) {
  std::vector<float> values(from.codes.size() + 1, 0xA5);
  dequantise(from.codes.data(), from.absmax.data(), from.codes.size(),
             values.data());
  EXPECT_EQ(values.back(), 0xA5);
  values.pop_back();
  return values;
}

TEST(MapValues, AreThePublishedOnes) {
  const std::span s(map_values(Map::Signed), 256);
  const std::span u(map_values(Map::Unsigned), 256);
  for (const std::span<const float> map : {s, u}) {
    EXPECT_TRUE(std::ranges::is_sorted(map));
    EXPECT_EQ(std::set<float>(map.begin(), map.end()).size(), 256);
    EXPECT_EQ(map.back(), 1.0F);
  }
  EXPECT_EQ(s[kSignedZero], 0.0F);
  EXPECT_EQ(u[kUnsignedZero], 0.0F);
  for (int k = 1; k <= 127; ++k) EXPECT_EQ(s[127 + k], -s[127 - k]);
  // The middles of two parts of [0.1, 1] at 1e-5; of the last of 64 and of 128.
  EXPECT_EQ(s[129], 0.325e-5F);
  EXPECT_EQ(s[130], 0.775e-5F);
  EXPECT_EQ(s[254], static_cast<float>(1 - 0.45 / 64));
  EXPECT_EQ(u[1], 0.325e-6F);
  EXPECT_EQ(u[254], static_cast<float>(1 - 0.45 / 128));
}

TEST(NumBlocks, CountsTheLastOne) {
  EXPECT_EQ(num_blocks(0), 0);
  EXPECT_EQ(num_blocks(1), 1);
  EXPECT_EQ(num_blocks(256), 1);
  EXPECT_EQ(num_blocks(257), 2);
}

// Every table beside the reference, which is slow and so asked only once.
void check_values(const std::vector<float>& values) {
  const KernelTable& reference = reference_kernels();
  const Quantised m_wanted = quantised(reference.quantise_signed, values);
  const Quantised v_wanted = quantised(reference.quantise_unsigned, values);
  const std::vector<float> m_back =
      dequantised(reference.dequantise_signed, m_wanted);
  const std::vector<float> v_back =
      dequantised(reference.dequantise_unsigned, v_wanted);
  for (const KernelTable* k : kernels_under_test()) {
    SCOPED_TRACE(k->name);
    const Quantised m = quantised(k->quantise_signed, values);
    const Quantised v = quantised(k->quantise_unsigned, values);
    ASSERT_TRUE(same_bits(m.codes, m_wanted.codes));
    ASSERT_TRUE(same_bits(m.absmax, m_wanted.absmax));
    ASSERT_TRUE(same_bits(v.codes, v_wanted.codes));
    ASSERT_TRUE(same_bits(v.absmax, v_wanted.absmax));
    ASSERT_TRUE(same_bits(dequantised(k->dequantise_signed, m), m_back));
    ASSERT_TRUE(same_bits(dequantised(k->dequantise_unsigned, v), v_back));
  }
}

TEST(AllBlockwise, EqualTheReference) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(to_string(c));
    check_values(values_of(c, 1));
  }
}

// All of [0, 1], both signs, at a stride that is longer below 2^-26.
TEST(AllBlockwise, FindTheNearestThroughout) {
  std::vector<float> values;
  for (std::uint32_t bits = 0; bits < 127U << 23U;
       bits += bits < 101U << 23U ? 99'991 : 997) {
    if (values.size() % kBlock == 0) values.push_back(1.0F);
    values.push_back(std::bit_cast<float>(bits | bits << 31U));
  }
  check_values(values);
}

class Blockwise : public EveryTable {
 protected:
  const KernelTable& k_ = *GetParam();
  const KernelTable& reference_ = reference_kernels();
};

TEST_P(Blockwise, EveryCodeIsItsValue) {
  Quantised all{std::vector<std::uint8_t>(256), {1.0F}};
  for (int i = 0; i < 256; ++i) all.codes[i] = static_cast<std::uint8_t>(i);
  const std::vector<float> m = dequantised(k_.dequantise_signed, all);
  const std::vector<float> v = dequantised(k_.dequantise_unsigned, all);
  EXPECT_TRUE(std::equal(m.begin(), m.end(), map_values(Map::Signed)));
  EXPECT_TRUE(std::equal(v.begin(), v.end(), map_values(Map::Unsigned)));
  // The largest magnitude is 1, so each value comes back to its own code.
  EXPECT_EQ(quantised(k_.quantise_signed, m).codes, all.codes);
  EXPECT_EQ(quantised(k_.quantise_unsigned, v).codes, all.codes);
}

// Around each middle of two neighbours, where a wrong bit would show.
TEST_P(Blockwise, GoesOverAtTheMiddle) {
  for (const Map map : {Map::Signed, Map::Unsigned}) {
    const std::span table(map_values(map), 256);
    std::vector<float> values;
    for (std::size_t i = 0; i + 1 < table.size(); ++i) {
      float x = static_cast<float>((double{table[i]} + table[i + 1]) / 2);
      for (int step = 0; step < 8; ++step) x = std::nextafter(x, -2.0F);
      for (int step = 0; step < 16; ++step) {
        values.push_back(x);
        x = std::nextafter(x, 2.0F);
      }
    }
    // Each block begins with a 1, so that its values are divided by one.
    std::vector<float> ones;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (ones.size() % kBlock == 0) ones.push_back(1.0F);
      ones.push_back(values[i]);
    }
    const bool is_signed = map == Map::Signed;
    const Quantised got =
        quantised(is_signed ? k_.quantise_signed : k_.quantise_unsigned, ones);
    const Quantised wanted = quantised(
        is_signed ? reference_.quantise_signed : reference_.quantise_unsigned,
        ones);
    ASSERT_TRUE(same_bits(got.codes, wanted.codes));
  }
}

// Note [positive stays positive], in blockwise.h; in a whole block and in a
// short one, at several scales.
TEST_P(Blockwise, PositiveStaysPositive) {
  const float smallest = map_values(Map::Unsigned)[1];
  const float denormal = std::numeric_limits<float>::denorm_min();
  const float normal = std::numeric_limits<float>::min();
  const float zeros[] = {0.0F, -0.0F, -denormal, -normal, -1e-7F, -1.0F};
  const float ones[] = {denormal,        3 * denormal,    normal,
                        1e-20F,          1e-8F,           0x1p-23F,
                        smallest * 0.4F, smallest * 0.6F, smallest};
  for (const float scale : {1.0F, 0x1p60F, 0x1p-100F, 0x1p-126F}) {
    std::vector<float> values;
    std::vector<std::uint8_t> wanted;
    while (values.size() < kBlock + 20) {
      if (values.size() % kBlock == 0) {
        values.push_back(scale);
        wanted.push_back(255);
      }
      const std::size_t i = values.size() % kBlock;
      const bool is_zero = i % 2 == 0;
      const float x = (is_zero ? zeros[i / 2 % 6] : ones[i / 2 % 9]) * scale;
      values.push_back(x);
      wanted.push_back(x > 0 ? 1 : 0);
    }
    const Quantised got = quantised(k_.quantise_unsigned, values);
    ASSERT_TRUE(same_bits(got.codes, wanted)) << scale;
    const std::vector<float> back = dequantised(k_.dequantise_unsigned, got);
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(back[i] > 0, values[i] > 0) << values[i] << " of " << scale;
    }
  }
}

TEST_P(Blockwise, NonFiniteBlocksComeBackAsNan) {
  for (const Pattern pattern : {Pattern::OneNan, Pattern::OneInfinity}) {
    const std::vector<float> values = values_of({600, pattern}, 2);
    const Quantised m = quantised(k_.quantise_signed, values);
    const std::vector<float> back = dequantised(k_.dequantise_signed, m);
    EXPECT_TRUE(std::all_of(back.begin(), back.begin() + 256,
                            [](float x) { return std::isnan(x); }));
    EXPECT_TRUE(std::all_of(back.begin() + 256, back.end(),
                            [](float x) { return std::isfinite(x); }));
  }
}

TEST_P(Blockwise, BlocksStandAlone) {
  const std::vector<float> values = values_of({4096 + 100, Pattern::Wide}, 3);
  const Quantised whole = quantised(k_.quantise_signed, values);
  for (std::size_t i = 0; i < values.size(); i += 3 * kBlock) {
    const std::size_t size = std::min(3 * kBlock, values.size() - i);
    const Quantised part = quantised(
        k_.quantise_signed, {values.begin() + i, values.begin() + i + size});
    EXPECT_TRUE(std::equal(part.codes.begin(), part.codes.end(),
                           whole.codes.begin() + i));
    EXPECT_TRUE(std::equal(part.absmax.begin(), part.absmax.end(),
                           whole.absmax.begin() + i / kBlock));
  }
}

// Generated values over and over, up to more than a block: whole blocks and
// others go different ways.
std::vector<float> repeated(const std::vector<float>& values) {
  std::vector<float> result = values;
  while (!values.empty() && result.size() < kBlock + 20) {
    result.insert(result.end(), values.begin(), values.end());
  }
  return result;
}

TEST_P(Blockwise, ErrsByAtMostHalfAStep) {
  EXPECT_TRUE(rc::check("error", [this](const std::vector<float>& drawn) {
    RC_PRE(std::ranges::all_of(drawn, [](float x) {
      return std::isfinite(x) && std::abs(x) < 1e30F;
    }));
    const std::vector<float> values = repeated(drawn);
    const Quantised m = quantised(k_.quantise_signed, values);
    const std::vector<float> back = dequantised(k_.dequantise_signed, m);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const float absmax = m.absmax[i / kBlock];
      // Half of the widest gap, 0.9 / 64, of a block's largest magnitude; all
      // of the half gap from the last value to -1.
      RC_ASSERT(std::abs(back[i] - values[i]) <=
                std::max(absmax * 0.00704F, 0x1p-126F));
    }
  }));
}

TEST_P(Blockwise, CodesAreTheNearest) {
  EXPECT_TRUE(
      rc::check("nearest", [this](const std::vector<std::uint32_t>& draws) {
        std::vector<float> values = {1.0F};
        for (const std::uint32_t bits : draws) {
          // Any float of magnitude below 1, by 30 exponents.
          const std::uint32_t exponent = 126 - (bits >> 1U) % 30;
          values.push_back(
              std::bit_cast<float>(bits << 31U | exponent << 23U | bits >> 9U));
        }
        values = repeated(values);
        const Quantised m = quantised(k_.quantise_signed, values);
        const Quantised v = quantised(k_.quantise_unsigned, values);
        RC_ASSERT(m.codes ==
                  quantised(reference_.quantise_signed, values).codes);
        RC_ASSERT(v.codes ==
                  quantised(reference_.quantise_unsigned, values).codes);
      }));
}

MEMSCALE_FOR_EVERY_TABLE(Blockwise);

}  // namespace
}  // namespace memscale::kernels
