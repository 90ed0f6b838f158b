#include "memscale/core/hardware/known_devices.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "memscale/base/ascii.h"
#include "memscale/base/error.h"
#include "memscale/base/suggest.h"

namespace memscale {
namespace {

struct Row {
  std::string_view name;
  std::string_view aliases;  // further names, separated by '|'
  std::string_view architecture;
  ComputeCapability capability;  // {0, 0}: not a CUDA card
  std::int64_t memory_mib;
  double bandwidth;  // GB/s
  double fp32;       // TFLOP/s
  double tf32;       // TFLOP/s, dense; 0: has none
  double half;       // TFLOP/s
  bool bf16;
  double link;  // GB/s
};

constexpr double kPcie3 = 12, kPcie4 = 24, kPcie5 = 50;
constexpr double kPcie4x8 = kPcie4 / 2;

// GeForce cards run fp16 with fp32 accumulation, which training needs, at half
// the rate that their data sheets print for fp16 accumulation. TF32 came with
// compute capability 8.0; AMD's own is not used by torch unless it is told to.
// clang-format off
constexpr std::array kRows = {
  // Consumer.
  Row{"RTX 2060", "", "Turing", {7, 5}, 6144, 336, 6.5, 0, 25.8, false, kPcie3},
  Row{"RTX 2070", "", "Turing", {7, 5}, 8192, 448, 7.5, 0, 29.9, false, kPcie3},
  Row{"RTX 2080", "", "Turing", {7, 5}, 8192, 448, 10.1, 0, 40.3, false, kPcie3},
  Row{"RTX 2080 Ti", "", "Turing", {7, 5}, 11264, 616, 13.4, 0, 53.8, false, kPcie3},
  Row{"RTX 3060", "RTX 3060 12GB", "Ampere", {8, 6}, 12288, 360, 12.7, 12.7, 25.5, true, kPcie4},
  Row{"RTX 3070", "", "Ampere", {8, 6}, 8192, 448, 20.3, 20.3, 40.6, true, kPcie4},
  Row{"RTX 3080", "RTX 3080 10GB", "Ampere", {8, 6}, 10240, 760, 29.8, 29.8, 59.5, true, kPcie4},
  Row{"RTX 3090", "", "Ampere", {8, 6}, 24576, 936, 35.6, 35.6, 71.0, true, kPcie4},
  Row{"RTX 3090 Ti", "", "Ampere", {8, 6}, 24564, 1008, 40.0, 40.0, 80.0, true, kPcie4},
  Row{"RTX 4060 Ti 8GB", "RTX 4060 Ti", "Ada", {8, 9}, 8188, 288, 22.1, 22.1, 44.1, true, kPcie4x8},
  Row{"RTX 4060 Ti 16GB", "RTX 4060 Ti", "Ada", {8, 9}, 16380, 288, 22.1, 22.1, 44.1, true, kPcie4x8},
  Row{"RTX 4070", "", "Ada", {8, 9}, 12282, 504, 29.1, 29.1, 58.3, true, kPcie4},
  Row{"RTX 4080", "", "Ada", {8, 9}, 16376, 717, 48.7, 48.7, 97.5, true, kPcie4},
  Row{"RTX 4090", "", "Ada", {8, 9}, 24564, 1008, 82.6, 82.6, 165.2, true, kPcie4},
  Row{"RTX 5070", "", "Blackwell", {12, 0}, 12227, 672, 30.9, 30.9, 61.7, true, kPcie5},
  Row{"RTX 5070 Ti", "", "Blackwell", {12, 0}, 16303, 896, 43.9, 43.9, 87.9, true, kPcie5},
  Row{"RTX 5080", "", "Blackwell", {12, 0}, 16303, 960, 56.3, 56.3, 112.6, true, kPcie5},
  Row{"RTX 5090", "", "Blackwell", {12, 0}, 32607, 1792, 104.8, 104.8, 209.5, true, kPcie5},
  // Workstation.
  Row{"Quadro RTX 8000", "RTX 8000", "Turing", {7, 5}, 49152, 672, 16.3, 0, 130.5, false, kPcie3},
  Row{"RTX A4000", "A4000", "Ampere", {8, 6}, 16376, 448, 19.2, 38.3, 76.7, true, kPcie4},
  Row{"RTX A5000", "A5000", "Ampere", {8, 6}, 24564, 768, 27.8, 55.6, 111.1, true, kPcie4},
  Row{"RTX A6000", "A6000", "Ampere", {8, 6}, 49140, 768, 38.7, 77.4, 154.8, true, kPcie4},
  Row{"RTX 6000 Ada", "", "Ada", {8, 9}, 49140, 960, 91.1, 182.1, 364.2, true, kPcie4},
  Row{"RTX PRO 6000 Blackwell", "RTX PRO 6000|RTX PRO 6000 Blackwell Workstation Edition", "Blackwell", {12, 0}, 97887, 1792, 125, 251.9, 503.8, true, kPcie5},
  // Data centre.
  Row{"T4", "", "Turing", {7, 5}, 15360, 320, 8.1, 0, 65, false, kPcie3},
  Row{"V100 16GB", "V100|V100-SXM2-16GB", "Volta", {7, 0}, 16384, 900, 15.7, 0, 125, false, kPcie3},
  Row{"V100 32GB", "V100|V100-SXM2-32GB", "Volta", {7, 0}, 32768, 900, 15.7, 0, 125, false, kPcie3},
  Row{"A10", "", "Ampere", {8, 6}, 23028, 600, 31.2, 62.5, 125, true, kPcie4},
  Row{"A30", "", "Ampere", {8, 0}, 24576, 933, 10.3, 82, 165, true, kPcie4},
  Row{"A40", "", "Ampere", {8, 6}, 46068, 696, 37.4, 74.8, 149.7, true, kPcie4},
  Row{"A100 40GB", "A100|A100-SXM4-40GB|A100-PCIE-40GB", "Ampere", {8, 0}, 40960, 1555, 19.5, 156, 312, true, kPcie4},
  Row{"A100 80GB", "A100|A100-SXM4-80GB", "Ampere", {8, 0}, 81920, 2039, 19.5, 156, 312, true, kPcie4},
  Row{"A100 80GB PCIe", "", "Ampere", {8, 0}, 81920, 1935, 19.5, 156, 312, true, kPcie4},
  Row{"L4", "", "Ada", {8, 9}, 23034, 300, 30.3, 60, 121, true, kPcie4},
  Row{"L40S", "", "Ada", {8, 9}, 46068, 864, 91.6, 183, 362, true, kPcie4},
  Row{"H100 PCIe", "H100", "Hopper", {9, 0}, 81559, 2039, 51.2, 378, 756, true, kPcie5},
  Row{"H100 SXM", "H100|H100 80GB HBM3|H100 SXM5", "Hopper", {9, 0}, 81559, 3350, 66.9, 494.7, 989, true, kPcie5},
  Row{"H200", "H200 SXM", "Hopper", {9, 0}, 143771, 4800, 66.9, 494.7, 989, true, kPcie5},
  Row{"B200", "", "Blackwell", {10, 0}, 183359, 8000, 75, 1125, 2250, true, kPcie5},
  Row{"MI210", "", "CDNA2", {0, 0}, 65520, 1638, 22.6, 0, 181, true, kPcie4},
  Row{"MI300X", "MI300X OAM", "CDNA3", {0, 0}, 196592, 5300, 163.4, 0, 1307, true, kPcie5},
};
// clang-format on

// Letters and digits only, without the words that name the maker or the line
// and not the card.
std::string key_of(std::string_view name) {
  constexpr std::array<std::string_view, 8> kNoise = {
      "nvidia", "geforce",  "tesla",  "quadro",
      "amd",    "instinct", "radeon", "generation"};
  std::string key, word;
  const auto end_word = [&] {
    if (std::ranges::find(kNoise, word) == kNoise.end()) key += word;
    word.clear();
  };
  for (const char c : name) {
    if (ascii::is_alnum(c)) {
      word += ascii::to_lower(c);
    } else {
      end_word();
    }
  }
  end_word();
  return key;
}

struct Entry {
  std::vector<std::string> keys;  // of the name first, then of the aliases
  bool goes_by(std::string_view key) const {
    return std::ranges::find(keys, key) != keys.end();
  }
};

struct Table {
  std::vector<DeviceSpec> devices;
  std::vector<Entry> entries;  // the same order
};

DeviceSpec spec_of(const Row& row) {
  const auto known = [](auto value) {
    return Figure<decltype(value)>{value, Source::Known};
  };
  DeviceSpec spec;
  spec.name = row.name;
  spec.vendor = row.capability.major > 0 ? "NVIDIA" : "AMD";
  spec.architecture = row.architecture;
  if (row.capability.major > 0) spec.compute_capability = row.capability;
  spec.memory = known(1_MiB * row.memory_mib);
  spec.memory_bandwidth = known(row.bandwidth * 1e9);
  spec.fp32_flops = known(row.fp32 * 1e12);
  if (row.tf32 > 0) spec.tf32_flops = known(row.tf32 * 1e12);
  spec.half_flops = known(row.half * 1e12);
  spec.supports_bf16 = known(row.bf16);
  spec.link_bandwidth = known(row.link * 1e9);
  return spec;
}

Table build() {
  Table table;
  for (const Row& row : kRows) {
    table.devices.push_back(spec_of(row));
    Entry entry;
    entry.keys.push_back(key_of(row.name));
    std::string_view rest = row.aliases;
    while (!rest.empty()) {
      const std::size_t bar = std::min(rest.find('|'), rest.size());
      entry.keys.push_back(key_of(rest.substr(0, bar)));
      rest.remove_prefix(std::min(bar + 1, rest.size()));
    }
    table.entries.push_back(std::move(entry));
  }
  return table;
}

const Table& table() {
  static const Table instance = build();
  return instance;
}

// The cards that go by that key; no card's own name is another's alias.
std::vector<const DeviceSpec*> matches(std::string_view key) {
  std::vector<const DeviceSpec*> found;
  for (std::size_t i = 0; i < table().entries.size(); ++i) {
    const Entry& entry = table().entries[i];
    if (entry.goes_by(key)) found.push_back(&table().devices[i]);
  }
  return found;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += str(text.empty() ? "" : ", ", name);
  return text;
}

[[noreturn]] void fail(std::string_view name,
                       const std::vector<const DeviceSpec*>& found) {
  if (found.size() > 1) {
    std::vector<std::string> names;
    names.reserve(found.size());
    for (const DeviceSpec* device : found) names.push_back(device->name);
    throw HardwareError(str("several devices are called ", ascii::quoted(name),
                            ": ", listed(names)));
  }
  std::vector<std::string_view> keys, names;
  for (std::size_t i = 0; i < table().entries.size(); ++i) {
    keys.push_back(table().entries[i].keys.front());
    names.push_back(table().devices[i].name);
  }
  std::vector<std::string> near;
  for (const std::string& key : nearest_names(key_of(name), keys, 3)) {
    near.emplace_back(names[std::ranges::find(keys, key) - keys.begin()]);
  }
  throw HardwareError(str("unknown device ", ascii::quoted(name),
                          near.empty() ? "" : "; did you mean ", listed(near),
                          near.empty() ? "" : "?"));
}

std::int64_t gap(const DeviceSpec& device, Bytes memory) {
  const std::int64_t gap = (device.memory.value - memory).count();
  return gap < 0 ? -gap : gap;
}

}  // namespace

std::span<const DeviceSpec> known_devices() { return table().devices; }

const DeviceSpec* try_find_device(std::string_view name,
                                  std::optional<Bytes> memory) {
  const auto found = matches(key_of(name));
  if (found.size() == 1) return found.front();
  if (found.empty() || !memory) return nullptr;
  return *std::ranges::min_element(
      found, {}, [&](const DeviceSpec* d) { return gap(*d, *memory); });
}

const DeviceSpec& find_device(std::string_view name,
                              std::optional<Bytes> memory) {
  if (const DeviceSpec* device = try_find_device(name, memory)) return *device;
  fail(name, matches(key_of(name)));
}

DeviceSpec completed(DeviceSpec device) {
  std::optional<Bytes> memory;
  if (device.memory.known()) memory = device.memory.value;
  const DeviceSpec* known = try_find_device(device.name, memory);
  if (known) device.improve(*known);
  return device;
}

DeviceSpec detected_device(std::string name, std::string vendor,
                           std::optional<Bytes> memory,
                           std::optional<ComputeCapability> capability,
                           std::optional<bool> supports_bf16) {
  DeviceSpec device;
  device.name = std::move(name);
  device.vendor = std::move(vendor);
  device.compute_capability = capability;
  device.memory = Figure<Bytes>::from(memory, Source::Detected);
  device.supports_bf16 = Figure<bool>::from(supports_bf16, Source::Detected);
  return completed(std::move(device));
}

}  // namespace memscale
