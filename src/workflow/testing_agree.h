#pragma once

// Shared by the tests that ask both verifiers, `tare verify` and tools/verify_min.py, about the
// same task directories and expect the same exit status of each.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "base/fault_env.h"
#include "base/sha256.h"
#include "workflow/testing.h"
#include "workflow/verify.h"

namespace tare::workflow {

inline std::string ReadAll(FILE* pipe) {
  std::string out;
  char buffer[4096];
  while (size_t n = std::fread(buffer, 1, sizeof(buffer), pipe)) out.append(buffer, n);
  ::pclose(pipe);
  return out;
}

inline std::string RunTool(const std::string& command) {
  return ReadAll(::popen(command.c_str(), "r"));
}

inline std::string PythonCommand(const std::string& arguments) {
  return "python3 " TARE_SOURCE_DIR "/tests/ledger_agree.py " TARE_SOURCE_DIR
         "/tools/verify_min.py " +
         arguments;
}

// The exit status of `tare verify` as a digit; a directory without a readable log is a failure.
inline char OwnStatus(Env* env, const std::string& dir) {
  VerifyOptions options;
  options.threads = 1;
  auto report = VerifyTask(env, dir, options);
  return static_cast<char>('0' + (report.ok() ? ExitCode(report->verdict) : 1));
}

// Task directories put aside for the second verifier, which reads them all in one process.
class SecondVerifier {
 public:
  // What a restart finds in directory `t` of `env`. States with the same files are kept once.
  void Add(FaultEnv* env, const std::string& name) {
    Sha256 hash;
    auto tree = ListTree(env, "t");
    if (tree.ok()) {
      for (const TreeEntry& e : *tree) {
        hash.Update(e.path + '\0');
        if (auto bytes = env->ReadFile("t/" + e.path); bytes.ok()) hash.Update(*bytes + '\0');
      }
    }
    if (!seen_.insert(Hex(hash.Finish())).second) return;
    const std::string at = dir_ / std::to_string(names_.size());
    ASSERT_TRUE(Env::Real()->CreateDir(at).ok());
    ASSERT_TRUE(env->ExportTo(Env::Real(), at).ok());
    names_.push_back(name);
    ours_ += OwnStatus(env, "t");
  }
  // Runs the second verifier over all and expects the same status of each.
  void Check() {
    std::string theirs;
    for (size_t i = 0; i < names_.size();) {
      std::string command = "dirs";
      for (size_t n = 0; n < 500 && i < names_.size(); ++n, ++i) {
        command += " " + dir_ / (std::to_string(i) + "/t");
      }
      theirs += RunTool(PythonCommand(command + " 2>/dev/null"));
    }
    ASSERT_EQ(theirs.size(), ours_.size());
    for (size_t i = 0; i < names_.size(); ++i) {
      EXPECT_EQ(theirs[i], ours_[i]) << names_[i];
    }
    std::printf("%zu states, both verifiers agree on each: %zu pass, %zu fail, %zu torn\n",
                names_.size(), Count('0'), Count('1'), Count('2'));
  }
  size_t Count(char status) const {
    return static_cast<size_t>(std::count(ours_.begin(), ours_.end(), status));
  }

 private:
  TempDir dir_;
  std::set<std::string> seen_;
  std::vector<std::string> names_;
  std::string ours_;
};

}  // namespace tare::workflow
