#pragma once

#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

#include "memscale/base/bytes.h"
#include "memscale/core/hardware/hardware.h"

// How much host memory there really is: what the kernel says, cut down to the
// limits of the control groups (containers, batch systems) that we run in.
// Planning past such a limit ends in SIGKILL, not in an exception.

namespace memscale {

struct MemInfo {
  Bytes total;
  Bytes available;
};

// Reads the text of /proc/meminfo. Throws ParseError if MemTotal is missing;
// without MemAvailable (old kernels) MemFree + Cached stands in.
MemInfo parse_meminfo(std::string_view text);

// Reads the text of memory.max (v2) or memory.limit_in_bytes (v1). None: no
// limit ("max", or v1's huge number), or nothing that can be read.
std::optional<Bytes> parse_cgroup_limit(std::string_view text);

// Reads the text of memory.stat: the bytes of page cache that the kernel would
// give back before it kills anyone. 0 if the text does not say.
Bytes parse_reclaimable(std::string_view text);

// Reads the text of /proc/self/cgroup: the path of our group in the unified
// hierarchy ("") or of a v1 controller ("memory"). None: not in one.
std::optional<std::filesystem::path> parse_cgroup_path(
    std::string_view text, std::string_view controller);

// The machine under `root`: another root than "/" is for tests. Throws
// HardwareError if there is no readable /proc/meminfo.
HostSpec detect_host(const std::filesystem::path& root = "/");

}  // namespace memscale
