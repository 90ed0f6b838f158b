#include "memscale/core/hardware/fit.h"

#include <gtest/gtest.h>

#include "memscale/base/error.h"

namespace memscale {
namespace {

TEST(Fit, ReservesARoundSumAndAShareOfThePeak) {
  const Fit result = fit(10_GiB, 24_GiB);
  EXPECT_TRUE(result.fits);
  EXPECT_EQ(result.capacity, 24_GiB);
  EXPECT_EQ(result.reserve, 768_MiB + Bytes(322'122'547));  // 3 %, cut off
  EXPECT_EQ(result.needed, 10_GiB + result.reserve);
}

TEST(Fit, TheLastByteCounts) {
  const Bytes needed = fit(100_MiB, 0_B).needed;
  EXPECT_EQ(needed, 871_MiB);
  EXPECT_TRUE(fit(100_MiB, needed).fits);
  EXPECT_FALSE(fit(100_MiB, needed - 1_B).fits);
  EXPECT_TRUE(fit(100_MiB - 1_B, needed - 1_B).fits);
}

TEST(Fit, NothingNeedsTheReserve) {
  EXPECT_EQ(fit(0_B, 0_B).needed, 768_MiB);
  EXPECT_FALSE(fit(0_B, 0_B).fits);
  EXPECT_TRUE(fit(0_B, 768_MiB).fits);
}

TEST(Fit, NegativeBytesAreABug) {
  EXPECT_THROW(fit(Bytes(-1), 1_GiB), InternalError);
  EXPECT_THROW(fit(1_GiB, Bytes(-1)), InternalError);
}

}  // namespace
}  // namespace memscale
