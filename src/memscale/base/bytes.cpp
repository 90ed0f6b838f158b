#include "memscale/base/bytes.h"

#include <array>
#include <cstdio>
#include <limits>
#include <ostream>

#include "memscale/base/ascii.h"
#include "memscale/base/error.h"

namespace memscale {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

constexpr std::int64_t kKibi = 1024;

struct Unit {
  std::string_view name;
  std::int64_t bytes;
};

constexpr std::array kUnits = {
    Unit{"B", 1},
    Unit{"KB", 1'000},
    Unit{"MB", 1'000'000},
    Unit{"GB", 1'000'000'000},
    Unit{"TB", 1'000'000'000'000},
    Unit{"KiB", kKibi},
    Unit{"MiB", kKibi * kKibi},
    Unit{"GiB", kKibi * kKibi * kKibi},
    Unit{"TiB", kKibi * kKibi * kKibi * kKibi},
    // So that what human() prints below 1 KiB can be read back.
    Unit{"byte", 1},
    Unit{"bytes", 1},
};
constexpr std::size_t kListedUnits = 9;
constexpr std::size_t kFirstBinary = 5;

[[noreturn]] void fail(std::string_view text, std::string_view reason) {
  std::string units;
  for (std::size_t i = 0; i < kListedUnits; ++i) {
    units += str(i == 0 ? "" : ", ", kUnits[i].name);
  }
  throw ParseError(
      str("cannot read ", ascii::quoted(text), " as a size: ", reason,
          "; expected a number of bytes, or a number and one of ", units));
}

std::string_view take_digits(std::string_view& rest) {
  std::size_t n = 0;
  while (n < rest.size() && ascii::is_digit(rest[n])) ++n;
  const std::string_view digits = rest.substr(0, n);
  rest.remove_prefix(n);
  return digits;
}

std::int64_t unit_bytes(std::string_view text, std::string_view name) {
  if (name.empty()) return 1;
  for (const Unit& unit : kUnits) {
    if (ascii::equal_ignoring_case(unit.name, name)) return unit.bytes;
  }
  fail(text, str("unknown unit ", ascii::quoted(name)));
}

// floor(0.d1d2d3... * unit) in integers: cutting at each digit, from the last
// to the first, cuts no more than cutting once at the end.
std::int64_t fraction_of(std::int64_t unit, std::string_view digits) {
  std::int64_t result = 0;
  for (std::size_t i = digits.size(); i-- > 0;) {
    result = (result + (digits[i] - '0') * unit) / 10;
  }
  return result;
}

}  // namespace

Bytes Bytes::parse(std::string_view text) {
  std::string_view rest = ascii::trim(text);
  if (rest.empty()) fail(text, "it is empty");
  if (rest.front() == '-') fail(text, "it is negative");
  const std::string_view whole = take_digits(rest);
  if (whole.empty()) fail(text, "it does not begin with a digit");
  std::string_view fraction;
  if (!rest.empty() && rest.front() == '.') {
    rest.remove_prefix(1);
    fraction = take_digits(rest);
    if (fraction.empty()) fail(text, "no digit follows the point");
  }
  const std::int64_t unit = unit_bytes(text, ascii::trim(rest));
  if (unit == 1 && !fraction.empty()) fail(text, "it is a fraction of a byte");

  const std::int64_t below = fraction_of(unit, fraction);
  std::int64_t count = 0;
  for (const char digit : whole) {
    if (count > (kMax - (digit - '0')) / 10) fail(text, "it is too large");
    count = count * 10 + (digit - '0');
  }
  if (count > (kMax - below) / unit) fail(text, "it is too large");
  const Bytes result(count * unit + below);
  const bool zero = whole.find_first_not_of('0') == std::string_view::npos &&
                    fraction.find_first_not_of('0') == std::string_view::npos;
  if (result.count() == 0 && !zero) fail(text, "it is a fraction of a byte");
  return result;
}

std::string Bytes::human() const {
  const bool negative = count_ < 0;
  // Unsigned, because the magnitude of the lowest int64 does not fit an int64.
  const std::uint64_t magnitude = negative
                                      ? 0 - static_cast<std::uint64_t>(count_)
                                      : static_cast<std::uint64_t>(count_);
  const char* const sign = negative ? "-" : "";
  if (magnitude < 1024) {
    return str(sign, magnitude, magnitude == 1 ? " byte" : " bytes");
  }
  std::size_t unit = kFirstBinary;
  double value = static_cast<double>(magnitude) / 1024.0;
  // 1023.995 prints as "1024.00": move to the next unit just before that.
  while (value >= 1023.995 && unit + 1 < kListedUnits) {
    value /= 1024.0;
    ++unit;
  }
  char text[64];
  std::snprintf(text, sizeof(text), "%.2f", value);
  return str(sign, text, " ", kUnits[unit].name);
}

std::string Bytes::exact() const {
  for (std::size_t i = kListedUnits; i-- > kFirstBinary;) {
    if (count_ != 0 && count_ % kUnits[i].bytes == 0) {
      return str(count_ / kUnits[i].bytes, kUnits[i].name);
    }
  }
  return str(count_, "B");
}

std::ostream& operator<<(std::ostream& out, Bytes bytes) {
  return out << bytes.human();
}

}  // namespace memscale
