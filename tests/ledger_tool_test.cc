// The ledger through the program, as scripts in tests/ledger: a task with every file system
// read-only but its own directory (GEN-13), a sign-off with the real ssh-keygen and ssh-agent, and
// the question whether a point is covered.

#include <cstdlib>

#include "tool.h"

namespace tare {
namespace {

class LedgerTool : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    std::filesystem::create_directory(In("task"));
  }
  // Runs tests/ledger/NAME with the program and this test's folder; it ends with the line "done".
  void Script(const std::string& before, const std::string& name) {
    const std::string program = std::filesystem::absolute(Program());
    const std::string command = before + " sh " TARE_SOURCE_DIR "/tests/ledger/" + name + " " +
                                program + " " + root_ + " >" + In("stdout") + " 2>&1 </dev/null";
    const int status = std::system(command.c_str());
    const std::string out = Env::Real()->ReadFile(In("stdout")).value();
    EXPECT_EQ(status, 0) << out;
    EXPECT_TRUE(out.ends_with("done\n")) << out;
  }
};

TEST_F(LedgerTool, GEN13ATaskWritesOnlyIntoItsDirectory) {
  if (std::system("unshare -rm true 2>/dev/null") != 0) {
    GTEST_SKIP() << "this kernel gives no mount namespace (unshare -rm)";
  }
  Script("unshare -rm", "read_only.sh");
}

TEST_F(LedgerTool, AKeyOfTheAgentNeedsAPersonAtATerminal) {
  if (std::system("command -v ssh-keygen ssh-agent ssh-add >/dev/null 2>&1") != 0) {
    GTEST_SKIP() << "no OpenSSH client here";
  }
  Script("", "agent.sh");
}

// GEN-31
TEST_F(LedgerTool, CoveredIsAnsweredInsideTheScopeOnly) { Script("", "covered.sh"); }

}  // namespace
}  // namespace tare
