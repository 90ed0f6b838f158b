#pragma once

namespace memscale {

// Products of bytes and nanoseconds do not fit 64 bits; doubles would make
// plans depend on the host's rounding.
__extension__ using Wide = __int128;

constexpr Wide power_of_two(int exponent) {
  Wide power = 1;
  for (int i = 0; i < exponent; ++i) power *= 2;
  return power;
}

}  // namespace memscale
