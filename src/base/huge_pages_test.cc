#include "base/huge_pages.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace tare {
namespace {

// Arrays of every size are aligned, zero, apart, and outlive each other in any order.
TEST(HugePages, ArraysAreApart) {
  struct Array {
    std::shared_ptr<void> memory;
    size_t bytes;
    int mark;
  };
  std::vector<Array> held;
  int mark = 0;
  for (const size_t bytes : {size_t{1}, size_t{63}, size_t{64}, size_t{100000}, size_t{3} << 20,
                             size_t{17} << 20, size_t{5}, size_t{15} << 20, size_t{15} << 20}) {
    const auto p = AllocateHuge(bytes);
    ASSERT_NE(p, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p.get()) % 64, 0u);
    const char* c = static_cast<const char*>(p.get());
    EXPECT_EQ(c[0], 0);
    EXPECT_EQ(c[bytes - 1], 0);
    held.push_back({p, bytes, ++mark});
    std::memset(p.get(), mark, bytes);
    if (mark == 5) held.erase(held.begin() + 1);
  }
  EXPECT_EQ(held.size(), 8u);
  for (const Array& a : held) {
    const char* c = static_cast<const char*>(a.memory.get());
    EXPECT_EQ(c[0], a.mark);
    EXPECT_EQ(c[a.bytes - 1], a.mark);
  }
}

// The holder of an array learns from the count whether it is the only one, as whoever refills does.
TEST(HugePages, CountsAreTheArraysOwn) {
  for (const size_t bytes : {size_t{100}, size_t{9} << 20}) {
    const auto a = AllocateHuge(bytes), b = AllocateHuge(bytes);
    EXPECT_EQ(a.use_count(), 1);
    const auto again = a;
    EXPECT_EQ(a.use_count(), 2);
    EXPECT_EQ(b.use_count(), 1);
  }
}

// What cannot be had is null, not a crash.
TEST(HugePages, RefusesTheImpossible) {
  EXPECT_EQ(AllocateHuge(0), nullptr);
  EXPECT_EQ(AllocateHuge(SIZE_MAX), nullptr);
  EXPECT_EQ(AllocateHuge(SIZE_MAX / 4), nullptr);
}

TEST(HugePages, ManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 200; ++i) {
        const size_t bytes = 1000u + 977u * static_cast<size_t>(i);
        const auto p = AllocateHuge(bytes);
        ASSERT_NE(p, nullptr);
        std::memset(p.get(), t + 1, bytes);
        EXPECT_EQ(static_cast<char*>(p.get())[bytes - 1], t + 1);
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

}  // namespace
}  // namespace tare
