// `tare run C0` to C4 by the program itself, on MINI: real traces, a real matrix, a real task.

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "base/json.h"

namespace tare {
namespace {

struct Answer {
  int exit = -1;
  std::string text;
  Json json;
};

Answer Tare(const std::string& arguments) {
  const std::string command = std::string(TARE_BINARY_DIR "/tare ") + arguments + " 2>/dev/null";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  Answer out;
  char buffer[4096];
  for (size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) {
    out.text.append(buffer, n);
  }
  const int status = ::pclose(pipe);
  out.exit = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  auto json = ParseJson(out.text);
  if (json.ok()) out.json = *json;
  return out;
}

class GatesRun : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "tare-gates-XXXXXX";
    dir_ = ::mkdtemp(pattern.data());
    ASSERT_EQ(Tare("model mini " + dir_ + "/mini").exit, 0);
    // Everything that a step would ask for, so that no open question closes one.
    std::string values;
    for (const char* value :
         {R"(inference.implementation="tare")", R"(training.route="tare")",
          R"(training.optimizer="adamw")", "training.learning_rate=1e-3",
          R"(target.consistency="bitwise")", R"(hardware.device="cpu")", "hardware.count=1",
          "workload.input_tokens=64", "workload.output_tokens=32", "workload.concurrency=[1,2]",
          R"(precision.kv_cache="bf16")", "parallelism.tp=1", "parallelism.pp=1"}) {
      values += std::string(" --set '") + value + "'";
    }
    ASSERT_EQ(Tare("init " + dir_ + "/task --model " + dir_ + "/mini" + values).exit, 0);
  }
  void TearDown() override {
    std::error_code error;
    std::filesystem::remove_all(dir_, error);
  }
  Answer Run(const std::string& gate) {
    return Tare("run " + gate + " --task " + dir_ + "/task --model " + dir_ + "/mini --json");
  }
  std::string dir_;
};

TEST_F(GatesRun, TheInventoryCoversMini) {
  const Answer c0 = Run("C0");
  EXPECT_EQ(c0.exit, 0) << c0.text.substr(0, 4000);
  ASSERT_TRUE(c0.json.is_object()) << c0.text;
  // Rows that were looked at, by name.
  for (const char* row : {"C0-01", "C0-02", "C0-03", "C0-05", "C0-06", "C0-07", "C0-08", "C0-09"}) {
    EXPECT_NE(c0.text.find(row), std::string::npos) << row;
  }
  // What it rests on is refused by name.
  const Answer c3 = Run("C3");
  EXPECT_EQ(c3.exit, 3);
  EXPECT_NE(c3.text.find("prerequisite-open"), std::string::npos);
}

TEST_F(GatesRun, SlowMiniPassesC0C2C3C4) {
  for (const char* gate : {"C0", "C2", "C3", "C4"}) {
    const Answer r = Run(gate);
    EXPECT_EQ(r.exit, 0) << gate << "\n" << r.text.substr(0, 6000);
  }
  // C1 ends at the person: the machine's part is there, the step stays closed.
  const Answer c1 = Run("C1");
  EXPECT_EQ(c1.exit, 4) << c1.text.substr(0, 6000);
  EXPECT_EQ(Tare("verify " + dir_ + "/task").exit, 0);
}

}  // namespace
}  // namespace tare
