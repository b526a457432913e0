#include "tensor/tap.h"

#include <gtest/gtest.h>

namespace tare {
namespace {

class CountingTap : public Tap {
 public:
  void BeginFrame(const TapFrame&) override {}
  void Emit(const TapPoint& point, const Tensor&) override { names.push_back(point.name); }
  void EndFrame() override {}
  std::vector<std::string> names;
};

TEST(Tap, NullTapEvaluatesNothing) {
  int evaluated = 0;
  auto point = [&] {
    ++evaluated;
    return TapPoint{.name = "x"};
  };
  Tap* none = nullptr;
  TARE_TAP(none, Tensor(), point());
  EXPECT_EQ(evaluated, 0);
  CountingTap tap;
  TARE_TAP(&tap, Tensor(), point());
  EXPECT_EQ(evaluated, 1);
  EXPECT_EQ(tap.names, std::vector<std::string>{"x"});
}

TEST(Tap, PointMayHoldCommas) {
  CountingTap tap;
  TARE_TAP(&tap, Tensor(), TapPoint{.name = "y", .layer = 3, .op = "add", .inputs = {"a", "b"}});
  EXPECT_EQ(tap.names, std::vector<std::string>{"y"});
}

TEST(Tap, HistoryHashDependsOnEveryTokenAndOnNoCut) {
  const std::vector<int32_t> tokens = {1, 2, 3, 40000, -1};
  const TokenHash whole = ExtendTokenHash({}, tokens);
  for (size_t cut = 0; cut <= tokens.size(); ++cut) {
    const std::span<const int32_t> all(tokens);
    EXPECT_EQ(ExtendTokenHash(ExtendTokenHash({}, all.first(cut)), all.subspan(cut)), whole);
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::vector<int32_t> other = tokens;
    other[i] ^= 1;
    EXPECT_NE(ExtendTokenHash({}, other), whole);
  }
  // Written down, so that a second implementation can be checked: sha256(32 zero bytes, 01 00 00
  // 00).
  const std::vector<int32_t> one = {1};
  EXPECT_EQ(Hex(ExtendTokenHash({}, one)),
            "71c99cc3bc21757feed5b712744ebb0f770d5c41d99189f9457495747bf11050");
}

TEST(Tap, NamesRoundTrip) {
  for (const char* name : {"prefill", "decode", "score", "train", "backward"}) {
    EXPECT_EQ(TapPhaseName(ParseTapPhase(name).value()), name);
  }
  for (const char* name : {"value", "discrete", "mask", "sentinel", "expected"}) {
    EXPECT_EQ(TapRoleName(ParseTapRole(name).value()), name);
  }
  EXPECT_FALSE(ParseTapPhase("Prefill").has_value());
  EXPECT_FALSE(ParseTapRole("").has_value());
}

}  // namespace
}  // namespace tare
