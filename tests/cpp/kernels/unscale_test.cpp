#include "kernel_cases.h"

namespace memscale::kernels {
namespace {

class Unscaling : public EveryTable {
 protected:
  const KernelTable& k_ = *GetParam();
  const KernelTable& reference_ = reference_kernels();
};

// Every 16-bit float there is, and floats of every exponent.
TEST_P(Unscaling, EqualsTheReference) {
  std::vector<Fp16> halves;
  std::vector<Bf16> brains;
  std::vector<float> floats;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    halves.push_back({static_cast<std::uint16_t>(bits)});
    brains.push_back({static_cast<std::uint16_t>(bits)});
    floats.push_back(std::bit_cast<float>(bits << 16U | (bits * 40503U >> 8U)));
  }
  for (const float multiplier : {1.0F, 1 / 65536.0F, 1 / 3.0F, 1000.0F}) {
    SCOPED_TRACE(multiplier);
    std::vector<Fp16> f16 = halves;
    std::vector<Fp16> f16_wanted = halves;
    EXPECT_TRUE(k_.unscale_f16(f16.data(), f16.size(), multiplier));
    reference_.unscale_f16(f16_wanted.data(), f16.size(), multiplier);
    EXPECT_TRUE(same_bits(f16, f16_wanted));
    std::vector<Bf16> bf16 = brains;
    std::vector<Bf16> bf16_wanted = brains;
    EXPECT_TRUE(k_.unscale_bf16(bf16.data(), bf16.size(), multiplier));
    reference_.unscale_bf16(bf16_wanted.data(), bf16.size(), multiplier);
    EXPECT_TRUE(same_bits(bf16, bf16_wanted));
    std::vector<float> f32 = floats;
    std::vector<float> f32_wanted = floats;
    EXPECT_TRUE(k_.unscale_f32(f32.data(), f32.size(), multiplier));
    reference_.unscale_f32(f32_wanted.data(), f32.size(), multiplier);
    EXPECT_TRUE(same_bits(f32, f32_wanted));
  }
}

TEST_P(Unscaling, FindsOneBadValueAnywhere) {
  for (const std::size_t count : {1, 255, 256, 257, 1000}) {
    for (std::size_t bad = 0; bad < count; bad += 37) {
      std::vector<float> f32(count, 2.0F);
      EXPECT_FALSE(k_.unscale_f32(f32.data(), count, 0.5F));
      EXPECT_EQ(f32, std::vector<float>(count, 1.0F));
      f32[bad] = -std::numeric_limits<float>::infinity();
      EXPECT_TRUE(k_.unscale_f32(f32.data(), count, 0.5F));
      f32[bad] = std::numeric_limits<float>::quiet_NaN();
      EXPECT_TRUE(k_.unscale_f32(f32.data(), count, 0.5F));
      std::vector<Bf16> bf16(count, Bf16{0x4000});
      EXPECT_FALSE(k_.unscale_bf16(bf16.data(), count, 0.5F));
      bf16[bad].bits = 0x7F80;
      EXPECT_TRUE(k_.unscale_bf16(bf16.data(), count, 0.5F));
      std::vector<Fp16> f16(count, Fp16{0x4000});
      EXPECT_FALSE(k_.unscale_f16(f16.data(), count, 0.5F));
      f16[bad].bits = 0xFC00;
      EXPECT_TRUE(k_.unscale_f16(f16.data(), count, 0.5F));
    }
  }
}

TEST_P(Unscaling, NothingIsFoundInNothing) {
  EXPECT_FALSE(k_.unscale_f32(nullptr, 0, 1));
}

// What only becomes infinite by the multiplication counts too.
TEST_P(Unscaling, FindsOverflow) {
  std::vector<Fp16> f16 = {{0x7BFF}};  // 65504
  EXPECT_TRUE(k_.unscale_f16(f16.data(), 1, 1.5F));
  EXPECT_EQ(f16[0].bits, 0x7C00);
}

MEMSCALE_FOR_EVERY_TABLE(Unscaling);

}  // namespace
}  // namespace memscale::kernels
