#include "memscale/core/hardware/hardware.h"

#include "memscale/base/error.h"

namespace memscale {

void DeviceSpec::improve(const DeviceSpec& other) {
  if (vendor.empty()) vendor = other.vendor;
  if (architecture.empty()) architecture = other.architecture;
  if (!compute_capability) compute_capability = other.compute_capability;
  memory.improve(other.memory);
  memory_bandwidth.improve(other.memory_bandwidth);
  fp32_flops.improve(other.fp32_flops);
  tf32_flops.improve(other.tf32_flops);
  half_flops.improve(other.half_flops);
  supports_bf16.improve(other.supports_bf16);
  link_bandwidth.improve(other.link_bandwidth);
}

DeviceSpec DeviceSpec::measured(std::optional<double> fp32,
                                std::optional<double> half,
                                std::optional<double> link) const {
  using Rate = Figure<double>;
  DeviceSpec result = *this;
  result.fp32_flops.improve(Rate::from(fp32, Source::Measured));
  result.half_flops.improve(Rate::from(half, Source::Measured));
  result.link_bandwidth.improve(Rate::from(link, Source::Measured));
  return result;
}

std::string DeviceSpec::text() const {
  return str("DeviceSpec(", name, ", ",
             memory.known() ? memory.value.human() : "memory unknown", ")");
}

}  // namespace memscale
