#pragma once

#include <cstddef>
#include <string>
#include <string_view>

// Letters and digits without a locale: what we read is ASCII by definition, and
// <cctype> would make the reading depend on the user's environment.

namespace memscale::ascii {

constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }
constexpr bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
constexpr char to_lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}
constexpr bool is_alnum(char c) {
  return is_digit(c) || (to_lower(c) >= 'a' && to_lower(c) <= 'z');
}

constexpr bool equal_ignoring_case(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (to_lower(a[i]) != to_lower(b[i])) return false;
  }
  return true;
}

constexpr std::string_view trim(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

inline std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = to_lower(c);
  return result;
}

// The text as Python would write it, for messages: in quotes, with control
// characters escaped (a NUL would cut an exception's text short).
inline std::string quoted(std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string result = "'";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '\'' || c == '\\') {
      result += {'\\', c};
    } else if (c == '\n') {
      result += "\\n";
    } else if (code < 0x20 || code == 0x7f) {
      result += {'\\', 'x', kHex[code / 16], kHex[code % 16]};
    } else {
      result += c;
    }
  }
  return result + "'";
}

// The same of a text that may be of any length: its first bytes, and an
// ellipsis; no character is cut in half.
inline std::string quoted_start(std::string_view text, std::size_t most = 100) {
  if (text.size() <= most) return quoted(text);
  std::size_t end = most;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) {
    --end;
  }
  return quoted(text.substr(0, end)) + "...";
}

}  // namespace memscale::ascii
