#include "memscale/kernels/bits.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cstdint>
#include <vector>

namespace memscale::kernels {
namespace {

template <typename T>
void check_round_trip(const std::vector<bool>& draws, T one) {
  std::vector<T> elements(draws.size());
  for (std::size_t i = 0; i < draws.size(); ++i)
    elements[i] = draws[i] ? one : 0;
  // A byte more on each side, to see that nothing else is written.
  std::vector<std::uint8_t> bits((draws.size() + 7) / 8 + 1, 0xA5);
  pack_bits(elements.data(), elements.size(), bits.data());
  RC_ASSERT(bits.back() == 0xA5);
  std::vector<T> unpacked(draws.size() + 1, T{7});
  unpack_bits(bits.data(), draws.size(), one, unpacked.data());
  RC_ASSERT(unpacked.back() == T{7});
  unpacked.pop_back();
  RC_ASSERT(unpacked == elements);
}

RC_GTEST_PROP(Bits, ComeBackAsTheyWere, (std::vector<bool> draws)) {
  const std::size_t repeat = *rc::gen::inRange(1, 30);
  std::vector<bool> longer;
  for (std::size_t i = 0; i < repeat; ++i) {
    longer.insert(longer.end(), draws.begin(), draws.end());
  }
  check_round_trip<std::uint16_t>(longer, 0x3F80);
  check_round_trip<std::uint32_t>(longer, 0x3F800000);
  check_round_trip<std::uint64_t>(longer, 0x3FF0000000000000);
}

TEST(Bits, AreInOrder) {
  const std::vector<std::uint32_t> elements = {1, 0, 0, 0, 0, 0, 0, 1, 0, 1};
  std::vector<std::uint8_t> bits(2);
  pack_bits(elements.data(), elements.size(), bits.data());
  EXPECT_EQ(bits, (std::vector<std::uint8_t>{0x81, 0x02}));
}

RC_GTEST_PROP(Narrow, ComesBackAsItWas, (std::vector<std::int32_t> values)) {
  const std::vector<std::int64_t> elements(values.begin(), values.end());
  std::vector<std::int32_t> narrowed(values.size());
  narrow(elements.data(), elements.size(), narrowed.data());
  RC_ASSERT(narrowed == values);
  std::vector<std::int64_t> widened(values.size());
  widen(narrowed.data(), narrowed.size(), widened.data());
  RC_ASSERT(widened == elements);
}

}  // namespace
}  // namespace memscale::kernels
