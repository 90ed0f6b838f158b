#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "memscale/base/bytes.h"
#include "memscale/base/error.h"

namespace memscale {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

// Sizes of every magnitude, not only those near the generator's own size.
rc::Gen<Bytes> sizes() {
  return rc::gen::apply(
      [](std::uint64_t bits, int shift) {
        return Bytes(static_cast<std::int64_t>((bits >> 1) >> shift));
      },
      rc::gen::arbitrary<std::uint64_t>(), rc::gen::inRange(0, 63));
}

TEST(BytesProperty, ParseInvertsExact) {
  ASSERT_TRUE(rc::check("parse(exact(b)) == b", [] {
    const Bytes bytes = *sizes();
    RC_ASSERT(Bytes::parse(bytes.exact()) == bytes);
    RC_ASSERT(Bytes::parse(std::to_string(bytes.count())) == bytes);
  }));
}

TEST(BytesProperty, ParseNearlyInvertsHuman) {
  ASSERT_TRUE(rc::check("|parse(human(b)) - b| <= half a last digit", [] {
    const Bytes bytes = *rc::gen::suchThat(
        sizes(), [](Bytes b) { return b.count() < kMax / 2; });
    const double error = std::abs(
        static_cast<double>((Bytes::parse(bytes.human()) - bytes).count()));
    // Two decimals of a unit of which there is at least one, and whole bytes.
    const double limit = 1.0 + 0.005001 * static_cast<double>(bytes.count());
    RC_ASSERT(error <= (bytes < 1_KiB ? 0.0 : limit));
  }));
}

TEST(BytesProperty, OrderIsThatOfTheNumbers) {
  ASSERT_TRUE(rc::check("a < b iff a.count() < b.count()", [] {
    const auto a = *rc::gen::arbitrary<std::int64_t>();
    const auto b = *rc::gen::arbitrary<std::int64_t>();
    RC_ASSERT((Bytes(a) < Bytes(b)) == (a < b));
    RC_ASSERT((Bytes(a) == Bytes(b)) == (a == b));
  }));
}

TEST(BytesProperty, ParseKeepsTheOrderOfFractions) {
  ASSERT_TRUE(rc::check("x <= y implies parse(x) <= parse(y)", [] {
    const int low = *rc::gen::inRange(0, 10'000);
    const int high = *rc::gen::inRange(low, 10'000);
    const auto text = [](int n) {
      const std::string digits = std::to_string(10'000 + n % 1'000);
      return str(n / 1'000, ".", digits.substr(2), "GiB");
    };
    RC_ASSERT(Bytes::parse(text(low)) <= Bytes::parse(text(high)));
  }));
}

TEST(BytesProperty, RoundUpIsTheLeastMultiple) {
  ASSERT_TRUE(rc::check("round_up", [] {
    const Bytes bytes(*rc::gen::inRange<std::int64_t>(0, 1LL << 50));
    const Bytes multiple(*rc::gen::inRange<std::int64_t>(1, 1LL << 22));
    const Bytes up = round_up(bytes, multiple);
    RC_ASSERT(up.count() % multiple.count() == 0);
    RC_ASSERT(up >= bytes);
    RC_ASSERT(up - bytes < multiple);
  }));
}

TEST(BytesProperty, AnyTextParsesOrRaisesParseError) {
  ASSERT_TRUE(rc::check("no other exception, no negative size", [] {
    const std::string alphabet = "0123456789.-+ kKmMgGtTiIbBe";
    const auto text =
        *rc::gen::container<std::string>(rc::gen::elementOf(alphabet));
    try {
      RC_ASSERT(Bytes::parse(text) >= Bytes());
    } catch (const ParseError&) {
      RC_SUCCEED("rejected");
    }
  }));
}

}  // namespace
}  // namespace memscale
