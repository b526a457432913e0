// The main() of every test binary: goes to the build tree first, so that the relative
// TARE_SOURCE_DIR and TARE_BINARY_DIR hold however the binary was started. (Relative, because a
// compiler cache then serves every checkout.)

#include <gmock/gmock.h>

#include <cstdio>
#include <filesystem>

int main(int argc, char** argv) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) std::filesystem::current_path(self.parent_path().parent_path(), error);
  if (error) {
    std::fprintf(stderr, "cannot go to the build tree: %s\n", error.message().c_str());
    return 74;
  }
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
