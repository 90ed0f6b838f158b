#include "memscale/core/config/field.h"

#include <cmath>
#include <type_traits>

#include "memscale/base/ascii.h"
#include "memscale/base/bytes.h"
#include "memscale/base/error.h"

namespace memscale {
namespace {

std::string_view noun(FieldKind kind) {
  switch (kind) {
    case FieldKind::Choice:
      return "one of";
    case FieldKind::Flag:
      return "True or False";
    case FieldKind::Integer:
      return "an integer";
    case FieldKind::Real:
      return "a number";
    case FieldKind::Size:
      return "a size";
    case FieldKind::Text:
      return "a text that is not empty";
    case FieldKind::Record:
      return "a record of fields";
  }
  return "";
}

std::string number(double value) {
  if (std::isnan(value)) return "nan";
  const std::string text = str(value);
  // 2.0 must not look like the integer 2: that is what the user got wrong.
  const bool plain = text.find_first_of(".en") == std::string::npos;
  return plain ? text + ".0" : text;
}

[[noreturn]] void out_of_bounds(const FieldSpec& spec,
                                const FieldValue& value) {
  throw ConfigError(str(spec.name, " must be ", spec.optional ? "None or " : "",
                        spec.bounds.text(), ", got ", show(value)));
}

FieldValue checked_size(const FieldSpec& spec, const FieldValue& value) {
  std::int64_t count = 0;
  if (const auto* text = value.as<std::string>()) {
    try {
      count = Bytes::parse(*text).count();
    } catch (const ParseError& error) {
      throw ConfigError(str(spec.name, ": ", error.what()));
    }
  } else if (const auto* integer = value.as<std::int64_t>()) {
    count = *integer;
  } else {
    reject(spec, show(value));
  }
  if (!spec.bounds.contain(static_cast<double>(count))) {
    out_of_bounds(spec, value);
  }
  return count;
}

FieldValue checked_number(const FieldSpec& spec, const FieldValue& value) {
  const auto* integer = value.as<std::int64_t>();
  const auto* real = value.as<double>();
  const bool fits = spec.kind == FieldKind::Integer
                        ? integer != nullptr
                        : integer != nullptr || real != nullptr;
  if (!fits || (real && !std::isfinite(*real))) reject(spec, show(value));
  const double as_real = integer ? static_cast<double>(*integer) : *real;
  if (!spec.bounds.contain(as_real)) out_of_bounds(spec, value);
  return spec.kind == FieldKind::Integer ? FieldValue(*integer)
                                         : FieldValue(as_real);
}

}  // namespace

std::string show(const FieldValue& value) {
  struct Visitor {
    std::string operator()(std::monostate) const { return "None"; }
    std::string operator()(bool v) const { return v ? "True" : "False"; }
    std::string operator()(std::int64_t v) const { return str(v); }
    std::string operator()(double v) const { return number(v); }
    std::string operator()(const std::string& v) const {
      return ascii::quoted(v);
    }
    std::string operator()(const FieldMap& v) const {
      std::string text;
      for (const auto& [name, inner] : v) {
        text += str(text.empty() ? "" : ", ", ascii::quoted(name), ": ",
                    show(inner));
      }
      return "{" + text + "}";
    }
  };
  return std::visit(Visitor(), value);
}

bool Bounds::contain(double value) const {
  return (low_open ? value > low : value >= low) && value <= high;
}

std::string Bounds::text() const {
  if (std::isinf(low) && std::isinf(high)) return "";
  if (std::isinf(high)) return str(low_open ? "> " : ">= ", low);
  return str("in ", low_open ? "(" : "[", low, ", ", high, "]");
}

std::string FieldSpec::rule() const {
  std::string text = str(optional ? "None or " : "", noun(kind));
  if (kind == FieldKind::Choice) text += str(" ", choices);
  const std::string range = bounds.text();
  if (!range.empty()) text += str(" ", range);
  if (kind == FieldKind::Size) text += ", in bytes or like '6GiB'";
  return text;
}

std::string FieldSpec::type() const {
  return str(to_string(kind), optional ? " or None" : "");
}

std::string FieldSpec::text(const FieldValue& value) const {
  const auto* count = value.as<std::int64_t>();
  if (kind == FieldKind::Size && count)
    return ascii::quoted(Bytes(*count).exact());
  return show(value);
}

void reject(const FieldSpec& spec, std::string_view shown) {
  throw ConfigError(str(spec.name, " must be ", spec.rule(), ", got ", shown));
}

FieldValue checked(const FieldSpec& spec, FieldValue value) {
  if (value.is_none()) {
    if (!spec.optional) reject(spec, show(value));
    return value;
  }
  bool right_type = true;
  switch (spec.kind) {
    case FieldKind::Integer:
    case FieldKind::Real:
      return checked_number(spec, value);
    case FieldKind::Size:
      return checked_size(spec, value);
    case FieldKind::Flag:
      right_type = value.as<bool>() != nullptr;
      break;
    case FieldKind::Choice:
      right_type = value.as<std::string>() != nullptr;
      break;
    case FieldKind::Text:
      right_type = value.as<std::string>() && !value.as<std::string>()->empty();
      break;
    case FieldKind::Record:
      right_type = value.as<FieldMap>() != nullptr;
      break;
  }
  if (!right_type) reject(spec, show(value));
  return value;
}

}  // namespace memscale
