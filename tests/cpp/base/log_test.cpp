#include "memscale/base/log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace memscale {
namespace {

// Puts the sink and the threshold back: they are process-wide.
class Log : public testing::Test {
 protected:
  void TearDown() override {
    log::set_sink({});
    log::set_threshold(log::Level::Info);
  }
  void collect() {
    log::set_sink([this](const log::Record& record) {
      lines_.push_back(str(to_string(record.level), " ", record.component, " ",
                           record.message));
    });
  }
  std::vector<std::string> lines_;
};

TEST_F(Log, RecordsReachTheSink) {
  collect();
  log::warning("offload", "pool is full: ", 3, " saves stay");
  log::info("plan", "ready");
  EXPECT_EQ(lines_, (std::vector<std::string>{
                        "warning offload pool is full: 3 saves stay",
                        "info plan ready"}));
}

TEST_F(Log, ThresholdDropsWhatIsBelow) {
  collect();
  log::debug("x", "dropped");
  EXPECT_TRUE(lines_.empty());
  log::set_threshold(log::Level::Debug);
  log::debug("x", "kept");
  log::set_threshold(log::Level::Error);
  EXPECT_FALSE(log::enabled(log::Level::Warning));
  log::warning("x", "dropped");
  log::error("x", "kept");
  EXPECT_EQ(lines_, (std::vector<std::string>{"debug x kept", "error x kept"}));
}

TEST_F(Log, DefaultSinkWritesOnlyWarningsToStderr) {
  testing::internal::CaptureStderr();
  log::info("x", "silent");
  log::warning("x", "loud");
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "memscale.x: warning: loud\n");
}

TEST_F(Log, SetSinkReturnsTheOneBefore) {
  collect();
  const log::Sink before = log::set_sink({});
  ASSERT_TRUE(before);
  before({log::Level::Info, "x", "direct"});
  EXPECT_EQ(lines_.size(), 1u);
  EXPECT_FALSE(log::set_sink({}));
}

TEST_F(Log, ASinkThatThrowsHarmsNobody) {
  log::set_sink([](const log::Record&) { throw std::runtime_error("sink"); });
  EXPECT_NO_THROW(log::error("x", "y"));
}

TEST_F(Log, ASinkMayLogAndReplaceItself) {
  int calls = 0;
  log::set_sink([&calls](const log::Record& record) {
    ++calls;
    if (record.message == "outer") {
      log::info("x", "inner");
      log::set_sink({});
    }
  });
  log::info("x", "outer");
  log::info("x", "nobody hears");
  EXPECT_EQ(calls, 2);
}

TEST_F(Log, ThreadsMayLogWhileTheSinkIsReplaced) {
  std::atomic<int> heard = 0;
  const log::Sink count = [&heard](const log::Record&) { ++heard; };
  log::set_sink(count);
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 500; ++i) log::info("x", i);
    });
  }
  for (int i = 0; i < 200; ++i) log::set_sink(count);
  threads.clear();
  EXPECT_EQ(heard, 2000);
}

}  // namespace
}  // namespace memscale
