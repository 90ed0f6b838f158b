#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "memscale/base/bytes.h"
#include "memscale/core/plan/choice.h"
#include "memscale/core/time/cost_model.h"
#include "memscale/core/trace/trace.h"

// Adam's moments at one byte each: the step with them, and what it takes. The
// rule that chooses this is in the .cpp. See docs/optimizer.md.

namespace memscale {

// Tensors of fewer elements keep 32 bits.
inline constexpr std::int64_t kMin8BitElements = 4096;

// Codes that share a float. kernels/blockwise.h, which is not seen from here,
// has it too; runtime/optimizer/optimizer.cpp, which sees both, compares.
inline constexpr std::int64_t kStateBlock = 256;

// The same step with 8-bit moments: each state of kMin8BitElements or more is a
// byte for each element and a float for every 256 of them, smaller ones are
// floats; the optimizer's step is one fused op. `on_cpu`: it runs in kernels of
// ours, without temporaries; other devices take it in pieces.
Trace with_8bit_state(const Trace& trace, bool on_cpu);

// How long an optimizer's step takes, in nanoseconds.
struct StepTimes {
  std::int64_t plain = 0;  // as traced, all parameters
  std::int64_t with_8bit = 0;

  // By so much a step with 8-bit state is slower; faster ones count as equal.
  std::int64_t extra() const;
  // 5: it takes about five times as long, at least once.
  std::int64_t times() const;
};

// Of the plain step's trace. `in_pieces`: by torch's operators, where the
// device has no kernel of ours.
StepTimes optimizer_step_times(const Trace& plain, const CostModel& cost,
                               bool in_pieces);

// The bits of each of Adam's moments under these choices of a plan: 8 or 32.
std::int64_t state_bits(std::span<const Choice> choices);

// What the optimizer keeps from step to step, on the device.
Bytes optimizer_state_bytes(const Trace& trace);

}  // namespace memscale
