#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/base/enum_names.h"

// What the planner knows about the machine, and how it came to know it.
// Plain values: copy freely.

namespace memscale {

// Where a figure comes from. A later one in this list replaces an earlier one.
enum class Source {
  Unknown,   // no value
  Known,     // the built-in table: public data sheets
  Detected,  // asked of the driver or the kernel
  Measured,  // timed on this machine
};

template <>
struct EnumNames<Source> {
  static constexpr std::string_view kWhat = "source";
  static constexpr Source kLast = Source::Measured;
  static constexpr std::array kTable = {
      EnumName{Source::Unknown, "unknown"},
      EnumName{Source::Known, "known"},
      EnumName{Source::Detected, "detected"},
      EnumName{Source::Measured, "measured"},
  };
};

// A value with its source. Unknown figures hold T{}, which means nothing.
template <typename T>
struct Figure {
  T value{};
  Source source = Source::Unknown;

  // Unknown if there is no value.
  static Figure from(std::optional<T> value, Source source) {
    return value ? Figure{*value, source} : Figure();
  }

  bool known() const { return source != Source::Unknown; }
  // Takes the other's value if it has one and its source is not the worse.
  void improve(const Figure& other) {
    if (other.known() && other.source >= source) *this = other;
  }
};

// CUDA's "8.6".
struct ComputeCapability {
  int major = 0;
  int minor = 0;
  bool operator==(const ComputeCapability&) const = default;
};

// One accelerator. Rates are peaks; real work reaches a part of them.
struct DeviceSpec {
  std::string name;
  std::string vendor;        // empty if unknown
  std::string architecture;  // empty if unknown
  std::optional<ComputeCapability> compute_capability;
  Figure<Bytes> memory;             // all of it, before context and workspaces
  Figure<double> memory_bandwidth;  // bytes/s
  Figure<double> fp32_flops;        // FLOP/s, outside tensor cores
  Figure<double> tf32_flops;        // FLOP/s, fp32 matmul of 10-bit mantissas,
                                    // dense; unknown: the card has none
  Figure<double> half_flops;        // FLOP/s, bf16 or fp16 matmul, dense,
                                    // accumulated in fp32
  Figure<bool> supports_bf16;       // in hardware
  Figure<double> link_bandwidth;    // bytes/s, host to device, one way, pinned

  // Fills gaps, and replaces figures whose source is worse, from another
  // description of the same device.
  void improve(const DeviceSpec& other);

  // A copy with these figures, as measured; those not given stay.
  DeviceSpec measured(std::optional<double> fp32, std::optional<double> half,
                      std::optional<double> link) const;

  // "DeviceSpec(RTX 3090, 24.00 GiB)": for logs and repr.
  std::string text() const;

  // Calls visit(name, figure) for each figure above, in that order.
  template <typename Visitor>
  void each_figure(Visitor&& visit) const {
    visit("memory", memory);
    visit("memory_bandwidth", memory_bandwidth);
    visit("fp32_flops", fp32_flops);
    visit("tf32_flops", tf32_flops);
    visit("half_flops", half_flops);
    visit("supports_bf16", supports_bf16);
    visit("link_bandwidth", link_bandwidth);
  }
};

struct HostSpec {
  // Both are limited by the control group that the process runs in.
  Bytes total_memory;
  Bytes available_memory;  // what can be taken now without swapping
  int num_cores = 0;       // that this process may run on
};

struct Hardware {
  std::vector<DeviceSpec> devices;  // empty: no accelerator
  HostSpec host;
};

}  // namespace memscale
