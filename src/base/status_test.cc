#include "base/status.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <set>
#include <vector>

#include "base/verdict.h"

namespace tare {
namespace {

// Names are stable: they stand in JSON.
TEST(Status, NamesAndText) {
  EXPECT_TRUE(Ok().ok());
  EXPECT_EQ(Ok().ToString(), "ok");
  const Status s = DataLoss("{} of {}", 3, "x");
  EXPECT_FALSE(s.ok());
  EXPECT_EQ(s.ToString(), "data-loss: 3 of x");
  EXPECT_EQ(s.Annotate("file").ToString(), "data-loss: file: 3 of x");
  EXPECT_TRUE(Ok().Annotate("file").ok());
  std::set<std::string_view> names;
  for (int c = 0; c <= static_cast<int>(Code::kInternal); ++c)
    names.insert(CodeName(static_cast<Code>(c)));
  EXPECT_EQ(names.size(), 11u) << "each code has its own name";
  EXPECT_EQ(names.count("unknown"), 0u);
}

TEST(Status, ErrnoPicksTheCode) {
  EXPECT_EQ(Errno("open", "f", ENOENT).code(), Code::kNotFound);
  EXPECT_EQ(Errno("open", "f", EEXIST).code(), Code::kAlreadyExists);
  EXPECT_EQ(Errno("write", "f", ENOSPC).code(), Code::kExhausted);
  EXPECT_EQ(Errno("write", "f", EDQUOT).code(), Code::kExhausted);
  EXPECT_EQ(Errno("read", "f", EIO).ToString(), "io: read f: Input/output error");
}

Result<int> Half(int x) {
  if (x % 2 != 0) return InvalidArgument("{} is odd", x);
  return x / 2;
}
Result<int> Quarter(int x) {
  TARE_ASSIGN_OR_RETURN(const int half, Half(x));
  TARE_RETURN_IF_ERROR(Half(half).status());
  return Half(half);
}

TEST(Result, ValuesAndErrorsPropagate) {
  EXPECT_EQ(Quarter(8).value(), 2);
  EXPECT_EQ(Quarter(6).status().message(), "3 is odd");
  EXPECT_EQ(Quarter(5).status().message(), "5 is odd");
  Result<std::unique_ptr<int>> moved = std::make_unique<int>(7);
  EXPECT_EQ(**moved, 7);
  const std::unique_ptr<int> taken = std::move(moved).value();
  EXPECT_EQ(*taken, 7);
  // The value of a temporary outlives the loop over it.
  int sum = 0;
  for (const int v : Result<std::vector<int>>(std::vector<int>{1, 2, 3}).value()) sum += v;
  EXPECT_EQ(sum, 6);
}

TEST(ResultDeathTest, TakingTheValueOfAnErrorStops) {
  EXPECT_DEATH((void)Half(3).value(), "3 is odd");
  EXPECT_DEATH((void)Result<int>(Ok()), "needs an error");
  EXPECT_DEATH(TARE_CHECK(1 + 1 == 3) << "context", "1 \\+ 1 == 3.*context");
}

// Only pass is 0; every verdict has its own name and exit status, and names parse back.
TEST(Verdict, NamesAndExitCodes) {
  std::set<int> codes;
  for (const Verdict v : {Verdict::kPass, Verdict::kFail, Verdict::kInconclusive, Verdict::kRefused,
                          Verdict::kWaitingHuman, Verdict::kNotCovered, Verdict::kDiagnosticOnly}) {
    EXPECT_EQ(ParseVerdict(VerdictName(v)), v);
    EXPECT_EQ(ExitCode(v) == 0, v == Verdict::kPass);
    codes.insert(ExitCode(v));
  }
  EXPECT_EQ(codes, (std::set<int>{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(VerdictName(Verdict::kWaitingHuman), "waiting-human");
  EXPECT_FALSE(ParseVerdict("Pass").has_value());
  EXPECT_FALSE(ParseVerdict("").has_value());
}

}  // namespace
}  // namespace tare
