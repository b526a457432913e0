#pragma once

// Runs the real program, for tests: exit status, what it printed, and a folder of its own.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "base/env.h"

namespace tare {

struct ToolRun {
  int status = -1;  // exit status; 128 + N when signal N ended it
  std::string out;  // stdout
  std::string err;  // stderr
};

class ToolTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "tare_tool_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    ASSERT_TRUE(std::filesystem::exists(Program())) << "build the target `tare` first";
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }

  static std::string Program() { return std::string(TARE_BINARY_DIR) + "/tare"; }
  std::string In(const std::string& name) const { return root_ + "/" + name; }
  void Write(const std::string& name, std::string_view bytes) const {
    ASSERT_TRUE(Env::Real()->WriteFileAtomic(In(name), bytes).ok());
  }

  // `arguments` goes through the shell.
  ToolRun Tare(const std::string& arguments) const {
    const std::string command =
        Program() + " " + arguments + " >" + In("stdout") + " 2>" + In("stderr") + " </dev/null";
    const int status = std::system(command.c_str());
    ToolRun run;
    run.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    run.out = Env::Real()->ReadFile(In("stdout")).value();
    run.err = Env::Real()->ReadFile(In("stderr")).value();
    return run;
  }

  std::string root_;
};

}  // namespace tare
