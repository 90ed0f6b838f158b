#include "memscale/base/suggest.h"

#include <gtest/gtest.h>

#include <array>

namespace memscale {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"budget", "warmup_steps",
                                                    "log_file", "mode"};

TEST(Suggest, EditDistance) {
  EXPECT_EQ(edit_distance("", ""), 0u);
  EXPECT_EQ(edit_distance("abc", ""), 3u);
  EXPECT_EQ(edit_distance("", "ab"), 2u);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3u);
  EXPECT_EQ(edit_distance("Mode", "mODE"), 0u);
  // Neighbours swapped are one slip, not two.
  EXPECT_EQ(edit_distance("budegt", "budget"), 1u);
  EXPECT_EQ(edit_distance("abcd", "badc"), 2u);
}

TEST(Suggest, FindsTheSlip) {
  EXPECT_EQ(nearest_name("buget", kNames), "budget");
  EXPECT_EQ(nearest_name("BUDGET", kNames), "budget");
  EXPECT_EQ(nearest_name("warmup_step", kNames), "warmup_steps");
  EXPECT_EQ(nearest_name("logfile", kNames), "log_file");
}

TEST(Suggest, IsSilentWhenNothingIsNear) {
  EXPECT_EQ(nearest_name("learning_rate", kNames), std::nullopt);
  EXPECT_EQ(nearest_name("x", kNames), std::nullopt);
  EXPECT_EQ(nearest_name("", kNames), std::nullopt);
  EXPECT_EQ(nearest_name("mode", {}), std::nullopt);
}

TEST(Suggest, ManyNearestFirstInOrderGiven) {
  constexpr std::array<std::string_view, 4> kCards = {"rtx3060", "rtx3070",
                                                      "rtx4060", "a100"};
  EXPECT_EQ(nearest_names("rtx3060x", kCards, 2),
            (std::vector<std::string>{"rtx3060", "rtx3070"}));
  EXPECT_EQ(nearest_names("rtx3060x", kCards, 9).size(), 3u);
  EXPECT_TRUE(nearest_names("rtx3060", kCards, 0).empty());
}

}  // namespace
}  // namespace memscale
