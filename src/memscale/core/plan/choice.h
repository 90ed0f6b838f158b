#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "memscale/base/bytes.h"
#include "memscale/core/tape/tape_rules.h"

namespace memscale {

// What one technique does, in one layer or in the whole step. A technique that
// a plan does not use has no choice in it. A plain value.
struct Choice {
  std::string technique;  // its name in the table of plan/technique.h
  std::string choice;     // one of the technique's words: "cheap"
  // Which results of the layer's ops the choice names, where its word is not
  // enough to tell.
  std::optional<KeepSet> keep_set;
  Bytes bytes;                   // freed by it; 0: nothing
  std::int64_t nanoseconds = 0;  // its price, for each step
  std::string reason;

  bool operator==(const Choice&) const = default;
};

}  // namespace memscale
