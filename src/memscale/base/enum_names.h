#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "memscale/base/ascii.h"
#include "memscale/base/error.h"

// An enum and its names are one table. Beside the enum, specialise EnumNames:
//
//   enum class Color { Red, Green };
//   template <>
//   struct EnumNames<Color> {
//     static constexpr std::string_view kWhat = "color";
//     static constexpr Color kLast = Color::Green;
//     static constexpr std::array kTable = {
//         EnumName{Color::Red, "red"}, EnumName{Color::Green, "green"}};
//   };
//
// Enumerators count up from 0 and stand in the table in that order; a table
// that misses one, or has two equal names, does not compile.

namespace memscale {

template <typename E>
struct EnumName {
  E value;
  std::string_view name;
};

template <typename E>
struct EnumNames;

template <typename E>
concept NamedEnum = std::is_enum_v<E> && requires {
  { EnumNames<E>::kWhat } -> std::convertible_to<std::string_view>;
  { EnumNames<E>::kTable.size() } -> std::convertible_to<std::size_t>;
};

namespace detail {

template <typename E, std::size_t N>
consteval bool table_is_complete(const std::array<EnumName<E>, N>& table,
                                 E last) {
  if (N != static_cast<std::size_t>(last) + 1) return false;
  for (std::size_t i = 0; i < N; ++i) {
    if (static_cast<std::size_t>(table[i].value) != i) return false;
    for (std::size_t j = 0; j < i; ++j) {
      if (ascii::equal_ignoring_case(table[i].name, table[j].name)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace detail

// The table of E, checked.
template <NamedEnum E>
constexpr const auto& enum_table() {
  static_assert(
      detail::table_is_complete(EnumNames<E>::kTable, EnumNames<E>::kLast),
      "EnumNames<E>::kTable must name each enumerator once, in order");
  return EnumNames<E>::kTable;
}

// The name. A value outside the enum is a bug and throws InternalError.
template <NamedEnum E>
constexpr std::string_view to_string(E value) {
  const auto index = static_cast<std::size_t>(value);
  if (index >= enum_table<E>().size()) {
    throw InternalError(str("no ", EnumNames<E>::kWhat, " has the number ",
                            static_cast<long long>(value)));
  }
  return enum_table<E>()[index].name;
}

// "red, green": for messages and help.
template <NamedEnum E>
std::string names_of() {
  std::string list;
  for (const auto& entry : enum_table<E>()) {
    list += str(list.empty() ? "" : ", ", entry.name);
  }
  return list;
}

// The value of that name, in any case of letters; nothing if there is none.
template <NamedEnum E>
constexpr std::optional<E> try_from_string(std::string_view name) {
  for (const auto& entry : enum_table<E>()) {
    if (ascii::equal_ignoring_case(entry.name, name)) return entry.value;
  }
  return std::nullopt;
}

// The same; throws ParseError, which lists the names, if there is none.
template <NamedEnum E>
constexpr E from_string(std::string_view name) {
  if (const auto value = try_from_string<E>(name)) return *value;
  throw ParseError(str("unknown ", EnumNames<E>::kWhat, " ",
                       ascii::quoted(name), "; expected one of ",
                       names_of<E>()));
}

}  // namespace memscale
