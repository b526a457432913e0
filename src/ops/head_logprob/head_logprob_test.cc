// The fused head gives the bits of linear followed by logprob, forward and backward, whatever the
// tiles: one row, more rows than a tile, several units, vocabularies that leave leaves short or
// empty.

#include "ops/head_logprob/head_logprob.h"

#include <gtest/gtest.h>

#include <random>

#include "ops/rows.h"

namespace tare::ops::head_logprob {
namespace {

void Compare(int64_t rows, int64_t vocab, DType logits_dtype, Profile profile, bool packed) {
  SCOPED_TRACE(fmt::format("rows {} vocab {} logits {} profile {}", rows, vocab,
                           DTypeName(logits_dtype), ProfileName(profile)));
  const int64_t hidden = 48;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto fill = [&](int64_t n, float scale) {
    std::vector<uint16_t> v;
    for (int64_t i = 0; i < n; ++i) v.push_back(F32ToBf16(normal(random) * scale));
    return v;
  };
  const auto x = fill(rows * hidden, 1.0f), w = fill(vocab * hidden, 0.3f);
  std::vector<int32_t> targets;
  std::vector<float> dlogprob, dentropy, temperature;
  for (int64_t t = 0; t < rows; ++t) {
    targets.push_back(t % 5 == 4 ? -1
                                 : static_cast<int32_t>(random() % static_cast<uint32_t>(vocab)));
    dlogprob.push_back(normal(random));
    dentropy.push_back(normal(random) * 0.1f);
    temperature.push_back(t % 2 ? 1.0f : 0.7f);
  }
  ThreadPool pool(3);
  Ctx ctx;
  ctx.pool = &pool;
  ctx.profile = profile;
  const auto n = static_cast<size_t>(rows);
  std::vector<float> lp(n), entropy(n), max(n), log_sum(n), lp2(n), entropy2(n), max2(n),
      log_sum2(n);
  Params p;
  p.hidden = hidden;
  p.vocab = vocab;
  p.logits_dtype = logits_dtype;
  linear::PackedWeight packed_w;
  if (packed)
    packed_w = linear::PackedWeight::Pack(&pool, w.data(), DType::kBF16, vocab, hidden).value();
  Args a;
  a.rows = rows;
  a.x = x.data();
  a.w = packed ? nullptr : w.data();
  a.packed = packed ? &packed_w : nullptr;
  a.targets = targets.data();
  a.temperature = temperature.data();
  a.logprob = lp.data();
  a.entropy = entropy.data();
  a.max = max.data();
  a.log_sum = log_sum.data();
  ASSERT_TRUE(Forward(ctx, p, a).ok());

  linear::Params head;
  head.n = vocab;
  head.k = hidden;
  head.y_dtype = logits_dtype;
  head.dx_segments = 8;
  head.dx_vocabulary_leaves = true;
  const logprob::Params softmax = {.vocab = vocab, .logits_dtype = logits_dtype};
  std::vector<char> logits(static_cast<size_t>(rows * vocab * SizeOf(logits_dtype)));
  linear::Args l;
  l.m = rows;
  l.x = x.data();
  l.w = w.data();
  l.y = logits.data();
  ASSERT_TRUE(linear::Forward(ctx, head, l).ok());
  ASSERT_TRUE(logprob::Forward(ctx, softmax,
                               {rows, logits.data(), 0, targets.data(), temperature.data(),
                                lp2.data(), entropy2.data(), max2.data(), log_sum2.data()})
                  .ok());
  EXPECT_EQ(lp, lp2);
  EXPECT_EQ(entropy, entropy2);
  EXPECT_EQ(max, max2);
  EXPECT_EQ(log_sum, log_sum2);

  std::vector<TokenUnit> units;
  for (int64_t t = 0; t < rows; t += 30) units.push_back({t, std::min<int64_t>(30, rows - t)});
  std::vector<uint16_t> dx(x.size()), dx2(x.size()), dlogits(static_cast<size_t>(rows * vocab));
  std::vector<float> dw(w.size(), 0.5f), dw2(w.size(), 0.5f);
  BackwardArgs b;
  b.rows = rows;
  b.x = x.data();
  b.w = w.data();
  b.targets = targets.data();
  b.temperature = temperature.data();
  b.max = max.data();
  b.log_sum = log_sum.data();
  b.entropy = entropy.data();
  b.dlogprob = dlogprob.data();
  b.dentropy = dentropy.data();
  b.dx = dx.data();
  b.dw = dw.data();
  b.units = units;
  ASSERT_TRUE(Backward(ctx, p, b).ok());
  logprob::BackwardArgs s;
  s.rows = rows;
  s.logits = logits.data();
  s.targets = targets.data();
  s.temperature = temperature.data();
  s.max = max2.data();
  s.log_sum = log_sum2.data();
  s.entropy = entropy2.data();
  s.dlogprob = dlogprob.data();
  s.dentropy = dentropy.data();
  s.dlogits = dlogits.data();
  ASSERT_TRUE(logprob::Backward(ctx, softmax, s).ok());
  linear::BackwardArgs lb;
  lb.m = rows;
  lb.dy = dlogits.data();
  lb.x = x.data();
  lb.w = w.data();
  lb.units = units;
  lb.dx = dx2.data();
  lb.dw = dw2.data();
  ASSERT_TRUE(linear::Backward(ctx, head, lb).ok());
  EXPECT_EQ(dx, dx2);
  EXPECT_EQ(dw, dw2);
}

TEST(HeadLogprob, EqualsLinearThenLogprobBitForBit) {
  for (const Profile profile : {Profile::kIeeeF32, Profile::kSm90Mma}) {
    Compare(1, 200, DType::kF32, profile, false);
    Compare(70, 131, DType::kF32, profile, true);
    Compare(70, 131, DType::kBF16, profile, false);
  }
  Compare(9, 9, DType::kF32, Profile::kIeeeF32,
          false);  // leaves of two ids: the last three are empty
  Compare(130, 1100, DType::kF32, Profile::kIeeeF32, true);
}

}  // namespace
}  // namespace tare::ops::head_logprob
