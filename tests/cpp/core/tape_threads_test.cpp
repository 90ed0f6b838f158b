// The part of a tape that several threads use at a time.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "memscale/core/tape/claims.h"
#include "memscale/core/tape/locked_tape.h"

namespace memscale {
namespace {

// Storages that never die; counts what a tape holds of them.
class Held final : public TapeBytes {
 public:
  int count() const { return held_; }
  int num_dropped() const { return num_dropped_; }

  std::int64_t add_state(StateId, const TensorUse& tensor) override {
    return tensor.bytes;
  }
  bool is_current(StateId) const override { return true; }
  bool is_alive(StateId) const override { return true; }
  bool has_original(StateId) const override { return true; }
  bool is_whole(StateId) const override { return true; }
  bool hold(StateId) override {
    ++held_;
    return true;
  }
  void let_go(StateId) override { --held_; }
  void lose_original(StateId) override {}
  bool copy_out(StateId) override { return true; }
  void show_writes(StateId) override {}
  void end_state(StateId) override {}
  void add_node(NodeId) override {}
  void clear_node(NodeId) override {}
  bool pack(NodeId, StateId, Packing) override { return false; }
  void run(NodeId, std::span<const Destination>, std::span<const Made> written,
           std::span<const Made> results) override {
    held_ += static_cast<int>(written.size() + results.size());
  }
  void unpack(NodeId, StateId) override {}
  bool is_waiting(SaveKey) const override { return true; }
  void drop_save(SaveKey, StateId state) override {
    ++num_dropped_;
    dropped = state;
  }
  void keep_save(SaveKey, StateId, Why) override {}
  [[noreturn]] void fail(StateId, Failure) const override {
    throw std::runtime_error("it cannot be had");
  }
  std::shared_ptr<void> take_dead() override { return nullptr; }

  StateId dropped = kNone;

 private:
  int held_ = 0;
  int num_dropped_ = 0;
};

constexpr std::size_t kOps = 200;

// A tape of ops that each read the batch, and whose results are saved.
std::vector<StateId> record(LockedTape& tape, Held& bytes) {
  static const ReplayRules rules = find_replay_rules("aten::relu");
  std::vector<StateId> saves;
  for (std::size_t i = 0; i < kOps; ++i) {
    const LockedTape::Access access(tape);
    const std::array inputs = {TensorUse{.storage = 1, .bytes = 4}};
    const std::array results = {TensorUse{.storage = i + 2, .bytes = 8}};
    access->begin_op(
        {.name = "aten::relu", .rules = &rules, .tensors = inputs});
    access->end_op(results);
    access->decide(i, i + 2);
    saves.push_back(bytes.dropped);
  }
  LockedTape::Access(tape)->close();
  return saves;
}

TEST(LockedTape, SavesAreAskedForAndEndInAnyThread) {
  Held bytes;
  LockedTape tape({.policy = ReplayPolicy::Block}, bytes);
  const std::vector<StateId> saves = record(tape, bytes);
  ASSERT_EQ(bytes.num_dropped(), static_cast<int>(kOps));
  std::vector<std::thread> threads;
  std::atomic<int> num_missing = 0;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = t; i < kOps; i += 4) {
        if (i % 3 != 0) {
          const LockedTape::Access access(tape);
          access->ensure(saves[i]);
          num_missing += access->has_bytes(saves[i]) ? 0 : 1;
        }
        tape.release(saves[i]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_missing, 0);
  EXPECT_EQ(bytes.count(), 0);
}

TEST(LockedTape, AReleaseInsideOfAnAccessIsDoneAfterwards) {
  Held bytes;
  LockedTape tape({.policy = ReplayPolicy::Block}, bytes);
  const std::vector<StateId> saves = record(tape, bytes);
  {
    const LockedTape::Access access(tape);
    for (const StateId save : saves) tape.release(save);
    EXPECT_EQ(bytes.count(), 1);  // the batch
    const LockedTape::Access second(tape, std::try_to_lock);
    EXPECT_FALSE(second);
  }
  EXPECT_EQ(bytes.count(), 0);
}

// A tape that counts how often it is asked.
struct Asked {
  struct Claimed {
    StorageKey storage;
    StateId state;
  };
  std::vector<Claimed> close() { return {{1, 0}, {2, 1}}; }
  void before_write(StateId) { ++writes; }
  void write_aside(StorageKey) { ++asides; }
  void offer(StateId) { ++offers; }
  bool needs_original(StateId state) { return state == 1; }

  std::atomic<int> writes = 0;
  std::atomic<int> asides = 0;
  std::atomic<int> offers = 0;
};

TEST(Claims, AWriteIsToldOnceToEachTape) {
  Claims<Asked> claims;
  std::vector<std::shared_ptr<Asked>> tapes(8);
  for (auto& tape : tapes) {
    tape = std::make_shared<Asked>();
    claims.open(tape);
  }
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      claims.add(tapes[2 * t]);
      claims.add(tapes[2 * t + 1]);
      claims.write_aside(1);
      claims.offer(2);
      claims.before_write(1);
      claims.forget_some();
    });
  }
  for (std::thread& thread : threads) thread.join();
  claims.before_write(1);
  for (const auto& tape : tapes) EXPECT_LE(tape->writes, 1);
  EXPECT_FALSE(claims.has_open());
  EXPECT_TRUE(claims.forget_unneeded());  // the second state of each
  tapes.clear();
  EXPECT_FALSE(claims.forget_unneeded());
  EXPECT_TRUE(claims.empty());
}

}  // namespace
}  // namespace memscale
