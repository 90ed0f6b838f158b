#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "plan_json_target.h"

namespace memscale {
namespace {

// What `make fuzz` starts from and what it once found, without the fuzzer.
TEST(PlanJsonCorpus, EveryTextIsRefusedOrAPlan) {
  std::size_t count = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(MEMSCALE_PLAN_JSON_CORPUS)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    ++count;
    EXPECT_NO_THROW(try_plan_json(text)) << entry.path();
    // Damaged, too: bytes missing, and with another bit.
    for (std::size_t i = 0; i < text.size(); i += 3) {
      std::string damaged = text;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << i % 8));
      EXPECT_NO_THROW(try_plan_json(damaged)) << entry.path() << " " << i;
      damaged = text;
      damaged.erase(i, 1);
      EXPECT_NO_THROW(try_plan_json(damaged)) << entry.path() << " " << i;
    }
  }
  EXPECT_GE(count, 8u);
}

}  // namespace
}  // namespace memscale
