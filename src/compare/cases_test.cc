// Public failures of the comparator kind, each with its true pass and its planted fault
// (cases H03, H04, H05, H08, H09, H10), and the rules of tensors by name.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>

#include "base/env.h"
#include "base/json.h"
#include "compare/discrete.h"
#include "compare/dump_diff.h"
#include "compare/logprob_diff.h"
#include "compare/tensor_diff.h"

namespace tare::compare {
namespace {

ThreadPool& Pool() {
  static ThreadPool pool(2);
  return pool;
}

template <typename T>
Tensor Make(DType dtype, Shape shape, const std::vector<T>& values) {
  Tensor t = Tensor::Allocate(dtype, std::move(shape)).value();
  EXPECT_EQ(t.size_bytes(), static_cast<int64_t>(values.size() * sizeof(T)));
  if (!values.empty()) std::memcpy(t.mutable_data(), values.data(), values.size() * sizeof(T));
  return t;
}
Tensor F32(Shape shape, const std::vector<float>& values) {
  return Make(DType::kF32, std::move(shape), values);
}
Tensor U8(Shape shape, const std::vector<uint8_t>& values) {
  return Make(DType::kU8, std::move(shape), values);
}

using Tensors = std::vector<std::pair<std::string, Tensor>>;
Report Diff(const Tensors& a, const Tensors& b, DiffOptions options = {}) {
  options.pool = &Pool();
  return DiffTensors(MemorySource("A", a), MemorySource("B", b), options).value();
}

TEST(Cases, H03aAllMaskedIsInconclusiveWithZeroCompared) {
  const Tensors a = {{"x", F32({2, 4}, {1, 2, 3, 4, 5, 6, 7, 8})},
                     {"m", U8({2, 4}, std::vector<uint8_t>(8, 0))}};
  const Tensors b = {{"x", F32({2, 4}, {8, 7, 6, 5, 4, 3, 2, 1})},
                     {"m", U8({2, 4}, std::vector<uint8_t>(8, 0))}};
  const Report r = Diff(a, b, {.mask = "m"});
  EXPECT_EQ(r.verdict, Verdict::kInconclusive);
  EXPECT_EQ(r.reason, "no-valid-tokens");
  EXPECT_EQ(r.units[0].counts.compared, 0);
  EXPECT_EQ(r.units[0].counts.masked, 8);
}

TEST(Cases, H03bNoCommonNameIsInconclusive) {
  const Tensor t = F32({2}, {1, 2});
  const Report r = Diff({{"a", t}, {"b", t}, {"c", t}}, {{"d", t}, {"e", t}, {"f", t}});
  EXPECT_EQ(r.verdict, Verdict::kInconclusive);
  EXPECT_EQ(r.reason, "no-common-tensor");
  EXPECT_EQ(r.totals.compared, 0);
  EXPECT_EQ(Diff({}, {}).verdict, Verdict::kInconclusive);
}

TEST(Cases, H03cOneValidTokenWithEqualBitsPasses) {
  const Report r = Diff({{"x", F32({2}, {1, 2})}, {"m", U8({2}, {0, 1})}},
                        {{"x", F32({2}, {9, 2})}, {"m", U8({2}, {0, 1})}}, {.mask = "m"});
  EXPECT_EQ(r.verdict, Verdict::kPass);
  EXPECT_EQ(r.units[0].counts.compared, 1);
  EXPECT_EQ(r.units[0].counts.masked, 1);
}

Tensors H04(float masked, const std::vector<uint8_t>& mask) {
  const float m = masked;
  return {{"logprobs", F32({8}, {-.5f, -.5f, -.5f, m, m, m, -.5f, -.5f})}, {"mask", U8({8}, mask)}};
}

TEST(Cases, H04PlaceholdersUnderTheMaskDoNotCount) {
  const std::vector<uint8_t> mask = {1, 1, 1, 0, 0, 0, 1, 1};
  const Report r = Diff(H04(0.0f, mask), H04(-30.0f, mask), {.mask = "mask"});
  EXPECT_EQ(r.verdict, Verdict::kPass);
  EXPECT_EQ(r.units[0].counts.compared, 5);
  EXPECT_EQ(r.units[0].counts.mismatches, 0);
  EXPECT_EQ(r.units[0].counts.masked, 3);
}

TEST(Cases, H04AllOnesIsNotTheLossMask) {
  const std::vector<uint8_t> ones(8, 1);
  Report r = Diff(H04(0.0f, ones), H04(-30.0f, ones), {.mask = "mask"});
  EXPECT_EQ(r.verdict, Verdict::kFail);
  EXPECT_EQ(r.reason, "mask-not-loss-mask");
  // The tempting wrong answer the other way: a real 0.0 near its partner is a numeric difference.
  Tensors a = {{"logprobs", F32({2}, {0.0f, -1.0f})}, {"mask", U8({2}, {1, 1})}};
  Tensors b = {{"logprobs", F32({2}, {-1.2e-7f, -1.0f})}, {"mask", U8({2}, {1, 1})}};
  r = Diff(a, b, {.mask = "mask"});
  EXPECT_EQ(r.reason, "bit-mismatch");
  // Masks that differ are found before any value.
  r = Diff(H04(0.0f, {1, 1, 1, 0, 0, 0, 1, 1}), H04(0.0f, ones), {.mask = "mask"});
  EXPECT_EQ(r.reason, "mask-differs");
}

TEST(Cases, H05EqualNonFiniteBitsOnValidElementsFail) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              inf = std::numeric_limits<float>::infinity();
  const Report r = Diff(
      {{"x", F32({5}, {-.5f, nan, -inf, -1, -100})}, {"m", U8({5}, {1, 1, 1, 1, 0})}},
      {{"x", F32({5}, {-.5f, nan, -inf, -1, -1})}, {"m", U8({5}, {1, 1, 1, 1, 0})}}, {.mask = "m"});
  EXPECT_EQ(r.verdict, Verdict::kFail);
  EXPECT_EQ(r.reason, "non-finite");
  EXPECT_EQ(r.units[0].counts.non_finite, 2);
  EXPECT_EQ(r.units[0].counts.finite_compared(), 2);
  EXPECT_EQ(r.units[0].counts.mismatches, 0);
}

TEST(TensorDiff, EveryKindHasItsOwnReason) {
  const Tensor x = F32({2}, {1, 2});
  const auto reason = [](const Tensors& a, const Tensors& b) {
    return std::string(Diff(a, b).reason);
  };
  EXPECT_EQ(reason({{"x", x}}, {{"x", x}}), "");
  EXPECT_EQ(reason({{"x", x}}, {{"x", F32({2}, {1, 3})}}), "bit-mismatch");
  EXPECT_EQ(reason({{"x", F32({1}, {0.0f})}}, {{"x", F32({1}, {-0.0f})}}), "sign-of-zero");
  EXPECT_EQ(reason({{"x", x}}, {{"x", F32({1, 2}, {1, 2})}}), "shape-differs");
  EXPECT_EQ(reason({{"x", x}}, {{"x", Make<int32_t>(DType::kI32, {2}, {1, 2})}}), "dtype-differs");
  EXPECT_EQ(reason({{"x", x}, {"y", x}}, {{"x", x}}), "missing-tensor");
  EXPECT_EQ(reason({{"x", x}}, {{"x", x}, {"y", x}}), "missing-tensor");
  EXPECT_EQ(reason({{"x", F32({0}, {})}}, {{"x", F32({0}, {})}}), "nothing-compared");
  EXPECT_EQ(reason({{"x", x}, {"e", F32({0}, {})}}, {{"x", x}, {"e", F32({0}, {})}}), "");
  EXPECT_EQ(reason({{"x", x}, {"x", x}}, {{"x", x}}), "duplicate-name");
  EXPECT_EQ(Diff({{"x", x}, {"x", x}}, {{"x", x}}).verdict, Verdict::kRefused);
}

TEST(TensorDiff, AMaskOverLeadingDimensionsCoversTheWholeRow) {
  const Tensor mask = U8({2, 2}, {1, 0, 0, 1});
  const auto diff = [&](const std::vector<float>& b) {
    return Diff({{"x", F32({2, 2, 3}, std::vector<float>(12, 1.0f))}, {"m", mask}},
                {{"x", F32({2, 2, 3}, b)}, {"m", mask}}, {.mask = "m"});
  };
  // Every element of the two masked rows differs, and none of the others.
  Report r = diff({1, 1, 1, 7, 8, 9, 7, 8, 9, 1, 1, 1});
  EXPECT_EQ(r.verdict, Verdict::kPass);
  EXPECT_EQ(r.units[0].counts.compared, 6);
  EXPECT_EQ(r.units[0].counts.masked, 6);
  r = diff({1, 1, 1, 7, 8, 9, 7, 8, 9, 1, 1, 2});  // the last element of the last valid row
  EXPECT_EQ(r.verdict, Verdict::kFail);
  EXPECT_EQ(r.units[0].counts.mismatches, 1);
  EXPECT_EQ(r.units[0].first_coordinate, (std::vector<int64_t>{1, 1, 2}));
}

TEST(TensorDiff, MasksThatDoNotFitAreRefused) {
  const Tensor x = F32({2}, {1, 2});
  const auto refused = [&](const Tensors& a, const Tensors& b) {
    const Report r = Diff(a, b, {.mask = "m"});
    EXPECT_EQ(r.verdict, Verdict::kRefused);
    return std::string(r.reason);
  };
  EXPECT_EQ(refused({{"x", x}, {"m", U8({2}, {1, 1})}}, {{"x", x}}), "mask-missing");
  EXPECT_EQ(refused({{"x", x}, {"m", U8({2}, {1, 2})}}, {{"x", x}, {"m", U8({2}, {1, 1})}}),
            "mask-malformed");
  EXPECT_EQ(refused({{"x", x}, {"m", U8({3}, {1, 1, 1})}}, {{"x", x}, {"m", U8({3}, {1, 1, 1})}}),
            "mask-malformed");
  EXPECT_EQ(refused({{"x", x}, {"m", F32({2}, {1, -0.0f})}}, {{"x", x}, {"m", U8({2}, {1, 0})}}),
            "mask-malformed");
}

TEST(TensorDiff, PatternsBecomeScopeAndTiersNeverReplaceTheVerdict) {
  const Tensors a = {
      {"l.0.w", F32({2}, {1, 2})}, {"l.1.w", F32({2}, {1, 2})}, {"only.a", F32({1}, {1})}};
  const Tensors b = {{"l.0.w", F32({2}, {1, 2})},
                     {"l.1.w", F32({2}, {1, std::nextafter(2.0f, 3.0f)})}};
  Report r = Diff(a, b, {.ignore = {"l.1.*", "only.a"}});
  EXPECT_EQ(r.verdict, Verdict::kPass);
  EXPECT_EQ(r.scope.excluded, (std::vector<std::string>{"l.1.w", "only.a"}));
  EXPECT_NE(Table(r, {}).find("2 names left out"), std::string::npos);
  EXPECT_EQ(Diff(a, b, {.only = {"l.0.*"}}).verdict, Verdict::kPass);
  EXPECT_EQ(Diff(a, b, {.only = {"none"}}).verdict, Verdict::kInconclusive);
  r = Diff(a, b,
           {.ignore = {"only.a"},
            .tiers = {{.name = "loose", .max_ulp = 1, .abs = {}, .rel = {}},
                      {.name = "tight", .max_ulp = {}, .abs = 1e-9, .rel = {}}}});
  EXPECT_EQ(r.verdict, Verdict::kFail);
  EXPECT_EQ(r.totals.outside[0], 0);
  EXPECT_EQ(r.totals.outside[1], 1);
  EXPECT_NE(Table(r, {}).find("tier loose: 4 of 4"), std::string::npos);
}

TEST(TensorDiff, JsonIsCompleteAndParses) {
  const Tensors a = {{"x", F32({2, 2}, {1, 2, 3, 4})}, {"na\x1bme", F32({1}, {1})}};
  const Tensors b = {{"x", F32({2, 2}, {1, 2, 3.5f, 4})}};
  std::string text;
  WriteJson(Diff(a, b, {.digests = true}), [&](std::string_view piece) { text += piece; });
  const Json j = ParseJson(text).value();
  EXPECT_EQ(j["verdict"], "fail");
  EXPECT_EQ(j["tensors"][0]["first_mismatch"]["a"], "0x40400000");
  EXPECT_EQ(j["tensors"][0]["first_coordinate"], Json({1, 0}));
  EXPECT_EQ(j["tensors"][0]["sha256_a"].get<std::string>().size(), 64u);
  EXPECT_EQ(j["tensors"][1]["missing_on"], "b");
  EXPECT_EQ(Table(Diff(a, b), {}).find('\x1b'), std::string::npos);
}

// Figures are the same for every thread count, with a difference in every piece.
TEST(TensorDiff, ThreadsDoNotMoveAFigure) {
  const int64_t n = 3'000'000;
  Tensor a = Tensor::Allocate(DType::kF32, {n}).value(),
         b = Tensor::Allocate(DType::kF32, {n}).value();
  for (int64_t i = 0; i < n; ++i) {
    a.mutable_as<float>()[i] = static_cast<float>(i % 1000) * 0.001f;
    b.mutable_as<float>()[i] = a.as<float>()[i] + (i % 977 == 5 ? 1e-3f : 0.0f);
  }
  std::string first;
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    std::string text;
    WriteJson(DiffTensors(MemorySource("A", {{"x", a}}), MemorySource("B", {{"x", b}}),
                          {.digests = true, .pool = &pool})
                  .value(),
              [&](std::string_view piece) { text += piece; });
    if (first.empty()) first = text;
    EXPECT_EQ(text, first);
  }
}

LogprobSequence Seq(const std::string& name, std::vector<int32_t> prompt,
                    std::vector<int32_t> tokens, const std::vector<float>& values) {
  LogprobSequence s;
  s.sequence = name;
  s.weights = "theta0";
  s.prompt = std::move(prompt);
  s.tokens = std::move(tokens);
  for (const float v : values) s.words.push_back(std::bit_cast<uint32_t>(v));
  return s;
}

TEST(LogprobDiff, PairsByTokensNotByRowOrName) {
  const DiffOptions options{.pool = &Pool()};
  const LogprobSet a{"A", {Seq("0", {1}, {2, 3}, {-1, -2}), Seq("1", {5}, {6}, {-3})}};
  const LogprobSet b{
      "B", {Seq("x", {5}, {6}, {-3}), Seq("y", {1, 2}, {3}, {-2}), Seq("z", {1}, {2}, {-1})}};
  EXPECT_EQ(DiffLogprobs(a, b, options)->verdict,
            Verdict::kPass);  // another cut into prompt and tokens
  LogprobSet other = b;
  other.sequences[0].weights = "theta1";
  const Report r = DiffLogprobs(a, other, options).value();
  EXPECT_EQ(r.reason, "unpaired-tokens");
  EXPECT_EQ(r.unpaired.size(), 2u);
}

TEST(LogprobDiff, CountsByPosition) {
  const DiffOptions options{.pool = &Pool()};
  LogprobSet a{"A", {Seq("0", {1, 2}, {3, 4, 5}, {-1, -2, -3}), Seq("1", {9}, {8}, {-4})}};
  LogprobSet b = a;
  b.sequences[0].words[1] ^= 1;
  b.sequences[0].mask = a.sequences[0].mask = {1, 1, 0};
  const Report r = DiffLogprobs(a, b, options).value();
  ASSERT_EQ(r.by_position.size(), 5u);  // the longest sequence has five positions
  const auto compared = [&](size_t i) { return r.by_position[i].compared; };
  EXPECT_EQ(compared(0), 0);
  EXPECT_EQ(compared(1), 1);
  EXPECT_EQ(compared(2), 1);
  EXPECT_EQ(compared(3), 1);
  EXPECT_EQ(compared(4), 0);  // masked
  EXPECT_EQ(r.by_position[3].mismatches, 1);
  EXPECT_EQ(r.by_position[3].max_abs, 0x1p-22);  // one ulp at 2
  EXPECT_EQ(r.by_position[2].mismatches, 0);
  // More positions than buckets: none is lost.
  LogprobSet c{"C", {Seq("0", {1}, std::vector<int32_t>(200, 7), std::vector<float>(200, -1))}};
  const Report wide = DiffLogprobs(c, c, options).value();
  int64_t all = 0;
  for (const PositionBucket& p : wide.by_position) all += p.compared;
  EXPECT_EQ(all, 200);
  EXPECT_LE(wide.by_position.size(), 64u);
  EXPECT_EQ(wide.by_position.back().end, 201);
}

TEST(LogprobDiff, AbsenceIsNotZeroAndDecimalIsNotBits) {
  const DiffOptions options{.pool = &Pool()};
  LogprobSet a{"A", {Seq("0", {1}, {2, 3}, {0.0f, -2})}};
  LogprobSet b = a;
  EXPECT_EQ(DiffLogprobs(a, b, options)->verdict, Verdict::kPass);  // 0.0 is a legal logprob
  b.sequences[0].present = {0, 1};
  EXPECT_EQ(DiffLogprobs(a, b, options)->reason, "mask-not-loss-mask");
  a.sequences[0].mask = b.sequences[0].mask = {0, 1};
  EXPECT_EQ(DiffLogprobs(a, b, options)->verdict, Verdict::kPass);
  b.sequences[0].mask = {1, 1};
  EXPECT_EQ(DiffLogprobs(a, b, options)->reason, "mask-differs");
  b = a;
  b.sequences[0].decimal = true;
  EXPECT_EQ(DiffLogprobs(a, b, options)->verdict, Verdict::kDiagnosticOnly);
  b = a;
  b.sequences[0].kind = "processed";  // DISC-12
  EXPECT_EQ(DiffLogprobs(a, b, options)->verdict, Verdict::kRefused);
}

// H09, DISC-01, DISC-02, DISC-04: set, order and duplicates are told apart, never sorted away.
TEST(Cases, H09TiesInExpertChoice) {
  const auto bf16 = [](const std::vector<float>& values) {
    std::vector<uint16_t> bits;
    for (const float v : values)
      bits.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(v) >> 16));
    return bits;
  };
  const float inf = std::numeric_limits<float>::infinity();
  const auto choose = [&](const std::vector<float>& scores, int64_t k) {
    return TopKByContract(DType::kBF16, bf16(scores).data(), static_cast<int64_t>(scores.size()), k)
        .value();
  };
  using Ids = std::vector<int64_t>;
  EXPECT_EQ(choose({.5f, .25f, .25f, .25f}, 2), (Ids{0, 1}));
  EXPECT_EQ(choose({.25f, .5f, .125f, .125f}, 2), (Ids{1, 0}));
  EXPECT_EQ(choose({-inf, -inf, 0, -inf}, 3), (Ids{2, 0, 1}));
  EXPECT_EQ(choose({-0.0f, 0.0f, 0.0f}, 2), (Ids{0, 1}));  // zeros of both signs tie
  EXPECT_EQ(CompareChoice(Ids{0, 1}, Ids{0, 3}), Choice::kSet);
  EXPECT_EQ(CompareChoice(Ids{1, 0}, Ids{0, 1}), Choice::kOrder);
  EXPECT_EQ(CompareChoice(Ids{2, 0, 1}, Ids{2, 0, 0}), Choice::kDuplicate);
  EXPECT_EQ(CompareChoice(Ids{2, -1, -1}, Ids{2, -1, -1}),
            Choice::kEqual);  // DISC-05: padding repeats
  EXPECT_EQ(CutoffMargin(DType::kBF16, bf16({.5f, .25f, .25f, .25f}).data(), 4, 2), 0.0);
  EXPECT_FALSE(TopKByContract(DType::kBF16, bf16({NAN, 1}).data(), 2, 1).ok());
  EXPECT_FALSE(TopKByContract(DType::kBF16, bf16({1}).data(), 1, 2).ok());
}

}  // namespace
}  // namespace tare::compare
