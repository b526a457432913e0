// The one forward: near the float64 reference, and the same bits however the tokens are packed,
// cut, cached or threaded.

#include "models/forward.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "base/env.h"
#include "models/mini.h"
#include "models/testing_batch.h"
#include "tensor/safetensors.h"

namespace tare::models {
namespace {

using testing::Bits;
using testing::Context;
using ::testing::HasSubstr;
using testing::Reference;

// In f32 the largest error is that of P's short polynomial, 2^-13 relative (attention.h), through a
// few layers into logits that spread by 3: below 2e-3. A wrong mask, rope, norm or order makes
// tenths.
constexpr double kF32Tolerance = 2e-3;
// bf16 activations through six layers with logits spread by 3, for tokens that went to float64's
// experts. A token whose second and third expert lie closer together than bf16's error may go to
// another one, and is then off by what two experts differ: tenths, whatever the arithmetic. Which
// token that is, a rounding anywhere before decides, so these have a bound of their own, and the
// scores of the two experts must show that the choice was open.
// The Hopper step truncates where ieee-f32 rounds, and has a tenth more.
constexpr double kBf16Mean = 0.05, kSm90Mean = 0.055, kBf16Max = 0.3;
constexpr double kRoutedMax = 0.7, kRoutedGap = 0.1;

// What the routers of a forward decided, and from which logits: by layer, in order.
class RouterTap : public Tap {
 public:
  void BeginFrame(const TapFrame&) override {}
  void Emit(const TapPoint& point, const Tensor& value) override {
    const auto ends = [&](const char* with) { return point.name.ends_with(with); };
    if (ends("mlp.router.ids")) {
      ids.emplace_back(value.as<int32_t>(), value.as<int32_t>() + value.elements());
      top_k = value.dim(1);
    }
    if (ends("mlp.router.logits")) {
      logits.emplace_back(value.as<float>(), value.as<float>() + value.elements());
      experts = value.dim(1);
    }
  }
  void EndFrame() override {}

  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> logits;
  int64_t top_k = 0, experts = 0;
};

// By row: whether any router chose other experts than float64. `exact` holds the logits of f32.
std::vector<bool> OtherExperts(const Reference& ref, const RouterTap& run, const RouterTap& exact) {
  std::vector<bool> other(ref.tokens.size(), false);
  EXPECT_EQ(run.ids.size(), ref.router_ids.size());
  for (size_t l = 0; l < run.ids.size(); ++l) {
    for (size_t row = 0; row < other.size(); ++row) {
      const auto set = [&](const std::vector<int32_t>& ids) {
        const auto at = ids.begin() + static_cast<ptrdiff_t>(row) * run.top_k;
        std::vector<int32_t> s(at, at + run.top_k);
        std::sort(s.begin(), s.end());
        return s;
      };
      if (set(run.ids[l]) == set(ref.router_ids[l])) continue;
      other[row] = true;
      const auto at = exact.logits[l].begin() + static_cast<ptrdiff_t>(row) * run.experts;
      std::vector<float> scores(at, at + run.experts);
      std::sort(scores.rbegin(), scores.rend());
      const auto k = static_cast<size_t>(run.top_k);
      EXPECT_LT(scores[k - 1] - scores[k], kRoutedGap) << "MoE layer " << l << ", row " << row;
    }
  }
  return other;
}

TEST(ForwardTest, NearFloat64InF32) {
  for (const char* variant : {"mini", "tied_bias"}) {
    const Reference ref(variant);
    const Model model = ref.MakeModel(DType::kF32);
    Context context(2);
    const ForwardOutput out = context.Run(model, ref.MakeBatch());
    ASSERT_EQ(out.logprob.size(), ref.logprob.size());
    for (size_t i = 0; i < ref.logprob.size(); ++i) {
      EXPECT_NEAR(out.logprob[i], ref.logprob[i], kF32Tolerance) << variant << " " << i;
      EXPECT_NEAR(out.entropy[i], ref.entropy[i], kF32Tolerance) << variant << " " << i;
    }
  }
}

TEST(ForwardTest, NearFloat64InBf16ForBothProfiles) {
  for (Profile profile : {Profile::kIeeeF32, Profile::kSm90Mma}) {
    for (const char* variant : {"mini", "tied_bias"}) {
      const Reference ref(variant);
      RouterTap exact, routed;
      Context f32(2);
      f32.Run(ref.MakeModel(DType::kF32), ref.MakeBatch(), nullptr, &exact);
      const Model model = ref.MakeModel(DType::kBF16);
      Context context(2);
      context.ctx.profile = profile;
      const ForwardOutput out = context.Run(model, ref.MakeBatch(), nullptr, &routed);
      ASSERT_EQ(out.logprob.size(), ref.logprob.size());
      const std::vector<bool> other = OtherExperts(ref, routed, exact);
      double sum = 0, worst = 0, worst_other = 0;
      int64_t count = 0, others = 0;
      size_t i = 0;
      for (size_t row = 0; row < ref.targets.size(); ++row) {
        if (ref.targets[row] < 0) continue;
        const double d = std::abs(out.logprob[i] - ref.logprob[i]);
        ++i;
        if (other[row]) {
          worst_other = std::max(worst_other, d);
          ++others;
          continue;
        }
        sum += d;
        ++count;
        worst = std::max(worst, d);
      }
      ASSERT_EQ(i, ref.logprob.size());
      const double mean = sum / static_cast<double>(count);
      const std::string text = fmt::format(
          "mean |difference| {:.4f}, max {:.4f}; {} tokens with other experts, max {:.4f}", mean,
          worst, others, worst_other);
      RecordProperty(fmt::format("{}_{}", variant, ProfileName(profile)), text);
      std::printf("%s %s: %s\n", variant, std::string(ProfileName(profile)).c_str(), text.c_str());
      EXPECT_LT(mean, profile == Profile::kSm90Mma ? kSm90Mean : kBf16Mean);
      EXPECT_LT(worst, kBf16Max);
      EXPECT_LT(worst_other, kRoutedMax);
      EXPECT_LE(others, 6);
    }
  }
}

// One way to compute logprobs of whole sequences; all ways must give the same bits.
class Invariance : public ::testing::TestWithParam<Profile> {
 protected:
  Invariance() : ref_("mini"), model_(ref_.MakeModel(DType::kBF16)) {
    Context context(1);
    context.ctx.profile = GetParam();
    expected_ = Bits(context.Run(model_, ref_.MakeBatch()).logprob);
  }

  // Chunks of `chunk` tokens (0: whole) of every sequence in turn, through a cache of pages.
  std::vector<uint32_t> Paged(int64_t chunk, int64_t page_size, int threads, bool together) {
    Context context(threads);
    context.ctx.profile = GetParam();
    const Batch whole = ref_.MakeBatch();
    int64_t pages_each = 0;
    for (const TokenRun& run : whole.runs) {
      pages_each = std::max<int64_t>(
          pages_each, (static_cast<int64_t>(run.tokens.size()) + page_size - 1) / page_size);
    }
    const int64_t rows = static_cast<int64_t>(whole.runs.size());
    auto cache = KvCache::Create(model_.config(), pages_each * rows + 3, page_size);
    TARE_CHECK(cache.ok());
    // Stale rows of an earlier owner must never show: fill the pages with large values.
    for (size_t l = 0; l < model_.config().layers.size(); ++l) {
      for (Tensor* t : {&cache->k(l), &cache->v(l)}) {
        std::fill_n(t->mutable_as<uint16_t>(), t->elements(), uint16_t{0x4780});
      }
    }
    // Pages scattered backwards, so that neighbours in the sequence are none in memory.
    std::vector<int32_t> table(rows * pages_each);
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(table.size() - i + 1);
    std::vector<std::vector<float>> parts(rows);
    for (int64_t done = 0;; done += chunk) {
      Batch batch;
      batch.cache = &*cache;
      batch.block_table = table;
      batch.block_rows = rows;
      batch.max_pages = pages_each;
      std::vector<int64_t> which;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t n = static_cast<int64_t>(whole.runs[r].tokens.size());
        if (done >= n) continue;
        const int64_t take = chunk == 0 ? n : std::min(chunk, n - done);
        TokenRun run = whole.runs[r];
        run.tokens = run.tokens.subspan(done, take);
        run.targets = run.targets.subspan(done, take);
        run.position = done;
        run.block_row = static_cast<int32_t>(r);
        batch.runs.push_back(run);
        which.push_back(r);
      }
      if (batch.runs.empty()) break;
      const auto keep = [&](const Batch& b, std::span<const int64_t> rows_of) {
        const ForwardOutput out = context.Run(model_, b);
        size_t at = 0;
        for (size_t i = 0; i < b.runs.size(); ++i) {
          for (int32_t target : b.runs[i].targets) {
            if (target >= 0) parts[rows_of[i]].push_back(out.logprob[at++]);
          }
        }
        TARE_CHECK(at == out.logprob.size());
      };
      if (together) {
        keep(batch, which);
      } else {
        for (size_t i = 0; i < batch.runs.size(); ++i) {
          Batch one = batch;
          one.runs = {batch.runs[i]};
          keep(one, std::span(which).subspan(i, 1));
        }
      }
      if (chunk == 0) break;
    }
    std::vector<float> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return Bits(all);
  }

  Reference ref_;
  Model model_;
  std::vector<uint32_t> expected_;
};

TEST_P(Invariance, Threads) {
  for (int threads : {2, 3, 5}) {
    Context context(threads);
    context.ctx.profile = GetParam();
    EXPECT_EQ(Bits(context.Run(model_, ref_.MakeBatch()).logprob), expected_) << threads;
  }
}

// Packed together, alone, in another order, aligned with padding between.
TEST_P(Invariance, Packing) {
  Context context(2);
  context.ctx.profile = GetParam();
  const Batch whole = ref_.MakeBatch();
  std::vector<float> alone;
  for (const TokenRun& run : whole.runs) {
    Batch one;
    one.runs = {run};
    const ForwardOutput out = context.Run(model_, one);
    alone.insert(alone.end(), out.logprob.begin(), out.logprob.end());
  }
  EXPECT_EQ(Bits(alone), expected_);

  Batch reversed = whole;
  std::reverse(reversed.runs.begin(), reversed.runs.end());
  const ForwardOutput back = context.Run(model_, reversed);
  std::vector<float> sorted;
  size_t end = back.logprob.size();
  for (const TokenRun& run : whole.runs) {
    const size_t n =
        std::count_if(run.targets.begin(), run.targets.end(), [](int32_t t) { return t >= 0; });
    sorted.insert(sorted.end(), back.logprob.begin() + (end - n), back.logprob.begin() + end);
    end -= n;
  }
  EXPECT_EQ(Bits(sorted), expected_);

  for (int64_t align : {16, 64}) {
    Batch padded = whole;
    padded.row_align = align;
    EXPECT_EQ(Bits(context.Run(model_, padded).logprob), expected_) << align;
  }
}

// Chunked prefill, decode token by token, page sizes: K and V from pages instead of the batch.
TEST_P(Invariance, ChunksPagesAndDecode) {
  EXPECT_EQ(Paged(0, 16, 2, true), expected_);
  EXPECT_EQ(Paged(0, 64, 1, false), expected_);
  EXPECT_EQ(Paged(7, 16, 2, true), expected_);
  EXPECT_EQ(Paged(16, 5, 3, false), expected_);
  EXPECT_EQ(Paged(1, 16, 2, true), expected_);
}

// Scratch used before, unpacked weights, a tape, a recompute tape, a tap: none is seen by a value.
TEST_P(Invariance, BuffersPackingOfWeightsAndTapes) {
  Context context(2);
  context.ctx.profile = GetParam();
  const Batch batch = ref_.MakeBatch();
  for (int i = 0; i < 2; ++i) EXPECT_EQ(Bits(context.Run(model_, batch).logprob), expected_);
  for (bool recompute : {false, true}) {
    Tape tape(
        TapeOptions{.recompute = recompute, .max_logit_bytes = recompute ? 0 : int64_t{1} << 28});
    for (int i = 0; i < 2; ++i)
      EXPECT_EQ(Bits(context.Run(model_, batch, &tape).logprob), expected_);
  }
  auto tensors = MiniTensorsFor(ref_.Config(DType::kBF16));
  auto unpacked =
      Model::FromTensors(&context.pool, ref_.Config(DType::kBF16), *tensors, {.pack = false});
  ASSERT_TRUE(unpacked.ok());
  EXPECT_EQ(Bits(context.Run(*unpacked, batch).logprob), expected_);
}

// The logits handed out for sampling are those behind the logprobs: a logprob from them has the
// same bits.
TEST_P(Invariance, LogitsOfTheLastRows) {
  Context context(2);
  context.ctx.profile = GetParam();
  Batch batch = ref_.MakeBatch();
  const ForwardOutput plain = context.Run(model_, batch);
  Batch wanting = batch;
  for (TokenRun& run : wanting.runs)
    run.logit_rows = std::min<int64_t>(3, static_cast<int64_t>(run.tokens.size()));
  const ForwardOutput both = context.Run(model_, wanting);
  EXPECT_EQ(Bits(both.logprob), Bits(plain.logprob));
  ASSERT_EQ(both.logits.dim(0), 3 + 3 + 3 + 1);
  const std::vector<float> kept(both.logits.as<float>(),
                                both.logits.as<float>() + both.logits.elements());
  for (TokenRun& run : wanting.runs) run.targets = {};
  const ForwardOutput only = context.Run(model_, wanting);
  EXPECT_TRUE(only.logprob.empty());
  EXPECT_EQ(Bits(std::span(only.logits.as<float>(), only.logits.elements())), Bits(kept));
}

INSTANTIATE_TEST_SUITE_P(Profiles, Invariance,
                         ::testing::Values(Profile::kIeeeF32, Profile::kSm90Mma),
                         [](const auto& info) {
                           return info.param == Profile::kIeeeF32 ? "ieee" : "sm90";
                         });

// What Forward refuses, and by which name.
TEST(ForwardTest, RefusesBadBatches) {
  const Reference ref("mini");
  const Model model = ref.MakeModel(DType::kBF16);
  Context context(1);
  const auto message = [&](auto change) {
    Batch batch = ref.MakeBatch();
    change(batch);
    auto out = Forward(context.ctx, model, batch, &context.scratch);
    EXPECT_FALSE(out.ok());
    return out.ok() ? std::string() : out.status().ToString();
  };
  const std::vector<int32_t> bad = {3, 512, 4}, negative = {3, -2, 4};
  EXPECT_THAT(message([&](Batch& b) {
                b.runs[1].tokens = bad;
                b.runs[1].targets = {};
              }),
              HasSubstr("run 1 token 1 is 512"));
  EXPECT_THAT(message([&](Batch& b) {
                b.runs[1].tokens = negative;
                b.runs[1].targets = {};
              }),
              HasSubstr("run 1 token 1 is -2"));
  EXPECT_THAT(message([&](Batch& b) { b.runs[0].targets = std::span(bad); }),
              HasSubstr("3 targets"));
  EXPECT_THAT(message([&](Batch& b) {
                b.runs[2].tokens = {};
                b.runs[2].targets = {};
              }),
              HasSubstr("run 2 has no tokens"));
  EXPECT_THAT(message([&](Batch& b) { b.runs[0].position = 4; }), HasSubstr("without a cache"));
  EXPECT_THAT(message([&](Batch& b) { b.runs[0].position = 8190; }),
              HasSubstr("rope tables end at 8192"));
  EXPECT_THAT(message([&](Batch& b) { b.runs[3].temperature = 0.0f; }),
              HasSubstr("run 3 has temperature 0"));
  EXPECT_THAT(message([&](Batch& b) { b.runs[3].temperature = NAN; }),
              HasSubstr("run 3 has temperature"));
  EXPECT_THAT(message([&](Batch& b) { b.runs[3].logit_rows = 2; }),
              HasSubstr("logits of 2 rows of 1"));
  EXPECT_THAT(message([&](Batch& b) { b.row_align = 0; }), HasSubstr("row_align"));
  auto cache = KvCache::Create(model.config(), 4, 16);
  std::vector<int32_t> table = {0, 1, 2, 4};
  const auto paged = [&](Batch& b) {
    b.cache = &*cache;
    b.block_table = table;
    b.block_rows = 1;
    b.max_pages = 4;
  };
  EXPECT_THAT(message([&](Batch& b) {
                paged(b);
                b.runs.resize(1);
                b.block_rows = 2;
              }),
              HasSubstr("block table"));
  EXPECT_THAT(message([&](Batch& b) {
                paged(b);
                b.runs[1].block_row = 1;
                b.runs.resize(2);
              }),
              HasSubstr("run 1 needs 1 pages of row 1"));
  EXPECT_THAT(message([&](Batch& b) {
                paged(b);
                b.runs = {b.runs[2]};
              }),
              HasSubstr("needs 5 pages"));
  EXPECT_THAT(message([&](Batch& b) {
                paged(b);
                b.runs = {b.runs[0]};
                b.runs[0].position = 20;
              }),
              HasSubstr("page 4"));
}

}  // namespace
}  // namespace tare::models
