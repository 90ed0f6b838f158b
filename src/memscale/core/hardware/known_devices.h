#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "memscale/base/bytes.h"
#include "memscale/core/hardware/hardware.h"

// The built-in table of cards, from public data sheets: enough to plan for a
// card that is not in this machine. Every figure has Source::Known.
//
// Memory is what the driver reports on a card as shipped (so without what ECC
// takes, where it is on by default), the link is what pinned copies reach over
// the card's full PCIe width: 12, 24 and 50 GB/s for generations 3, 4 and 5.

namespace memscale {

// Ordered by family, then size. Lives for ever.
std::span<const DeviceSpec> known_devices();

// The card of that name, in any case and spacing, with or without the words
// "NVIDIA GeForce", "Tesla", "AMD Instinct"; also the names that drivers use
// ("NVIDIA A100-SXM4-80GB"). Where several cards share a name ("A100"),
// `memory` picks the nearest. Throws HardwareError with suggestions if there is
// no such card, or if several share the name and no memory is given.
const DeviceSpec& find_device(std::string_view name,
                              std::optional<Bytes> memory = std::nullopt);

// The same; null instead of an error.
const DeviceSpec* try_find_device(std::string_view name,
                                  std::optional<Bytes> memory = std::nullopt);

// `device` with its gaps filled from the card of the same name and memory, if
// the table has it.
DeviceSpec completed(DeviceSpec device);

// What a driver said about a device (what it did not say is empty or none),
// completed.
DeviceSpec detected_device(std::string name, std::string vendor,
                           std::optional<Bytes> memory,
                           std::optional<ComputeCapability> capability,
                           std::optional<bool> supports_bf16);

}  // namespace memscale
