#pragma once

// Test support: the same test binary started anew, to compare what it computes with what this
// process did.

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/sha256.h"
#include "tensor/tensor.h"

namespace tare::ops::cuda {

inline constexpr const char* kPrintDigest = "TARE_PRINT_DIGEST";

// The bytes of tensors (on the CPU), as one digest.
class Digest {
 public:
  void Add(const Tensor& t) {
    if (t.data() != nullptr) sha_.Update(t.data(), static_cast<size_t>(t.size_bytes()));
  }
  std::string Finish() { return Hex(sha_.Finish()); }

 private:
  Sha256 sha_;
};

// Called by a test with the digest of what it computed. In a started process: prints it. Else
// starts this binary `processes` times with that test alone and expects the same digest from each.
inline void ExpectSameInFreshProcesses(const std::string& test, const std::string& digest,
                                       int processes = 3) {
  if (std::getenv(kPrintDigest) != nullptr) {
    std::printf("digest %s\n", digest.c_str());
    return;
  }
  for (int i = 0; i < processes; ++i) {
    const std::string command =
        std::string(kPrintDigest) + "=1 \"$(readlink /proc/$PPID/exe)\" --gtest_filter=" + test;
    std::FILE* pipe = popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    std::string output;
    std::array<char, 4096> buffer;
    while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) output += buffer.data();
    EXPECT_EQ(pclose(pipe), 0) << output;
    EXPECT_NE(output.find("digest " + digest + "\n"), std::string::npos)
        << "process " << i << " printed other bits than " << digest << ":\n"
        << output;
  }
}

}  // namespace tare::ops::cuda
