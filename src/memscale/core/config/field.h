#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "memscale/base/enum_names.h"

// What a config field is: one row of a table, from which validation, messages,
// repr, the table in the docs and the help text of the command line all come.

namespace memscale {

// What a field may be given, and what it shows: the plain data that Python, a
// command line or JSON can hold. monostate is None.
struct FieldValue;
using FieldMap = std::vector<std::pair<std::string, FieldValue>>;
struct FieldValue
    : std::variant<std::monostate, bool, std::int64_t, double, std::string,
                   std::vector<std::pair<std::string, FieldValue>>> {
  using variant::variant;

  bool is_none() const { return std::holds_alternative<std::monostate>(*this); }
  template <typename T>
  const T* as() const {
    return std::get_if<T>(this);
  }
};

// The value as Python would write it: None, True, 2.0, 'text'.
std::string show(const FieldValue& value);

enum class FieldKind {
  Choice,   // a name out of an enum
  Flag,     // true or false
  Integer,  // an int64; neither a bool nor 2.0 passes for one
  Real,     // a finite double; an integer passes for one
  Size,     // Bytes: an integer of bytes, or text such as "6GiB"
  Text,     // a string with at least one character
  Record,   // a config of its own, as a FieldMap
};

template <>
struct EnumNames<FieldKind> {
  static constexpr std::string_view kWhat = "field kind";
  static constexpr FieldKind kLast = FieldKind::Record;
  // The words are the types that the docs show.
  static constexpr std::array kTable = {
      EnumName{FieldKind::Choice, "name"},   EnumName{FieldKind::Flag, "bool"},
      EnumName{FieldKind::Integer, "int"},   EnumName{FieldKind::Real, "float"},
      EnumName{FieldKind::Size, "size"},     EnumName{FieldKind::Text, "text"},
      EnumName{FieldKind::Record, "record"},
  };
};

// The numbers a field accepts. Infinite ends are no ends.
struct Bounds {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;  // low itself is outside

  bool contain(double value) const;
  // "in (0, 1]", ">= 0", "> 0", or nothing.
  std::string text() const;
};

struct FieldSpec {
  std::string_view name;
  FieldKind kind;
  bool optional;             // None is allowed
  Bounds bounds;             // of the number, or of the bytes
  std::string_view choices;  // "a, b": what a Choice accepts
  bool by_mode;              // the mode decides unless the field is set
  FieldValue default_value;
  std::string_view doc;  // one sentence

  // "None or an integer in [1, 65535]": the whole rule, for docs and help.
  std::string rule() const;
  // The type as the docs show it: "int or None".
  std::string type() const;
  // A value of this field as Python would write it, sizes as '256MiB'.
  std::string text(const FieldValue& value) const;
};

// Throws ConfigError "<name> must be <rule>, got <shown>".
[[noreturn]] void reject(const FieldSpec& spec, std::string_view shown);

// The value, read by the field's kind and held against its bounds; sizes come
// back as integers of bytes, integers of a Real as doubles. Throws ConfigError
// if it breaks the rule. Records pass unread.
FieldValue checked(const FieldSpec& spec, FieldValue value);

}  // namespace memscale
