#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <string_view>

namespace memscale {

// A number of bytes: an int64 that does not mix with counts, ids or seconds.
// It may be negative (a difference). Arithmetic is plain int64 arithmetic: the
// caller keeps results below 8 EiB. Trivially copyable, immutable text forms.
class Bytes final {
 public:
  constexpr Bytes() = default;
  constexpr explicit Bytes(std::int64_t count) : count_(count) {}

  // Reads "6GiB", "512 MB", "1.5 GiB" or "1024" (bytes). Units, in any case:
  // B, byte, bytes; KB, MB, GB, TB (powers of 1000); KiB, MiB, GiB, TiB (powers
  // of 1024). A fraction needs a unit above B; what is left below one byte is
  // cut off, so that a limit is never raised. Throws ParseError for anything
  // else: signs, bare letters ("3k"), exponents, more than int64 holds.
  static Bytes parse(std::string_view text);

  constexpr std::int64_t count() const { return count_; }

  // For people, in the manner of torch's out-of-memory message: "1.50 GiB",
  // "512 bytes". Two decimals, rounded to nearest.
  std::string human() const;

  // Exact and short: the largest binary unit that divides it, "1536MiB", "7B".
  // Bytes::parse reads it back as the same number (unless it is negative).
  std::string exact() const;

  constexpr auto operator<=>(const Bytes&) const = default;

  constexpr Bytes& operator+=(Bytes other) {
    count_ += other.count_;
    return *this;
  }
  constexpr Bytes& operator-=(Bytes other) {
    count_ -= other.count_;
    return *this;
  }
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return a += b; }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return a -= b; }
  friend constexpr Bytes operator-(Bytes a) { return Bytes(-a.count_); }
  friend constexpr Bytes operator*(Bytes a, std::int64_t n) {
    return Bytes(a.count_ * n);
  }
  friend constexpr Bytes operator*(std::int64_t n, Bytes a) { return a * n; }
  // Towards zero, as integers do.
  friend constexpr Bytes operator/(Bytes a, std::int64_t n) {
    return Bytes(a.count_ / n);
  }

 private:
  std::int64_t count_ = 0;
};

// The smallest multiple of `multiple` that is not below `bytes`: what an
// allocator hands out. Needs bytes >= 0 and multiple > 0.
constexpr Bytes round_up(Bytes bytes, Bytes multiple) {
  const std::int64_t rest = bytes.count() % multiple.count();
  return rest == 0 ? bytes : bytes + (multiple - Bytes(rest));
}

// Prints human().
std::ostream& operator<<(std::ostream& out, Bytes bytes);

inline namespace literals {

constexpr Bytes operator""_B(unsigned long long n) {
  return Bytes(static_cast<std::int64_t>(n));
}
constexpr Bytes operator""_KiB(unsigned long long n) {
  return 1024 * operator""_B(n);
}
constexpr Bytes operator""_MiB(unsigned long long n) {
  return 1024 * operator""_KiB(n);
}
constexpr Bytes operator""_GiB(unsigned long long n) {
  return 1024 * operator""_MiB(n);
}

}  // namespace literals
}  // namespace memscale

template <>
struct std::hash<memscale::Bytes> {
  std::size_t operator()(memscale::Bytes bytes) const noexcept {
    return std::hash<std::int64_t>()(bytes.count());
  }
};
