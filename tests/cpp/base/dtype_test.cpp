#include "memscale/base/dtype.h"

#include <gtest/gtest.h>

namespace memscale {
namespace {

TEST(Dtype, HasTorchsNames) {
  EXPECT_EQ(to_string(Dtype::BFloat16), "bfloat16");
  EXPECT_EQ(from_string<Dtype>("float8_e4m3fn"), Dtype::Float8E4M3FN);
  EXPECT_EQ(from_string<Dtype>("bool"), Dtype::Bool);
  EXPECT_THROW(from_string<Dtype>("torch.float32"), ParseError);
}

TEST(Dtype, Itemsize) {
  EXPECT_EQ(itemsize_of(Dtype::Complex128), 16);
  EXPECT_EQ(itemsize_of(Dtype::Float64), 8);
  EXPECT_EQ(itemsize_of(Dtype::Int64), 8);
  EXPECT_EQ(itemsize_of(Dtype::Float32), 4);
  EXPECT_EQ(itemsize_of(Dtype::QInt32), 4);
  EXPECT_EQ(itemsize_of(Dtype::Float16), 2);
  EXPECT_EQ(itemsize_of(Dtype::UInt16), 2);
  EXPECT_EQ(itemsize_of(Dtype::Bits16), 2);
  EXPECT_EQ(itemsize_of(Dtype::Int4), 1);
  EXPECT_EQ(itemsize_of(Dtype::Float4E2M1FNX2), 1);
  EXPECT_EQ(itemsize_of(Dtype::Bool), 1);
}

TEST(Dtype, Kind) {
  EXPECT_EQ(kind_of(Dtype::Float32), DtypeKind::Floating);
  EXPECT_EQ(kind_of(Dtype::Float8E8M0FNU), DtypeKind::Floating);
  EXPECT_EQ(kind_of(Dtype::Float4E2M1FNX2), DtypeKind::Packed);
  EXPECT_EQ(kind_of(Dtype::Int64), DtypeKind::Integer);
  EXPECT_EQ(kind_of(Dtype::UInt8), DtypeKind::Integer);
  EXPECT_EQ(kind_of(Dtype::Bool), DtypeKind::Bool);
  EXPECT_EQ(kind_of(Dtype::Complex32), DtypeKind::Complex);
  EXPECT_EQ(kind_of(Dtype::Complex128), DtypeKind::Complex);
  EXPECT_EQ(kind_of(Dtype::QInt8), DtypeKind::Packed);
  EXPECT_EQ(kind_of(Dtype::UInt7), DtypeKind::Packed);
}

TEST(Dtype, Predicates) {
  EXPECT_TRUE(is_half(Dtype::BFloat16));
  EXPECT_TRUE(is_half(Dtype::Float16));
  EXPECT_FALSE(is_half(Dtype::Int16));
}

}  // namespace
}  // namespace memscale
