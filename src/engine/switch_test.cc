#include "engine/switch.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace tare::engine {
namespace {

// SYS-03: unset, 0 and 1 mean what they say; a presence test would take "0" for on, a truth test
// "false".
TEST(EngineSwitch, OnlyZeroAndOne) {
  EXPECT_EQ(ParseSwitch(std::nullopt)->effective, ops::BatchInvariance::kOff);
  EXPECT_EQ(ParseSwitch("0")->effective, ops::BatchInvariance::kOff);
  EXPECT_EQ(ParseSwitch("1")->effective, ops::BatchInvariance::kOn);
  for (const char* bad : {"", "false", "true", "2", " 1", "1 ", "01", "on", "\x1b[31m1"}) {
    const Result<Switch> s = ParseSwitch(bad);
    ASSERT_FALSE(s.ok()) << bad;
    EXPECT_EQ(s.status().code(), Code::kInvalidArgument);
    EXPECT_NE(s.status().message().find("set 1"), std::string::npos);
    EXPECT_EQ(s.status().message().find('\x1b'), std::string::npos);
  }
}

// SYS-03, T-12: a value set after the start changes nothing and is seen.
TEST(EngineSwitch, SetAfterStart) {
  ::unsetenv(kSwitchName);
  const Result<Switch> start = ReadSwitch();
  ASSERT_TRUE(start.ok());
  EXPECT_TRUE(Recheck(*start).ok());
  ::setenv(kSwitchName, "1", 1);
  const Status late = Recheck(*start);
  ::unsetenv(kSwitchName);
  EXPECT_EQ(late.code(), Code::kPrecondition);
  EXPECT_NE(late.message().find("unset at start"), std::string::npos) << late.message();
}

}  // namespace
}  // namespace tare::engine
