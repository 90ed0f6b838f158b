#include "memscale/core/hardware/hardware.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "memscale/base/error.h"
#include "memscale/core/hardware/known_devices.h"

namespace memscale {
namespace {

std::string error_of(std::string_view name) {
  try {
    return str("found ", find_device(name).name);
  } catch (const HardwareError& error) {
    return error.what();
  }
}

TEST(Figure, ABetterSourceWins) {
  Figure<double> figure;
  EXPECT_FALSE(figure.known());
  figure.improve({2.0, Source::Known});
  EXPECT_EQ(figure.value, 2.0);
  figure.improve({3.0, Source::Measured});
  figure.improve({4.0, Source::Detected});
  EXPECT_EQ(figure.value, 3.0);
  EXPECT_EQ(figure.source, Source::Measured);
  figure.improve({});
  EXPECT_EQ(figure.value, 3.0);
  figure.improve({5.0, Source::Measured});  // the newer measurement
  EXPECT_EQ(figure.value, 5.0);
  EXPECT_FALSE(Figure<double>::from(std::nullopt, Source::Known).known());
}

TEST(DeviceSpec, MeasuredIsACopyWithTheFiguresGiven) {
  const DeviceSpec card = find_device("RTX 3090");
  const DeviceSpec here = card.measured(std::nullopt, 60e12, 6e9);
  EXPECT_EQ(here.fp32_flops.source, Source::Known);
  EXPECT_EQ(here.half_flops.value, 60e12);
  EXPECT_EQ(here.half_flops.source, Source::Measured);
  EXPECT_EQ(here.link_bandwidth.value, 6e9);
  EXPECT_EQ(here.measured(30e12, 50e12, std::nullopt).half_flops.value, 50e12);
  EXPECT_EQ(card.half_flops.source, Source::Known);
}

TEST(DeviceSpec, EachFigureNamesThemAll) {
  std::string names;
  find_device("A100 80GB")
      .each_figure([&](std::string_view name, const auto& figure) {
        EXPECT_TRUE(figure.known()) << name;
        names += str(name, " ");
      });
  EXPECT_EQ(names,
            "memory memory_bandwidth fp32_flops tf32_flops half_flops "
            "supports_bf16 link_bandwidth ");
}

TEST(KnownDevices, FiguresArePlausible) {
  std::set<std::string> names;
  for (const DeviceSpec& device : known_devices()) {
    SCOPED_TRACE(device.name);
    EXPECT_TRUE(names.insert(device.name).second);
    EXPECT_TRUE(device.vendor == "NVIDIA" || device.vendor == "AMD");
    EXPECT_EQ(device.compute_capability.has_value(), device.vendor == "NVIDIA");
    EXPECT_GE(device.memory.value, 5_GiB);
    EXPECT_LE(device.memory.value, 300_GiB);
    EXPECT_GE(device.memory_bandwidth.value, 200e9);
    EXPECT_LE(device.memory_bandwidth.value, 10e12);
    EXPECT_GE(device.fp32_flops.value, 5e12);
    EXPECT_LE(device.fp32_flops.value, 200e12);
    // Tensor cores: at least twice the plain rate, on every card here.
    EXPECT_GE(device.half_flops.value, 1.9 * device.fp32_flops.value);
    EXPECT_LE(device.half_flops.value, 3e15);
    if (device.tf32_flops.known()) {
      EXPECT_NEAR(device.tf32_flops.value / device.half_flops.value, 0.5, 0.01);
    }
    EXPECT_GE(device.link_bandwidth.value, 10e9);
    EXPECT_LT(device.link_bandwidth.value, device.memory_bandwidth.value);
    // bf16 came with compute capability 8.0.
    if (device.compute_capability) {
      EXPECT_EQ(device.supports_bf16.value,
                device.compute_capability->major >= 8);
      EXPECT_EQ(device.tf32_flops.known(),
                device.compute_capability->major >= 8);
    }
    EXPECT_EQ(device.memory.source, Source::Known);
    EXPECT_EQ(device.link_bandwidth.source, Source::Known);
    // Each card is found under its own name.
    EXPECT_EQ(&find_device(device.name), &device);
  }
  EXPECT_GE(names.size(), 30u);
}

TEST(KnownDevices, SpotChecksAgainstDataSheets) {
  const DeviceSpec& ampere = find_device("RTX 3090");
  EXPECT_EQ(ampere.memory.value, 24_GiB);
  EXPECT_EQ(ampere.compute_capability, (ComputeCapability{8, 6}));
  EXPECT_DOUBLE_EQ(ampere.memory_bandwidth.value, 936e9);
  EXPECT_DOUBLE_EQ(ampere.fp32_flops.value, 35.6e12);
  EXPECT_DOUBLE_EQ(find_device("A100 80GB").half_flops.value, 312e12);
  EXPECT_DOUBLE_EQ(find_device("A100 80GB").tf32_flops.value, 156e12);
  EXPECT_DOUBLE_EQ(find_device("A100 80GB").fp32_flops.value, 19.5e12);
  EXPECT_DOUBLE_EQ(find_device("A100 40GB").memory_bandwidth.value, 1555e9);
  EXPECT_DOUBLE_EQ(ampere.tf32_flops.value, 35.6e12);
  EXPECT_EQ(find_device("A100 80GB").memory.value, 80_GiB);
  EXPECT_FALSE(find_device("T4").supports_bf16.value);
  EXPECT_DOUBLE_EQ(find_device("H100 SXM").memory_bandwidth.value, 3350e9);
}

TEST(KnownDevices, NamesAreReadTolerantly) {
  for (const auto* name : {"RTX 3090", "rtx3090", "NVIDIA GeForce RTX 3090",
                           "GeForce RTX-3090", "  nvidia  RTX_3090 "}) {
    EXPECT_EQ(find_device(name).name, "RTX 3090") << name;
  }
  // The names that drivers report.
  const std::pair<const char*, const char*> drivers[] = {
      {"NVIDIA A100-SXM4-80GB", "A100 80GB"},
      {"NVIDIA A100-SXM4-40GB", "A100 40GB"},
      {"NVIDIA A100-PCIE-40GB", "A100 40GB"},
      {"NVIDIA A100 80GB PCIe", "A100 80GB PCIe"},
      {"NVIDIA H100 80GB HBM3", "H100 SXM"},
      {"NVIDIA H100 PCIe", "H100 PCIe"},
      {"NVIDIA H200", "H200"},
      {"NVIDIA B200", "B200"},
      {"Tesla T4", "T4"},
      {"Tesla V100-SXM2-16GB", "V100 16GB"},
      {"Tesla V100-SXM2-32GB", "V100 32GB"},
      {"NVIDIA RTX A6000", "RTX A6000"},
      {"NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"},
      {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
       "RTX PRO 6000 Blackwell"},
      {"Quadro RTX 8000", "Quadro RTX 8000"},
      {"NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"},
      {"NVIDIA L40S", "L40S"},
      {"AMD Instinct MI300X", "MI300X"},
  };
  for (const auto& [driver, name] : drivers) {
    EXPECT_EQ(find_device(driver).name, name) << driver;
  }
}

TEST(KnownDevices, MemoryTellsCardsOfOneNameApart) {
  const char* const name = "NVIDIA GeForce RTX 4060 Ti";
  EXPECT_EQ(try_find_device(name), nullptr);
  EXPECT_EQ(find_device(name, 8_GiB).name, "RTX 4060 Ti 8GB");
  EXPECT_EQ(find_device(name, Bytes(16'700'000'000)).name, "RTX 4060 Ti 16GB");
  EXPECT_EQ(error_of(name),
            "several devices are called 'NVIDIA GeForce RTX 4060 Ti': "
            "RTX 4060 Ti 8GB, RTX 4060 Ti 16GB");
}

TEST(KnownDevices, UnknownNamesGetSuggestions) {
  EXPECT_EQ(error_of("RTX 309"),
            "unknown device 'RTX 309'; did you mean RTX 3090, RTX 3060, RTX "
            "3070?");
  EXPECT_EQ(error_of("Voodoo 2 SLI"), "unknown device 'Voodoo 2 SLI'");
  EXPECT_EQ(error_of(""), "unknown device ''");
  EXPECT_EQ(error_of("NVIDIA"), "unknown device 'NVIDIA'");
}

TEST(KnownDevices, CompletedFillsGapsAndKeepsWhatWasDetected) {
  DeviceSpec device =
      detected_device("NVIDIA GeForce RTX 3090", "NVIDIA",
                      Bytes(25'300'000'000), std::nullopt, false);
  device.link_bandwidth = {6e9, Source::Measured};
  const DeviceSpec full = completed(device);
  EXPECT_EQ(full.name, "NVIDIA GeForce RTX 3090");
  EXPECT_EQ(full.vendor, "NVIDIA");
  EXPECT_EQ(full.memory.value, Bytes(25'300'000'000));
  EXPECT_EQ(full.memory.source, Source::Detected);
  EXPECT_EQ(full.link_bandwidth.value, 6e9);
  EXPECT_EQ(full.half_flops.source, Source::Known);
  EXPECT_EQ(full.half_flops.value, 71e12);
  EXPECT_EQ(full.compute_capability, (ComputeCapability{8, 6}));
  EXPECT_FALSE(full.supports_bf16.value);

  EXPECT_EQ(full.text(), "DeviceSpec(NVIDIA GeForce RTX 3090, 23.56 GiB)");
  EXPECT_EQ(DeviceSpec().text(), "DeviceSpec(, memory unknown)");

  const DeviceSpec other = detected_device("some new card", "", std::nullopt,
                                           std::nullopt, std::nullopt);
  EXPECT_FALSE(other.half_flops.known());
  EXPECT_FALSE(other.memory.known());
}

}  // namespace
}  // namespace memscale
