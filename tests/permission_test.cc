// GEN-30: a whole run (rollout server, trainer, two updates) takes no device that nobody granted,
// signals no process that is not its own, starts no other program and talks to nobody beyond this
// machine: its system calls are traced and read. Plans are refused by claims (claims_test.cc).

#include <regex>
#include <set>
#include <sstream>
#include <vector>

#include "tool.h"

namespace tare {
namespace {

// What of a trace (`strace -f`) is outside of the permission; empty: nothing.
std::vector<std::string> Outside(const std::string& trace, const std::string& program) {
  static const std::regex kLine(R"(^(\d+) +(\w+)\((.*)$)");
  static const std::regex kSignal(R"(^(-?\d+), (?:(\d+), )?(SIG\w+|0))");
  static const std::regex kPath(R"re("([^"]*)")re");
  std::set<long> own;
  std::vector<std::string> out;
  std::istringstream lines(trace);
  std::vector<std::string> kept;
  for (std::string line; std::getline(lines, line);) kept.push_back(line);
  for (const std::string& line : kept) {
    std::smatch m;
    if (std::regex_search(line, m, std::regex(R"(^(\d+) )"))) own.insert(std::stol(m[1]));
  }
  for (const std::string& line : kept) {
    std::smatch m;
    if (!std::regex_match(line, m, kLine)) continue;
    const std::string call = m[2], args = m[3];
    std::smatch a;
    if (call == "kill" || call == "tkill" || call == "tgkill" || call == "pidfd_send_signal") {
      if (!std::regex_search(args, a, kSignal)) {
        out.push_back("cannot be read: " + line);
        continue;
      }
      if (a[3] == "0") continue;  // asks whether it lives
      // tgkill names the process first. 0, -1 and groups of others are never its own process.
      const long target = std::stol(a[1]);
      if (target == 0 || target == -1 || !own.contains(std::abs(target)))
        out.push_back("signals a foreign process: " + line);
    } else if (call == "connect") {
      const bool local = args.find("sa_family=AF_UNIX") != std::string::npos ||
                         args.find("inet_addr(\"127.") != std::string::npos ||
                         args.find("\"::1\"") != std::string::npos;
      if (!local) out.push_back("talks beyond this machine: " + line);
    } else if (call == "execve" || call == "execveat") {
      if (line.find("ENOENT") != std::string::npos || !std::regex_search(args, a, kPath)) continue;
      const std::string name = a[1].str().substr(a[1].str().find_last_of('/') + 1);
      if (a[1] != program && name != "sh") out.push_back("starts another program: " + line);
    } else if (call == "openat" || call == "open") {
      if (!std::regex_search(args, a, kPath)) continue;
      for (const char* device : {"/dev/nvidia", "/dev/dri", "/dev/kfd", "/dev/infiniband"}) {
        if (a[1].str().starts_with(device)) out.push_back("opens a device: " + line);
      }
    } else if (call == "mount" || call == "reboot" || call == "ptrace" || call == "unshare") {
      out.push_back("has no business with it: " + line);
    }
  }
  return out;
}

class Permission : public ToolTest {
 protected:
  std::string Trace(const std::string& command) {
    const std::string file = In("trace");
    const std::string all =
        "strace -f -qq -s 200 -o " + file +
        " -e trace=kill,tkill,tgkill,pidfd_send_signal,connect,execve,execveat,openat,open,mount,"
        "reboot,ptrace,unshare " +
        command + " >" + In("stdout") + " 2>" + In("stderr") + " </dev/null";
    status_ = std::system(all.c_str());
    return Env::Real()->ReadFile(file).value();
  }
  bool CanTrace() { return std::system("strace -qq -o /dev/null true >/dev/null 2>&1") == 0; }
  int status_ = -1;
};

TEST_F(Permission, AWholeRunStaysAtHome) {
  if (!CanTrace()) GTEST_SKIP() << "no strace here, or this kernel lets nobody trace";
  const std::string program = std::filesystem::canonical(Program()).string();
  const std::string trace = Trace(program + " demo --model mini --out " + In("demo"));
  EXPECT_EQ(status_, 0) << Env::Real()->ReadFile(In("stderr")).value().substr(0, 2000);
  // It is a whole run that was seen: several processes of the program, and a server to talk to.
  size_t programs = 0;
  for (size_t at = trace.find(program + "\""); at != std::string::npos;
       at = trace.find(program + "\"", at + 1))
    ++programs;
  EXPECT_GE(programs, 3u);
  EXPECT_NE(trace.find("connect("), std::string::npos);
  const std::vector<std::string> outside = Outside(trace, program);
  EXPECT_TRUE(outside.empty()) << outside.size() << ": " << (outside.empty() ? "" : outside[0]);
}

// The reading itself: real calls of a shell that does what it may not, and lines of each kind.
TEST_F(Permission, WhatIsNotAllowedIsSeen) {
  if (CanTrace()) {
    // A process of this test, which the traced shell never started.
    std::FILE* sleeper = ::popen("sleep 20 & echo $!", "r");
    ASSERT_NE(sleeper, nullptr);
    char pid[32] = {};
    ASSERT_NE(std::fgets(pid, sizeof pid, sleeper), nullptr);
    const std::string number(pid, std::string(pid).find('\n'));
    Write("foreign.sh", "kill " + number + "\n");
    const auto seen = Outside(Trace("sh " + In("foreign.sh")), Program());
    ASSERT_EQ(seen.size(), 1u);
    EXPECT_TRUE(seen[0].starts_with("signals a foreign process")) << seen[0];
    ::pclose(sleeper);
    Write("own.sh", "sleep 20 & sleep 0.2; kill $!; wait\n");
    // The shell's own child is its own; that it starts `sleep` is seen.
    const auto own = Outside(Trace("sh " + In("own.sh")), Program());
    EXPECT_FALSE(own.empty());
    for (const std::string& line : own)
      EXPECT_TRUE(line.starts_with("starts another program")) << line;
  }
  const std::vector<std::pair<const char*, bool>> lines = {
      {"7 kill(7, SIGTERM) = 0", true},
      {"7 kill(8, SIGTERM) = 0", false},
      {"7 kill(8, 0) = 0", true},
      {"7 kill(-1, SIGKILL) = 0", false},
      {"7 kill(0, SIGTERM) = 0", false},
      {"7 tgkill(8, 9, SIGKILL) = 0", false},
      {"7 tgkill(7, 7, SIGABRT) = 0", true},
      {R"(7 connect(3, {sa_family=AF_INET, sin_port=htons(80), sin_addr=inet_addr("127.0.0.1")}, 16) = 0)",
       true},
      {R"(7 connect(3, {sa_family=AF_INET, sin_port=htons(443), sin_addr=inet_addr("140.82.121.4")}, 16) = 0)",
       false},
      {R"(7 openat(AT_FDCWD, "/dev/nvidia0", O_RDWR) = 3)", false},
      {R"(7 openat(AT_FDCWD, "/dev/null", O_RDWR) = 3)", true},
      {R"(7 execve("/usr/bin/git", ["git", "push"], 0x7 /* 9 vars */) = 0)", false},
      {R"(7 execve("/usr/bin/docker", ["docker", "push", "x"], 0x7) = 0)", false},
      {R"(7 mount("a", "/b", "ext4", 0, NULL) = 0)", false},
  };
  for (const auto& [line, allowed] : lines)
    EXPECT_EQ(Outside(std::string(line) + "\n7 exit = 0\n", "/bin/tare").empty(), allowed) << line;
}

}  // namespace
}  // namespace tare
