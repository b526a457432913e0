// Sampling against its contract's text in plain loops: the order of candidates, top-k, top-p and
// min-p in integers, the draw, and the logprobs against float64. Nothing but exp2, Philox and the
// argument structures is shared with the operator.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/thread_pool.h"
#include "numerics/elementary.h"
#include "numerics/philox.h"
#include "ops/generic_case.h"
#include "ops/sampling/sampling.h"

namespace tare::ops {
namespace {

struct Request {
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  uint64_t seed = 0;
  int32_t position = 0;
  int32_t sample = 0;
};

struct Choice {
  std::vector<int64_t> kept;  // ids, ascending
  int64_t token = -1;
  double logprob = 0;
  double processed = 0;
};

using Wide = unsigned __int128;

Wide CeilShare(float share, uint64_t of) {
  const auto fixed = static_cast<uint64_t>(std::floor(static_cast<double>(share) * 4294967296.0));
  const Wide product = static_cast<Wide>(fixed) * of;
  return (product + 0xffffffffu) >> 32;
}

Choice Plain(const std::vector<float>& logits, const Request& q) {
  const auto vocab = static_cast<int64_t>(logits.size());
  std::vector<float> z = logits;
  if (q.temperature != 0.0f) {
    for (float& v : z) v /= q.temperature;
  }
  std::vector<int64_t> order(z.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return z[size_t(a)] > z[size_t(b)]; });
  const float top = z[static_cast<size_t>(order[0])];
  std::vector<uint64_t> w;
  for (float v : z) {
    w.push_back(static_cast<uint64_t>(numerics::Exp2((v - top) * 0x1.715476p0f) * 0x1p40f));
  }
  std::vector<int64_t> kept = order;
  if (q.temperature == 0.0f) {
    kept.resize(1);
  } else {
    if (q.top_k > 0 && q.top_k < vocab) kept.resize(static_cast<size_t>(q.top_k));
    if (q.top_p < 1.0f) {
      uint64_t mass = 0;
      for (int64_t id : kept) mass += w[static_cast<size_t>(id)];
      const Wide goal = CeilShare(q.top_p, mass);
      Wide sum = 0;
      size_t count = 0;
      while (count == 0 || sum < goal) sum += w[static_cast<size_t>(kept[count++])];
      kept.resize(count);
    }
    const Wide least = CeilShare(q.min_p, uint64_t{1} << 40);
    std::erase_if(kept, [&](int64_t id) { return w[static_cast<size_t>(id)] < least; });
  }
  std::sort(kept.begin(), kept.end());
  Choice c;
  c.kept = kept;
  uint64_t mass = 0;
  for (int64_t id : kept) mass += w[static_cast<size_t>(id)];
  const uint64_t r =
      numerics::RandomAt(q.seed, static_cast<uint32_t>(q.position), numerics::RandomPurpose::kToken,
                         static_cast<uint32_t>(q.sample))
          .Low64();
  const auto t = static_cast<uint64_t>((static_cast<Wide>(r) * mass) >> 64);
  uint64_t sum = 0;
  for (int64_t id : kept) {
    sum += w[static_cast<size_t>(id)];
    if (sum > t || q.temperature == 0.0f) {
      c.token = id;
      break;
    }
  }
  double all = 0, set = 0;
  for (float v : z) all += std::exp(static_cast<double>(v) - top);
  for (int64_t id : kept) set += std::exp(static_cast<double>(z[static_cast<size_t>(id)]) - top);
  const double own = static_cast<double>(z[static_cast<size_t>(c.token)]) - top;
  c.logprob = own - std::log(all);
  c.processed = own - std::log(set);
  return c;
}

// Rows with ties, zeros of both signs and -inf; every mix of the four restrictions.
TEST(SamplingPlain, SetsAndDrawsAreTheContracts) {
  Random random(5);
  int restricted = 0, cut_by_min_p = 0, greedy = 0;
  for (int round = 0; round < 400; ++round) {
    const int64_t vocab = 1 + static_cast<int64_t>(random.Next() % 300);
    std::vector<float> logits;
    for (int64_t i = 0; i < vocab; ++i) {
      float v = static_cast<float>(random.Normal() * 3);
      if (round % 3 == 0) v = std::round(v * 2) / 2;  // ties
      if (random.Next() % 17 == 0) v = random.Next() % 2 ? 0.0f : -0.0f;
      if (i > 0 && random.Next() % 29 == 0) v = -INFINITY;
      logits.push_back(v);
    }
    Request q;
    const uint64_t kind = random.Next();
    if (kind % 11 == 0) {
      q.temperature = 0.0f;
    } else if (kind % 3 != 0) {
      q.temperature = static_cast<float>(0.3 + random.Uniform() * 2);
    }
    if (kind >> 8 & 1) q.top_k = 1 + static_cast<int32_t>(random.Next() % 40);
    if (kind >> 9 & 1) q.top_p = static_cast<float>(0.05 + 0.95 * random.Uniform());
    if (kind >> 10 & 1) q.min_p = static_cast<float>(random.Uniform() * random.Uniform());
    q.seed = random.Next();
    q.position = static_cast<int32_t>(random.Next() & 0xffff);
    q.sample = static_cast<int32_t>(random.Next() % 4);
    const Choice want = Plain(logits, q);

    ThreadPool pool(1 + round % 3);
    Ctx ctx;
    ctx.pool = &pool;
    int32_t token = -1, kept = -1;
    float logprob = 0, processed = 0;
    std::vector<uint8_t> set(static_cast<size_t>((vocab + 7) / 8), 0xff);
    sampling::Args a;
    a.rows = 1;
    a.logits = logits.data();
    a.temperature = &q.temperature;
    a.top_k = &q.top_k;
    a.top_p = &q.top_p;
    a.min_p = &q.min_p;
    a.seed = &q.seed;
    a.position = &q.position;
    a.sample = &q.sample;
    a.token = &token;
    a.logprob = &logprob;
    a.processed_logprob = &processed;
    a.kept = &kept;
    a.candidates = set.data();
    const Status status = sampling::Forward(ctx, {.vocab = vocab}, a);
    ASSERT_TRUE(status.ok()) << status.ToString();
    SCOPED_TRACE(testing::Message() << "round " << round << " V " << vocab << " T " << q.temperature
                                    << " k " << q.top_k << " p " << q.top_p << " min " << q.min_p);
    ASSERT_EQ(token, want.token);
    ASSERT_EQ(kept, static_cast<int64_t>(want.kept.size()));
    std::vector<uint8_t> bits(set.size(), 0);
    for (int64_t id : want.kept) {
      bits[static_cast<size_t>(id / 8)] |= static_cast<uint8_t>(1u << (id % 8));
    }
    ASSERT_EQ(set, bits);
    EXPECT_NEAR(logprob, want.logprob, 1e-5);
    EXPECT_NEAR(processed, want.processed, 1e-5);
    restricted += kept < vocab;
    greedy += q.temperature == 0.0f;
    if (q.min_p > 0 && q.temperature != 0.0f) {
      Request without = q;
      without.min_p = 0;
      cut_by_min_p += Plain(logits, without).kept.size() > want.kept.size();
    }
  }
  // The rounds reached what they are for.
  EXPECT_GT(restricted, 100);
  EXPECT_GT(cut_by_min_p, 30);
  EXPECT_GT(greedy, 10);
}

// Over seeds a token comes as often as its share says.
TEST(SamplingPlain, DrawsFollowTheShares) {
  const std::vector<float> logits = {0.0f, -0.5f, 1.0f, -INFINITY, 0.25f};
  double total = 0;
  for (float v : logits) total += std::exp(v);
  constexpr int kDraws = 20000;
  std::vector<int> count(logits.size(), 0);
  ThreadPool pool(1);
  Ctx ctx;
  ctx.pool = &pool;
  const int32_t position = 3;
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    int32_t token = -1;
    sampling::Args a;
    a.rows = 1;
    a.logits = logits.data();
    a.seed = &seed;
    a.position = &position;
    a.token = &token;
    ASSERT_TRUE(sampling::Forward(ctx, {.vocab = 5}, a).ok());
    ++count[static_cast<size_t>(token)];
  }
  for (size_t i = 0; i < logits.size(); ++i) {
    const double share = std::exp(logits[i]) / total;
    // Five standard deviations of a binomial count.
    EXPECT_NEAR(count[i], kDraws * share, 5 * std::sqrt(kDraws * share * (1 - share)) + 1e-9) << i;
  }
}

}  // namespace
}  // namespace tare::ops
