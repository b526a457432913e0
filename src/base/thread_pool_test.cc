#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace tare {
namespace {

// Every index runs exactly once, whatever the number of threads.
TEST(ThreadPool, RunsEachIndexOnce) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    std::vector<std::atomic<int>> seen(1000);
    pool.ParallelFor(1000, [&](int64_t i) { seen[static_cast<size_t>(i)]++; });
    for (auto& s : seen) EXPECT_EQ(s.load(), 1);
  }
}

// A nested call runs inline and a call from a second outside thread waits its turn.
TEST(ThreadPool, NestedAndConcurrentCalls) {
  ThreadPool pool(3);
  std::atomic<int> count{0};
  const auto work = [&] {
    pool.ParallelFor(20, [&](int64_t) { pool.ParallelFor(5, [&](int64_t) { count++; }); });
  };
  std::thread other(work);
  work();
  other.join();
  EXPECT_EQ(count.load(), 200);
}

// The check runs on every thread before work.
TEST(ThreadPool, ChecksEveryWorker) {
  std::atomic<int> checks{0};
  {
    ThreadPool pool(4, [&] { checks++; });
    pool.ParallelFor(100, [](int64_t) {});
  }
  EXPECT_EQ(checks.load(), 4);
}

}  // namespace
}  // namespace tare
