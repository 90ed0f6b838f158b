#include "memscale/core/hardware/host.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "memscale/base/ascii.h"
#include "memscale/base/error.h"

namespace memscale {
namespace {

namespace fs = std::filesystem;

std::optional<std::string> read_text(const fs::path& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::string_view take_line(std::string_view& rest) {
  const std::size_t end = std::min(rest.find('\n'), rest.size());
  const std::string_view line = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return line;
}

std::optional<std::int64_t> read_integer(std::string_view text) {
  std::int64_t value = 0;
  const char* const begin = text.data();
  const char* const end = begin + text.size();
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

// The number after "<key> " or "<key>:" at the start of a line.
std::optional<std::int64_t> number_after(std::string_view text,
                                         std::string_view key) {
  while (!text.empty()) {
    std::string_view line = take_line(text);
    if (!line.starts_with(key)) continue;
    line.remove_prefix(key.size());
    if (line.empty() || (line.front() != ':' && line.front() != ' ')) continue;
    line = ascii::trim(line.substr(1));
    return read_integer(line.substr(0, std::min(line.find(' '), line.size())));
  }
  return std::nullopt;
}

struct CgroupFiles {
  fs::path mount;
  std::string_view controller;
  const char* limit;
  const char* usage;
};

// Lowers `host` to what the group and its ancestors allow. Inside a container
// the path may be the host's: then the mount itself is our group.
void apply_cgroup(HostSpec& host, const CgroupFiles& files, fs::path group) {
  while (true) {
    const fs::path folder = files.mount / group.relative_path();
    if (const auto text = read_text(folder / files.limit)) {
      const auto limit = parse_cgroup_limit(*text);
      if (limit) {
        Bytes used;
        if (const auto usage = read_text(folder / files.usage)) {
          used = Bytes(read_integer(ascii::trim(*usage)).value_or(0));
        }
        if (const auto stat = read_text(folder / "memory.stat")) {
          used = std::max(Bytes(), used - parse_reclaimable(*stat));
        }
        host.total_memory = std::min(host.total_memory, *limit);
        host.available_memory =
            std::min(host.available_memory, std::max(Bytes(), *limit - used));
      }
    }
    if (!group.has_relative_path()) return;
    group = group.parent_path();
  }
}

int count_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

}  // namespace

MemInfo parse_meminfo(std::string_view text) {
  const auto total = number_after(text, "MemTotal");
  if (!total) throw ParseError("no MemTotal in the text of /proc/meminfo");
  auto available = number_after(text, "MemAvailable");
  if (!available) {
    available = number_after(text, "MemFree").value_or(0) +
                number_after(text, "Cached").value_or(0);
  }
  return {1_KiB * *total, 1_KiB * *available};
}

std::optional<Bytes> parse_cgroup_limit(std::string_view text) {
  const auto limit = read_integer(ascii::trim(text));
  // v1 writes "no limit" as the largest int64, rounded down to a page.
  constexpr Bytes kNoLimit = 4'000'000'000 * 1_GiB;
  if (!limit || *limit < 0 || Bytes(*limit) >= kNoLimit) return std::nullopt;
  return Bytes(*limit);
}

Bytes parse_reclaimable(std::string_view text) {
  // v1 counts the children under "total_", which is what its usage counts too.
  const auto total = number_after(text, "total_inactive_file");
  const auto own = number_after(text, "inactive_file");
  return Bytes(std::max<std::int64_t>(0, total.value_or(own.value_or(0))));
}

std::optional<fs::path> parse_cgroup_path(std::string_view text,
                                          std::string_view controller) {
  while (!text.empty()) {
    // "4:memory:/a/b": hierarchy, controllers, path.
    const std::string_view line = take_line(text);
    const std::size_t first = line.find(':');
    if (first == std::string_view::npos) continue;
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string_view::npos) continue;
    std::string_view names = line.substr(first + 1, second - first - 1);
    if (names.empty() && controller.empty()) {
      return fs::path(line.substr(second + 1));
    }
    while (!names.empty()) {
      const std::size_t comma = std::min(names.find(','), names.size());
      if (names.substr(0, comma) == controller) {
        return fs::path(line.substr(second + 1));
      }
      names.remove_prefix(std::min(comma + 1, names.size()));
    }
  }
  return std::nullopt;
}

HostSpec detect_host(const fs::path& root) {
  const auto meminfo = read_text(root / "proc/meminfo");
  if (!meminfo) {
    throw HardwareError(
        str("cannot read ", (root / "proc/meminfo").string(),
            ": host memory is unknown; MemScale needs Linux's /proc"));
  }
  const MemInfo info = parse_meminfo(*meminfo);
  HostSpec host{info.total, info.available, count_cores()};
  const std::string groups =
      read_text(root / "proc/self/cgroup").value_or(std::string());
  const std::array<CgroupFiles, 2> hierarchies = {
      CgroupFiles{root / "sys/fs/cgroup", "", "memory.max", "memory.current"},
      CgroupFiles{root / "sys/fs/cgroup/memory", "memory",
                  "memory.limit_in_bytes", "memory.usage_in_bytes"},
  };
  for (const CgroupFiles& files : hierarchies) {
    if (auto group = parse_cgroup_path(groups, files.controller)) {
      apply_cgroup(host, files, *group);
    }
  }
  return host;
}

}  // namespace memscale
