#include "memscale/base/bytes.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <unordered_set>

#include "memscale/base/error.h"

namespace memscale {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

std::string parse_error(std::string_view text) {
  try {
    const Bytes bytes = Bytes::parse(text);
    return str("parsed as ", bytes.count());
  } catch (const ParseError& error) {
    return error.what();
  }
}

TEST(Bytes, LiteralsAndArithmetic) {
  static_assert(1_KiB == 1024_B);
  static_assert((3_MiB).count() == 3'145'728);
  static_assert(2_GiB - 1_GiB == 1024 * 1_MiB);
  static_assert(7_B / 2 == 3_B);
  static_assert(-(1_B) < Bytes());
  Bytes bytes = 1_KiB;
  bytes += 24_B;
  bytes -= 48_B;
  EXPECT_EQ(bytes.count(), 1000);
  EXPECT_EQ(std::unordered_set<Bytes>({1_KiB, 1024_B, 2_KiB}).size(), 2u);
}

TEST(Bytes, RoundUpGivesTheNextMultiple) {
  EXPECT_EQ(round_up(0_B, 512_B), 0_B);
  EXPECT_EQ(round_up(1_B, 512_B), 512_B);
  EXPECT_EQ(round_up(512_B, 512_B), 512_B);
  EXPECT_EQ(round_up(513_B, 512_B), 1024_B);
  EXPECT_EQ(round_up(7_B, 3_B), 9_B);
}

TEST(Bytes, ParsesEveryUnit) {
  const std::pair<std::string_view, std::int64_t> cases[] = {
      {"0", 0},
      {"1024", 1024},
      {"7B", 7},
      {"512 bytes", 512},
      {"1 byte", 1},
      {"3KB", 3'000},
      {"512 MB", 512'000'000},
      {"2GB", 2'000'000'000},
      {"1TB", 1'000'000'000'000},
      {"3KiB", 3072},
      {"256MiB", 268'435'456},
      {"6GiB", 6'442'450'944},
      {"2TiB", 2'199'023'255'552},
      {"6gib", 6'442'450'944},
      {"6GIB", 6'442'450'944},
      {"  6  GiB\t", 6'442'450'944},
      {"1.5 GiB", 1'610'612'736},
      {"0.5KiB", 512},
      {"1.50GiB", 1'610'612'736},
      {"007", 7},
      {"0.000GiB", 0},
      {"9223372036854775807", kMax},
  };
  for (const auto& [text, count] : cases) {
    EXPECT_EQ(Bytes::parse(text).count(), count) << text;
  }
}

TEST(Bytes, FractionsAreCutOffBelowOneByte) {
  // 1.1 GiB is 1181116006.4 bytes.
  EXPECT_EQ(Bytes::parse("1.1GiB").count(), 1'181'116'006);
  // In double arithmetic 0.001 KB is just below 1 and would vanish.
  EXPECT_EQ(Bytes::parse("0.001KB").count(), 1);
  EXPECT_EQ(Bytes::parse("0.29KB").count(), 290);
  EXPECT_EQ(Bytes::parse("8.999999999999999999999999KB").count(), 8'999);
}

TEST(Bytes, RejectsWithTextRuleAndUnits) {
  const std::pair<std::string_view, std::string_view> cases[] = {
      {"", "empty"},
      {"   ", "empty"},
      {"-1", "negative"},
      {"-1.5GiB", "negative"},
      {"+1", "begin with a digit"},
      {"GiB", "begin with a digit"},
      {"nan", "begin with a digit"},
      {"inf", "begin with a digit"},
      {".5GiB", "begin with a digit"},
      {"1.GiB", "no digit follows the point"},
      {"1.5", "fraction of a byte"},
      {"1.0B", "fraction of a byte"},
      {"0.0001KB", "fraction of a byte"},
      {"3k", "unknown unit 'k'"},
      {"1e9", "unknown unit 'e9'"},
      {"6GiB!", "unknown unit 'GiB!'"},
      {"6 GiB 7", "unknown unit 'GiB 7'"},
      {"1 000", "unknown unit '000'"},
      {"1,5GiB", "unknown unit ',5GiB'"},
      {"0x10", "unknown unit 'x10'"},
      {"9223372036854775808", "too large"},
      {"99999999999999999999999999", "too large"},
      {"8388608TiB", "too large"},
      {"9223372036854775807KiB", "too large"},
  };
  for (const auto& [text, reason] : cases) {
    const std::string message = parse_error(text);
    EXPECT_NE(message.find(reason), std::string::npos) << message;
    EXPECT_NE(message.find(str("'", text, "'")), std::string::npos) << message;
    EXPECT_NE(message.find("KB, MB, GB, TB, KiB, MiB, GiB, TiB"),
              std::string::npos)
        << message;
  }
  // A text view need not end in a NUL, and may hold one.
  const std::string message = parse_error(std::string_view("6\0GiB", 5));
  EXPECT_TRUE(message.starts_with(
      "cannot read '6\\x00GiB' as a size: unknown unit '\\x00GiB'"))
      << message;
}

TEST(Bytes, LargestValuesParse) {
  EXPECT_EQ(Bytes::parse("8388607TiB").count(), 8'388'607LL << 40);
  // The fraction takes part in the check: 8388607.99.. TiB still fits.
  EXPECT_GT(Bytes::parse("8388607.999TiB"), Bytes::parse("8388607TiB"));
}

TEST(Bytes, HumanReadsLikeTorch) {
  EXPECT_EQ(Bytes(1'610'612'736).human(), "1.50 GiB");
  EXPECT_EQ((512_B).human(), "512 bytes");
  EXPECT_EQ((0_B).human(), "0 bytes");
  EXPECT_EQ((1_B).human(), "1 byte");
  EXPECT_EQ((1023_B).human(), "1023 bytes");
  EXPECT_EQ((1_KiB).human(), "1.00 KiB");
  EXPECT_EQ(Bytes(20'971'520).human(), "20.00 MiB");
  EXPECT_EQ((2048_GiB).human(), "2.00 TiB");
  EXPECT_EQ(Bytes(-1'610'612'736).human(), "-1.50 GiB");
  EXPECT_EQ(str(3_MiB), "3.00 MiB");
  // Never "1024.00 KiB".
  EXPECT_EQ((1_MiB - 1_B).human(), "1.00 MiB");
  EXPECT_EQ(Bytes(std::numeric_limits<std::int64_t>::min()).human(),
            "-8388608.00 TiB");
}

TEST(Bytes, ExactUsesTheLargestUnitThatDivides) {
  EXPECT_EQ((0_B).exact(), "0B");
  EXPECT_EQ((1000_B).exact(), "1000B");
  EXPECT_EQ((6_GiB).exact(), "6GiB");
  EXPECT_EQ(Bytes(1'610'612'736).exact(), "1536MiB");
  EXPECT_EQ((6_GiB + 1_B).exact(), "6442450945B");
}

}  // namespace
}  // namespace memscale
