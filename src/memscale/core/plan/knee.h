#pragma once

#include <cstdint>
#include <span>

#include "memscale/base/bytes.h"
#include "memscale/core/plan/forecast.h"

namespace memscale {

// The plan of a frontier after which more time buys too little memory. The
// frontier has at least one plan; peaks rise and times fall along it.
// `base_nanoseconds` is the step's time without any op that is called again,
// and `margin` is added to every predicted peak.
//
// Note [The knee of a frontier]
// One more percent of the step's time is worth it if it takes at least one
// percent off the peak that is left. With that exchange rate a plan is better
// than another exactly if the product of its step's time and its peak is
// smaller, so the knee is the plan with the smallest product. It is looked for
// on the whole frontier, not walked to: a stretch along which time buys little
// does not hide a drop behind it. Of two with the same product the faster one
// is the knee.
const Forecast& knee_of(std::span<const Forecast> frontier,
                        std::int64_t base_nanoseconds, Bytes margin);

}  // namespace memscale
