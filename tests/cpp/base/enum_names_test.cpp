#include "memscale/base/enum_names.h"

#include <gtest/gtest.h>

namespace memscale {

enum class Fruit { Apple, Pear };
template <>
struct EnumNames<Fruit> {
  static constexpr std::string_view kWhat = "fruit";
  static constexpr Fruit kLast = Fruit::Pear;
  static constexpr std::array kTable = {EnumName{Fruit::Apple, "apple"},
                                        EnumName{Fruit::Pear, "pear"}};
};

namespace {

static_assert(to_string(Fruit::Pear) == "pear");
static_assert(from_string<Fruit>("APPLE") == Fruit::Apple);
static_assert(!try_from_string<Fruit>("plum"));
static_assert(NamedEnum<Fruit>);
static_assert(!NamedEnum<int>);

// The check that guards every table must itself be able to fail.
using Rows = std::array<EnumName<Fruit>, 2>;
static_assert(detail::table_is_complete(EnumNames<Fruit>::kTable, Fruit::Pear));
static_assert(!detail::table_is_complete(
    std::array{EnumName{Fruit::Apple, "apple"}}, Fruit::Pear));
static_assert(!detail::table_is_complete(Rows{EnumName{Fruit::Pear, "pear"},
                                              EnumName{Fruit::Apple, "apple"}},
                                         Fruit::Pear));
static_assert(!detail::table_is_complete(Rows{EnumName{Fruit::Apple, "apple"},
                                              EnumName{Fruit::Pear, "Apple"}},
                                         Fruit::Pear));

TEST(EnumNames, RoundTrip) {
  for (const auto& entry : enum_table<Fruit>()) {
    EXPECT_EQ(from_string<Fruit>(to_string(entry.value)), entry.value);
  }
}

TEST(EnumNames, UnknownNameListsTheNames) {
  try {
    from_string<Fruit>("plum");
    FAIL() << "no ParseError";
  } catch (const ParseError& error) {
    EXPECT_STREQ(error.what(),
                 "unknown fruit 'plum'; expected one of apple, pear");
  }
}

TEST(EnumNames, ValueOutsideTheEnumIsABug) {
  EXPECT_THROW(to_string(static_cast<Fruit>(7)), InternalError);
}

}  // namespace
}  // namespace memscale
