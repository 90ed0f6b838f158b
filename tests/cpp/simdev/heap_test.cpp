#include "memscale/simdev/heap.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>
#include <vector>

namespace memscale::sim {
namespace {

void release(void* data) {
  BlockHeader* block = find_block(data);
  ASSERT_NE(block, nullptr);
  block->owner->release(block);
}

TEST(Heap, RoundsChargesTo512Bytes) {
  Heap heap(1 << 20);
  void* one = heap.allocate(1);
  void* exact = heap.allocate(512);
  void* more = heap.allocate(513);
  EXPECT_EQ(heap.stats().allocated, 512 + 512 + 1024);
  EXPECT_EQ(heap.stats().requested, 1 + 512 + 513);
  EXPECT_EQ(heap.stats().blocks, 3);
  for (void* data : {one, exact, more}) release(data);
  EXPECT_EQ(heap.stats().allocated, 0);
  EXPECT_EQ(heap.stats().requested, 0);
  EXPECT_EQ(heap.stats().allocated_peak, 2048);
  EXPECT_EQ(heap.stats().total_allocated, 2048);
  EXPECT_EQ(heap.stats().total_freed, 2048);
}

TEST(Heap, RefusesWhatDoesNotFitAndStaysUsable) {
  Heap heap(1024);
  void* half = heap.allocate(512);
  ASSERT_NE(half, nullptr);
  EXPECT_EQ(heap.allocate(513), nullptr);
  EXPECT_EQ(heap.allocate(INT64_MAX), nullptr);
  EXPECT_EQ(heap.stats().ooms, 2);
  EXPECT_EQ(heap.stats().allocated, 512);
  EXPECT_EQ(heap.stats().allocated_peak, 512);
  void* other_half = heap.allocate(512);
  EXPECT_NE(other_half, nullptr);
  release(half);
  release(other_half);
}

TEST(Heap, DataIsAlignedAndNeverStartsAPage) {
  Heap heap(int64_t{1} << 30);
  std::vector<void*> blocks;
  for (int64_t bytes = 1; bytes < (1 << 22); bytes = bytes * 3 + 1) {
    void* data = heap.allocate(bytes);
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % kBlockAlignment, 0u);
    EXPECT_NE(reinterpret_cast<uintptr_t>(data) % kPageBytes, 0u);
    std::memset(data, 0xff, static_cast<size_t>(bytes));
    blocks.push_back(data);
  }
  for (void* data : blocks) release(data);
}

TEST(Heap, KnowsItsOwnBlocks) {
  Heap heap(1 << 20);
  Heap other(1 << 20);
  void* mine = heap.allocate(100);
  void* theirs = other.allocate(100);
  EXPECT_TRUE(heap.owns(mine));
  EXPECT_FALSE(heap.owns(theirs));
  alignas(4096) char foreign[8192] = {};
  EXPECT_FALSE(heap.owns(foreign));
  EXPECT_FALSE(heap.owns(foreign + 64));
  EXPECT_FALSE(heap.owns(foreign + 65));
  release(mine);
  release(theirs);
}

TEST(Heap, ResizesOnlyWhileEmpty) {
  Heap heap(1024);
  void* data = heap.allocate(1);
  EXPECT_FALSE(heap.resize(4096));
  EXPECT_EQ(heap.capacity(), 1024);
  release(data);
  EXPECT_TRUE(heap.resize(4096));
  EXPECT_EQ(heap.capacity(), 4096);
}

TEST(Heap, TellsItsObserver) {
  static std::vector<int64_t> seen;
  Heap heap(1 << 20, [](void*, int64_t change, int64_t allocated) {
    seen.insert(seen.end(), {change, allocated});
  });
  void* one = heap.allocate(1);
  void* two = heap.allocate(600);
  release(one);
  release(two);
  const std::vector<int64_t> expected{512,  512,  1024,  1536,
                                      -512, 1024, -1024, 0};
  EXPECT_EQ(seen, expected);
}

TEST(Heap, PeakResetsToWhatIsHeld) {
  Heap heap(1 << 20);
  void* kept = heap.allocate(512);
  release(heap.allocate(4096));
  EXPECT_EQ(heap.stats().allocated_peak, 512 + 4096);
  heap.reset_peak();
  EXPECT_EQ(heap.stats().allocated_peak, 512);
  heap.reset_accumulated();
  EXPECT_EQ(heap.stats().total_allocated, 0);
  release(kept);
}

// Under TSAN this is the test of the heap's thread-safety; everywhere it
// checks that no charge is lost and the capacity is never exceeded.
TEST(Heap, ThreadsShareTheCapacity) {
  constexpr int64_t kCapacity = 64 * 1024;
  Heap heap(kCapacity);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&heap, seed] {
      std::mt19937 random(seed);
      std::vector<void*> held;
      for (int i = 0; i < 2000; ++i) {
        if (held.empty() || random() % 2 == 0) {
          const auto bytes = static_cast<int64_t>(random() % 8192 + 1);
          if (void* data = heap.allocate(bytes)) {
            std::memset(data, static_cast<int>(seed),
                        static_cast<size_t>(bytes));
            held.push_back(data);
          }
        } else {
          release(held.back());
          held.pop_back();
        }
      }
      for (void* data : held) release(data);
    });
  }
  for (std::thread& thread : threads) thread.join();
  const HeapStats stats = heap.stats();
  EXPECT_EQ(stats.allocated, 0);
  EXPECT_EQ(stats.blocks, 0);
  EXPECT_LE(stats.allocated_peak, kCapacity);
  EXPECT_EQ(stats.total_allocated, stats.total_freed);
}

}  // namespace
}  // namespace memscale::sim
