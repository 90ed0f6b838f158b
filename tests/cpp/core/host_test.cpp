#include "memscale/core/hardware/host.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "memscale/base/error.h"

namespace memscale {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMemInfo =
    "MemTotal:       16000000 kB\n"
    "MemFree:         1000000 kB\n"
    "MemAvailable:   12000000 kB\n"
    "Cached:          2000000 kB\n"
    "SwapCached:            7 kB\n";

TEST(Host, ParsesMeminfo) {
  const MemInfo info = parse_meminfo(kMemInfo);
  EXPECT_EQ(info.total, 1_KiB * 16'000'000);
  EXPECT_EQ(info.available, 1_KiB * 12'000'000);
}

TEST(Host, OldKernelsHaveNoMemAvailable) {
  const MemInfo info = parse_meminfo(
      "MemTotal: 100 kB\nMemFree: 10 kB\nSwapCached: 50 kB\nCached: 5 kB\n");
  EXPECT_EQ(info.available, 15_KiB);
}

TEST(Host, RejectsATextThatIsNotMeminfo) {
  EXPECT_THROW(parse_meminfo(""), ParseError);
  EXPECT_THROW(parse_meminfo("MemTotals: 5 kB\n"), ParseError);
  EXPECT_THROW(parse_meminfo("MemTotal: lots\n"), ParseError);
}

TEST(Host, ParsesCgroupLimits) {
  EXPECT_EQ(parse_cgroup_limit("1073741824\n"), 1_GiB);
  EXPECT_EQ(parse_cgroup_limit("max\n"), std::nullopt);
  EXPECT_EQ(parse_cgroup_limit("9223372036854771712\n"), std::nullopt);
  EXPECT_EQ(parse_cgroup_limit("-1"), std::nullopt);
  EXPECT_EQ(parse_cgroup_limit(""), std::nullopt);
  EXPECT_EQ(parse_cgroup_limit("99999999999999999999"), std::nullopt);
}

TEST(Host, ParsesReclaimablePageCache) {
  EXPECT_EQ(parse_reclaimable("anon 5\ninactive_file 4096\n"), 4_KiB);
  EXPECT_EQ(parse_reclaimable("inactive_file 4096\ntotal_inactive_file 8192\n"),
            8_KiB);
  EXPECT_EQ(parse_reclaimable("anon 5\n"), 0_B);
}

TEST(Host, ParsesCgroupPaths) {
  const std::string_view v1 =
      "9:cpu,cpuacct:/a\n4:memory:/docker/x:y\n0::/unified\n";
  EXPECT_EQ(parse_cgroup_path(v1, "memory"), fs::path("/docker/x:y"));
  EXPECT_EQ(parse_cgroup_path(v1, "cpuacct"), fs::path("/a"));
  EXPECT_EQ(parse_cgroup_path(v1, ""), fs::path("/unified"));
  EXPECT_EQ(parse_cgroup_path("0::/\n", "memory"), std::nullopt);
  EXPECT_EQ(parse_cgroup_path("nonsense\n", ""), std::nullopt);
}

// A machine made of files.
class DetectHost : public testing::Test {
 protected:
  DetectHost()
      : root_(fs::temp_directory_path() / str("memscale_host_", ::getpid(), "_",
                                              testing::UnitTest::GetInstance()
                                                  ->current_test_info()
                                                  ->name())) {
    write("proc/meminfo", kMemInfo);
  }
  ~DetectHost() override {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
  }
  void write(const fs::path& path, std::string_view text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  fs::path root_;
};

TEST_F(DetectHost, WithoutCgroupsTheKernelIsRight) {
  const HostSpec host = detect_host(root_);
  EXPECT_EQ(host.total_memory, 1_KiB * 16'000'000);
  EXPECT_EQ(host.available_memory, 1_KiB * 12'000'000);
  EXPECT_GE(host.num_cores, 1);
}

TEST_F(DetectHost, CgroupV2LimitsWithoutPageCache) {
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", "4294967296\n");
  write("sys/fs/cgroup/job/memory.current", "3221225472\n");
  write("sys/fs/cgroup/job/memory.stat", "inactive_file 1073741824\n");
  const HostSpec host = detect_host(root_);
  EXPECT_EQ(host.total_memory, 4_GiB);
  EXPECT_EQ(host.available_memory, 2_GiB);
}

TEST_F(DetectHost, AnAncestorMayBeTighter) {
  write("proc/self/cgroup", "0::/slice/job\n");
  write("sys/fs/cgroup/slice/job/memory.max", "max\n");
  write("sys/fs/cgroup/slice/memory.max", "2147483648\n");
  write("sys/fs/cgroup/slice/memory.current", "4294967296\n");
  const HostSpec host = detect_host(root_);
  EXPECT_EQ(host.total_memory, 2_GiB);
  EXPECT_EQ(host.available_memory, 0_B);
}

TEST_F(DetectHost, CgroupV1InAContainerSeesItsGroupAsTheMount) {
  write("proc/self/cgroup", "4:memory:/docker/abc\n0::/\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "268435456\n");
  const HostSpec host = detect_host(root_);
  EXPECT_EQ(host.total_memory, 1_GiB);
  EXPECT_EQ(host.available_memory, 768_MiB);
}

TEST_F(DetectHost, ALimitAboveTheMachineChangesNothing) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/memory.max", "1099511627776\n");
  EXPECT_EQ(detect_host(root_).total_memory, 1_KiB * 16'000'000);
}

TEST_F(DetectHost, NoProcIsAnError) {
  fs::remove(root_ / "proc/meminfo");
  EXPECT_THROW(detect_host(root_), HardwareError);
}

TEST(Host, ThisMachineHasMemory) {
  const HostSpec host = detect_host();
  EXPECT_GT(host.total_memory, 64_MiB);
  EXPECT_GT(host.available_memory, 0_B);
  EXPECT_LE(host.available_memory, host.total_memory);
}

}  // namespace
}  // namespace memscale
