#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "memscale/base/enum_names.h"

namespace memscale {

// The type of a tensor's elements: every dtype that torch 2.13 has, under
// torch's own name. Dtypes of one kind stand together: see kind_of.
enum class Dtype : std::uint8_t {
  Float32,
  Float64,
  Float16,
  BFloat16,
  Float8E4M3FN,
  Float8E4M3FNUZ,
  Float8E5M2,
  Float8E5M2FNUZ,
  Float8E8M0FNU,
  Float4E2M1FNX2,
  Int64,
  Int32,
  Int16,
  Int8,
  UInt64,
  UInt32,
  UInt16,
  UInt8,
  Bool,
  Complex32,
  Complex64,
  Complex128,
  QInt8,
  QUInt8,
  QInt32,
  QUInt4x2,
  QUInt2x4,
  Bits1x8,
  Bits2x4,
  Bits4x2,
  Bits8,
  Bits16,
  Int1,
  Int2,
  Int3,
  Int4,
  Int5,
  Int6,
  Int7,
  UInt1,
  UInt2,
  UInt3,
  UInt4,
  UInt5,
  UInt6,
  UInt7,
};

template <>
struct EnumNames<Dtype> {
  static constexpr std::string_view kWhat = "dtype";
  static constexpr Dtype kLast = Dtype::UInt7;
  static constexpr std::array kTable = {
      EnumName{Dtype::Float32, "float32"},
      EnumName{Dtype::Float64, "float64"},
      EnumName{Dtype::Float16, "float16"},
      EnumName{Dtype::BFloat16, "bfloat16"},
      EnumName{Dtype::Float8E4M3FN, "float8_e4m3fn"},
      EnumName{Dtype::Float8E4M3FNUZ, "float8_e4m3fnuz"},
      EnumName{Dtype::Float8E5M2, "float8_e5m2"},
      EnumName{Dtype::Float8E5M2FNUZ, "float8_e5m2fnuz"},
      EnumName{Dtype::Float8E8M0FNU, "float8_e8m0fnu"},
      EnumName{Dtype::Float4E2M1FNX2, "float4_e2m1fn_x2"},
      EnumName{Dtype::Int64, "int64"},
      EnumName{Dtype::Int32, "int32"},
      EnumName{Dtype::Int16, "int16"},
      EnumName{Dtype::Int8, "int8"},
      EnumName{Dtype::UInt64, "uint64"},
      EnumName{Dtype::UInt32, "uint32"},
      EnumName{Dtype::UInt16, "uint16"},
      EnumName{Dtype::UInt8, "uint8"},
      EnumName{Dtype::Bool, "bool"},
      EnumName{Dtype::Complex32, "complex32"},
      EnumName{Dtype::Complex64, "complex64"},
      EnumName{Dtype::Complex128, "complex128"},
      EnumName{Dtype::QInt8, "qint8"},
      EnumName{Dtype::QUInt8, "quint8"},
      EnumName{Dtype::QInt32, "qint32"},
      EnumName{Dtype::QUInt4x2, "quint4x2"},
      EnumName{Dtype::QUInt2x4, "quint2x4"},
      EnumName{Dtype::Bits1x8, "bits1x8"},
      EnumName{Dtype::Bits2x4, "bits2x4"},
      EnumName{Dtype::Bits4x2, "bits4x2"},
      EnumName{Dtype::Bits8, "bits8"},
      EnumName{Dtype::Bits16, "bits16"},
      EnumName{Dtype::Int1, "int1"},
      EnumName{Dtype::Int2, "int2"},
      EnumName{Dtype::Int3, "int3"},
      EnumName{Dtype::Int4, "int4"},
      EnumName{Dtype::Int5, "int5"},
      EnumName{Dtype::Int6, "int6"},
      EnumName{Dtype::Int7, "int7"},
      EnumName{Dtype::UInt1, "uint1"},
      EnumName{Dtype::UInt2, "uint2"},
      EnumName{Dtype::UInt3, "uint3"},
      EnumName{Dtype::UInt4, "uint4"},
      EnumName{Dtype::UInt5, "uint5"},
      EnumName{Dtype::UInt6, "uint6"},
      EnumName{Dtype::UInt7, "uint7"},
  };
};

// The bytes of one element. Elements of less than a byte take a whole one,
// except where the name says that several are packed together.
constexpr std::int64_t itemsize_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::Complex128:
      return 16;
    case Dtype::Float64:
    case Dtype::Int64:
    case Dtype::UInt64:
    case Dtype::Complex64:
      return 8;
    case Dtype::Float32:
    case Dtype::Int32:
    case Dtype::UInt32:
    case Dtype::Complex32:
    case Dtype::QInt32:
      return 4;
    case Dtype::Float16:
    case Dtype::BFloat16:
    case Dtype::Int16:
    case Dtype::UInt16:
    case Dtype::Bits16:
      return 2;
    default:
      return 1;
  }
}

// What an element is, in the order in which torch promotes. Packed: quantised
// numbers, raw bits, and numbers of less than a byte, with which torch's usual
// kernels do not compute.
enum class DtypeKind : std::uint8_t {
  Bool,
  Integer,
  Floating,
  Complex,
  Packed
};

constexpr DtypeKind kind_of(Dtype dtype) {
  if (dtype < Dtype::Float4E2M1FNX2) return DtypeKind::Floating;
  if (dtype == Dtype::Float4E2M1FNX2) return DtypeKind::Packed;
  if (dtype < Dtype::Bool) return DtypeKind::Integer;
  if (dtype == Dtype::Bool) return DtypeKind::Bool;
  return dtype < Dtype::QInt8 ? DtypeKind::Complex : DtypeKind::Packed;
}

constexpr bool is_half(Dtype dtype) {
  return dtype == Dtype::Float16 || dtype == Dtype::BFloat16;
}

}  // namespace memscale
