#pragma once

#include <cstdint>

#include "memscale/core/hardware/hardware.h"
#include "memscale/core/trace/trace.h"

namespace memscale {

// Where products of 32-bit floats may use TF32, which cards since compute
// capability 8.0 compute several times as fast. As torch has it by default.
struct Tf32 {
  bool matmuls = false;      // torch.set_float32_matmul_precision
  bool convolutions = true;  // torch.backends.cudnn.allow_tf32; recurrence too
};

// A pass over elements, by what it takes on a core, and on a card.
struct ElementPass {
  std::int64_t elements = 0;
  double cpu_picoseconds = 0;  // for each element
  double cpu_calls = 0;        // of kernels
  double card_bytes = 0;       // moved, for each element
  double card_calls = 0;
};

// How long ops take, from their flops and the bytes they move: the larger of
// both (a roofline), and something for each call. Integers: the same on every
// host. What plans compare are ratios of such times, not clocks.
class CostModel final {
 public:
  // Of a CPU core, and so of the simulated device: rates as measured on an
  // x86-64 server core with torch's kernels, a table for those functions that
  // take more than their bytes.
  static CostModel of_cpu();
  // Of a card. Rates that are not known are those of a mid-range one.
  static CostModel of(const DeviceSpec& device, const Tf32& tf32 = {});

  // What was measured (Op::nanoseconds) counts before what is computed.
  std::int64_t nanoseconds(const Trace& trace, const Op& op) const;

  // Of a whole step, as it is traced.
  std::int64_t nanoseconds(const Trace& trace) const;

  // Of a pass over so many elements that is no op of a trace.
  std::int64_t nanoseconds(const ElementPass& pass) const;

 private:
  double rate(const Trace& trace, const Op& op) const;

  double flops_ = 0;  // FLOP/s, in 32 bits
  double matmul_flops_ = 0;
  double convolution_flops_ = 0;
  double half_flops_ = 0;
  double bandwidth_ = 0;   // bytes/s
  std::int64_t call_ = 0;  // ns
  bool is_cpu_ = false;
};

}  // namespace memscale
