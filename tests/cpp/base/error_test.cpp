#include "memscale/base/error.h"

#include <gtest/gtest.h>

namespace memscale {
namespace {

TEST(Error, StrJoinsPartsAndKeepsNumbersWhole) {
  EXPECT_EQ(str("field ", 3, ' ', std::string("x")), "field 3 x");
  EXPECT_EQ(str(), "");
  EXPECT_EQ(str(true, " ", false), "true false");
  // A stream would print 1, 0.1 and 1e+20.
  EXPECT_EQ(str(1.0000001), "1.0000001");
  EXPECT_EQ(str(0.1), "0.1");
  EXPECT_EQ(str(0.1f), "0.1");
}

TEST(Error, EveryErrorIsAnErrorAndARuntimeError) {
  EXPECT_THROW(throw ConfigError("x"), Error);
  EXPECT_THROW(throw ParseError("x"), Error);
  EXPECT_THROW(throw HardwareError("x"), Error);
  EXPECT_THROW(throw PlanError("x"), Error);
  EXPECT_THROW(throw InternalError("x"), std::runtime_error);
}

}  // namespace
}  // namespace memscale
