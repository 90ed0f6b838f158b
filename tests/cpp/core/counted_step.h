#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "memscale/core/tape/tape_rules.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

// What can go wrong on purpose.
struct Trouble {
  bool no_memory_for_copies = false;
  // The first call again of this op throws; the backward op that asked for it
  // tries a second time.
  OpId raises{};
};

// A step under tapes, carried out on memory that only counts: each storage has
// a number for what is in it, which follows from the op and what it read.
struct CountedStep {
  std::vector<std::int64_t> bytes;  // while each op ran, those repeated too
  // What must not be: an op that was repeated twice, bytes of another version
  // or other bytes that were read, a storage that was read after its end.
  std::vector<std::string> faults;
  std::int64_t held_by_tapes = 0;  // at the end
  std::size_t num_repeated = 0;
  std::size_t num_failed = 0;  // saves that could not be had
};

// TapeBytes of a third kind, beside tensors and a trace that is written.
CountedStep counted_step(const Trace& plain,
                         const std::vector<TapeRules>& layers, bool on_cpu,
                         const Trouble& trouble = {});

}  // namespace memscale
