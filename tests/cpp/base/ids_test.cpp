#include "memscale/base/ids.h"

#include <gtest/gtest.h>

#include <type_traits>
#include <unordered_set>

namespace memscale {
namespace {

static_assert(!std::is_convertible_v<OpId, ValueId>);
static_assert(!std::is_constructible_v<OpId, ValueId>);
static_assert(!std::is_convertible_v<std::size_t, OpId>);
static_assert(std::is_trivially_copyable_v<OpId> && sizeof(OpId) == 4);
static_assert(OpId(3) < OpId(4) && OpId(3) == OpId(3));

TEST(StrongId, DefaultIsInvalid) {
  const LayerId none;
  EXPECT_FALSE(none.valid());
  EXPECT_THROW(none.index(), InternalError);
  EXPECT_LT(LayerId(1'000'000), none);
  EXPECT_EQ(str(none, " ", LayerId(5)), "- 5");
}

TEST(StrongId, HoldsAnIndex) {
  EXPECT_TRUE(StorageId(0).valid());
  EXPECT_EQ(StorageId(7).index(), 7u);
  EXPECT_EQ(OpId(4'294'967'294u).index(), 4'294'967'294u);
  EXPECT_THROW(OpId(4'294'967'295u), InternalError);
  EXPECT_THROW(OpId(std::size_t{1} << 32), InternalError);
}

TEST(StrongId, Hashes) {
  const std::unordered_set<ValueId> set = {ValueId(1), ValueId(2), ValueId(1)};
  EXPECT_EQ(set.size(), 2u);
}

}  // namespace
}  // namespace memscale
