#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "memscale/base/bytes.h"
#include "memscale/base/enum_names.h"
#include "memscale/core/config/field.h"
#include "memscale/core/config/setting.h"

// Inside a FieldTable: how the type of a member appears as plain data.

namespace memscale::detail {

template <typename T>
struct FieldTraits;

template <typename T, FieldKind Kind>
struct PlainTraits {
  static constexpr FieldKind kKind = Kind;
  static FieldValue to_value(const T& value) { return value; }
  static T from_value(const FieldSpec&, const FieldValue& value) {
    return *value.as<T>();
  }
};
template <>
struct FieldTraits<bool> : PlainTraits<bool, FieldKind::Flag> {};
template <>
struct FieldTraits<std::int64_t>
    : PlainTraits<std::int64_t, FieldKind::Integer> {};
template <>
struct FieldTraits<double> : PlainTraits<double, FieldKind::Real> {};
template <>
struct FieldTraits<std::string> : PlainTraits<std::string, FieldKind::Text> {};

template <>
struct FieldTraits<Bytes> {
  static constexpr FieldKind kKind = FieldKind::Size;
  static FieldValue to_value(Bytes value) { return value.count(); }
  static Bytes from_value(const FieldSpec&, const FieldValue& value) {
    return Bytes(*value.as<std::int64_t>());
  }
};

template <NamedEnum E>
struct FieldTraits<E> {
  static constexpr FieldKind kKind = FieldKind::Choice;
  static FieldValue to_value(E value) { return std::string(to_string(value)); }
  static E from_value(const FieldSpec& spec, const FieldValue& value) {
    const auto found = try_from_string<E>(*value.as<std::string>());
    if (!found) reject(spec, show(value));
    return *found;
  }
};

template <typename T>
struct FieldTraits<std::optional<T>> {
  static constexpr FieldKind kKind = FieldTraits<T>::kKind;
  static FieldValue to_value(const std::optional<T>& value) {
    return value ? FieldTraits<T>::to_value(*value) : FieldValue();
  }
  static std::optional<T> from_value(const FieldSpec& spec,
                                     const FieldValue& value) {
    if (value.is_none()) return std::nullopt;
    return FieldTraits<T>::from_value(spec, value);
  }
};

template <typename T>
struct FieldTraits<Box<T>> {
  static constexpr FieldKind kKind = FieldKind::Record;
  static FieldValue to_value(const Box<T>& value) {
    return value ? FieldValue(value->to_map(true)) : FieldValue();
  }
  static Box<T> from_value(const FieldSpec&, const FieldValue& value) {
    if (value.is_none()) return {};
    return T::from_map(*value.as<FieldMap>());
  }
};

template <typename T>
inline constexpr bool kNullable = false;
template <typename T>
inline constexpr bool kNullable<std::optional<T>> = true;
template <typename T>
inline constexpr bool kNullable<Box<T>> = true;

template <typename T>
std::string_view choices_of() {
  if constexpr (NamedEnum<T>) {
    static const std::string names = names_of<T>();
    return names;
  }
  return {};
}

}  // namespace memscale::detail
