// kv_cache: rows land in their pages bit for bit, nothing else is touched, bad values are refused.

#include "ops/kv_cache/kv_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace tare::ops::kv_cache {
namespace {

struct Fixture {
  ThreadPool pool{1};
  Params p{.kv_heads = 2, .head_dim = 3, .dtype = DType::kF32};
  std::vector<float> k, v, k_pages, v_pages;
  std::vector<int32_t> table = {3, 0, 1, 2};  // two rows of two pages
  attention::Run runs[2] = {{.q_begin = 0, .q_rows = 3, .position = 2, .block_row = 1},
                            {.q_begin = 4, .q_rows = 1, .position = 0, .block_row = 0}};
  Args a;
  Fixture() : k(5 * 8), v(5 * 6), k_pages(4 * 3 * 6, -1.0f), v_pages(k_pages) {
    for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(i);
    for (size_t i = 0; i < v.size(); ++i) v[i] = 100.0f + static_cast<float>(i);
    a.k = k.data(), a.v = v.data(), a.k_stride = 8, a.runs = runs, a.block_table = table.data();
    a.tokens = 5, a.table_rows = 2, a.max_pages = 2, a.num_pages = 4, a.page_size = 3;
    a.k_pages = k_pages.data(), a.v_pages = v_pages.data();
  }
  Status Run() { return Forward({.pool = &pool}, p, a); }
};

TEST(KvCache, RowsLandInTheirPagesAndNowhereElse) {
  Fixture f;
  ASSERT_TRUE(f.Run().ok());
  std::vector<float> want_k(f.k_pages.size(), -1.0f), want_v = want_k;
  const auto put = [&](int64_t row, int64_t page, int64_t slot) {
    for (int64_t x = 0; x < 6; ++x) {
      want_k[static_cast<size_t>((page * 3 + slot) * 6 + x)] =
          f.k[static_cast<size_t>(row * 8 + x)];
      want_v[static_cast<size_t>((page * 3 + slot) * 6 + x)] =
          f.v[static_cast<size_t>(row * 6 + x)];
    }
  };
  put(0, 1, 2), put(1, 2, 0), put(2, 2, 1), put(4, 3, 0);
  EXPECT_EQ(f.k_pages, want_k);
  EXPECT_EQ(f.v_pages, want_v);
}

TEST(KvCache, RefusesNonFiniteValuesByNameAndWritesNothing) {
  for (float bad :
       {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Fixture f;
    f.v[4 * 6 + 4] = bad;
    const Status s = f.Run();
    EXPECT_EQ(s.code(), Code::kInvalidArgument);
    EXPECT_THAT(s.message(), testing::HasSubstr("V of row 4, head 1, element 1"));
    EXPECT_EQ(f.k_pages, std::vector<float>(f.k_pages.size(), -1.0f));
    // Row 3 belongs to no run: it is never read.
    Fixture g;
    g.v[3 * 6] = bad;
    EXPECT_TRUE(g.Run().ok());
  }
}

// C3: a chunk's place follows from its absolute position. Each fault: equal without it, other bytes
// with it, and on its own side alone.
TEST(KvCache, FaultsFlipBits) {
  const auto run = [](fault::Side side, const std::string& spec) {
    const fault::Scoped scoped(spec);
    Fixture f;
    EXPECT_TRUE(Forward({.pool = &f.pool, .side = side}, f.p, f.a).ok());
    return std::pair(f.k_pages, f.v_pages);
  };
  const auto clean = run(fault::Side::kTrainer, "");
  EXPECT_EQ(clean, run(fault::Side::kRollout, ""));
  for (const char* name : {"kv_cache.chunk_local_position", "kv_cache.write_fp8"}) {
    const std::string spec = std::string(name) + "@rollout";
    EXPECT_EQ(clean, run(fault::Side::kTrainer, spec)) << name;
    const auto faulty = run(fault::Side::kRollout, spec);
    EXPECT_NE(clean.first, faulty.first) << name;
    EXPECT_NE(clean.second, faulty.second) << name;
  }
  EXPECT_EQ(clean, run(fault::Side::kRollout, "")) << "a fault stayed on";
}

TEST(KvCache, RefusesPagesOutsideThePool) {
  Fixture f;
  f.table[3] = 4;
  EXPECT_THAT(f.Run().message(), testing::HasSubstr("block_table[1][1] is 4"));
  Fixture g;
  g.runs[0].position = 4;
  EXPECT_THAT(g.Run().message(), testing::HasSubstr("needs page 2"));
  Fixture h;
  h.runs[1].q_begin = 5;
  EXPECT_FALSE(h.Run().ok());
}

}  // namespace
}  // namespace tare::ops::kv_cache
