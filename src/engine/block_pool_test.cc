#include "engine/block_pool.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

namespace tare::engine {
namespace {

const std::vector<int32_t> kTokens = {1, 2, 3, 4};

// A key names weights, the whole history and the block's own tokens.
TEST(EngineBlockPool, KeysNameWeightsAndHistory) {
  const BlockKey a = ExtendKey(RootKey(0), kTokens);
  EXPECT_EQ(a, ExtendKey(RootKey(0), kTokens));
  EXPECT_NE(a, ExtendKey(RootKey(1), kTokens));
  EXPECT_NE(ExtendKey(a, kTokens), a);
  EXPECT_NE(ExtendKey(RootKey(0), std::vector<int32_t>{1, 2, 3, 5}), a);
}

TEST(EngineBlockPool, SharesEvictsAndDrops) {
  BlockPool pool(2, true);
  const BlockKey a = ExtendKey(RootKey(0), kTokens);
  const int32_t x = *pool.Allocate();
  pool.Publish(x, a);
  EXPECT_EQ(pool.Acquire(a), x);  // shared
  EXPECT_EQ(pool.references(x), 2);
  pool.Release(x);
  pool.Release(x);
  EXPECT_EQ(pool.free_blocks(), 2);
  EXPECT_EQ(pool.Acquire(a), x);  // still there
  pool.Release(x);
  const int32_t y = *pool.Allocate();
  EXPECT_NE(y, x);  // the other one was released earlier
  const int32_t z = *pool.Allocate();
  EXPECT_EQ(z, x);  // now its content goes
  EXPECT_FALSE(pool.Acquire(a).has_value());
  EXPECT_FALSE(pool.Allocate().has_value());
  pool.Publish(y, a);
  EXPECT_EQ(pool.DropCache(), 1);
  EXPECT_FALSE(pool.Acquire(a).has_value());
  pool.CheckInvariants();
}

TEST(EngineBlockPool, WithoutPrefixCachingNothingIsFound) {
  BlockPool pool(2, false);
  const int32_t x = *pool.Allocate();
  pool.Publish(x, RootKey(0));
  EXPECT_FALSE(pool.Acquire(RootKey(0)).has_value());
}

// CHEAP-02: random use keeps the books; every referenced block is off the free list and no key
// leads to another block's content.
TEST(EngineBlockPool, RandomUseKeepsInvariants) {
  std::mt19937 rng(7);
  BlockPool pool(13, true);
  std::vector<int32_t> held;
  std::map<int32_t, BlockKey> content;
  for (int step = 0; step < 20000; ++step) {
    switch (rng() % 4) {
      case 0:
        if (auto b = pool.Allocate()) {
          held.push_back(*b);
          content.erase(*b);
        } else {
          EXPECT_EQ(pool.free_blocks(), 0);
        }
        break;
      case 1:
        if (!held.empty()) {
          const size_t i = rng() % held.size();
          pool.Release(held[i]);
          held.erase(held.begin() + static_cast<int64_t>(i));
        }
        break;
      case 2:
        if (!held.empty()) {
          const int32_t b = held[rng() % held.size()];
          const BlockKey key =
              ExtendKey(RootKey(0), std::vector<int32_t>{static_cast<int32_t>(rng() % 20)});
          if (!content.contains(b)) {
            pool.Publish(b, key);
            content.emplace(b, key);
          }
        }
        break;
      default: {
        const BlockKey key =
            ExtendKey(RootKey(0), std::vector<int32_t>{static_cast<int32_t>(rng() % 20)});
        if (auto b = pool.Acquire(key)) {
          ASSERT_TRUE(content.contains(*b));
          EXPECT_EQ(content.at(*b), key);
          held.push_back(*b);
        }
      }
    }
    if (step % 64 == 0) pool.CheckInvariants();
  }
}

}  // namespace
}  // namespace tare::engine
