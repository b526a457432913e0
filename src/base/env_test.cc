#include "base/env.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "base/overwrite.h"

namespace tare {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RealEnvTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "env_test_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    dir_ = pattern;
  }
  void TearDown() override { RemoveAll(dir_); }
  void RemoveAll(const std::string& path) {
    auto info = env_->Stat(path);
    if (!info.ok()) return;
    if (info->kind == FileInfo::Kind::kDirectory) {
      for (const auto& name : env_->List(path).value()) RemoveAll(path + "/" + name);
    }
    EXPECT_TRUE(env_->Remove(path).ok());
  }
  std::string At(const std::string& name) const { return dir_ + "/" + name; }

  Env* env_ = Env::Real();
  std::string dir_;
};

// Over a file that was longer, in pieces larger than those that the disk is told of early, the end
// is cut; what has another name, or is no regular file, is left alone.
TEST_F(RealEnvTest, OverwritesOneFileOnly) {
  const std::string old((20 << 20) + 77, 'o');
  std::string text((17 << 20) + 5, ' ');
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<char>('a' + i % 23);
  ASSERT_TRUE(env_->WriteFileAtomic(At("f"), old).ok());
  const uint64_t inode = env_->Stat(At("f"))->inode;
  {
    auto file = OpenToOverwrite(At("f"));
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    EXPECT_TRUE((*file)->Append(std::string_view(text).substr(0, 3)).ok());
    EXPECT_TRUE((*file)->Append(std::string_view(text).substr(3)).ok());
    EXPECT_TRUE((*file)->Sync().ok());
    EXPECT_TRUE((*file)->Close().ok());
    EXPECT_EQ((*file)->Append("x").code(), Code::kPrecondition);
  }
  EXPECT_TRUE(*env_->ReadFile(At("f")) == text);
  EXPECT_EQ(env_->Stat(At("f"))->inode, inode);
  ASSERT_EQ(::link(At("f").c_str(), At("g").c_str()), 0);
  EXPECT_EQ(OpenToOverwrite(At("f")).status().code(), Code::kPrecondition);
  ASSERT_EQ(::symlink(At("f").c_str(), At("s").c_str()), 0);
  EXPECT_FALSE(OpenToOverwrite(At("s")).ok());
  EXPECT_FALSE(OpenToOverwrite(dir_).ok());
  EXPECT_EQ(OpenToOverwrite(At("absent")).status().code(), Code::kNotFound);
  EXPECT_TRUE(*env_->ReadFile(At("g")) == text);
}

// Bytes come back as written, through append, truncate and exclusive modes.
TEST_F(RealEnvTest, WritesAndReads) {
  auto file = env_->OpenWritable(At("a"), Env::Mode::kExclusive);
  ASSERT_TRUE(file.ok());
  EXPECT_TRUE((*file)->Append("hello ").ok());
  EXPECT_TRUE((*file)->Append(std::string_view("w\0rld", 5)).ok());
  EXPECT_TRUE((*file)->Sync().ok());
  EXPECT_TRUE((*file)->Close().ok());
  EXPECT_EQ((*file)->Append("x").code(), Code::kPrecondition);
  EXPECT_EQ(env_->ReadFile(At("a")).value(), std::string("hello w\0rld", 11));
  EXPECT_EQ(env_->OpenWritable(At("a"), Env::Mode::kExclusive).status().code(),
            Code::kAlreadyExists);
  {
    auto append = env_->OpenWritable(At("a"), Env::Mode::kAppend).value();
    EXPECT_TRUE(append->Append("!").ok());
  }
  EXPECT_EQ(env_->ReadFile(At("a"))->size(), 12u);
  EXPECT_TRUE(env_->Truncate(At("a"), 5).ok());
  EXPECT_EQ(env_->ReadFile(At("a")).value(), "hello");
  { auto empty = env_->OpenWritable(At("a"), Env::Mode::kTruncate).value(); }
  EXPECT_EQ(env_->ReadFile(At("a")).value(), "");
}

// A mapped file keeps its bytes when its name is replaced.
TEST_F(RealEnvTest, MappingOutlivesTheName) {
  ASSERT_TRUE(env_->WriteFileAtomic(At("m"), "first").ok());
  auto file = env_->OpenReadable(At("m")).value();
  ASSERT_TRUE(env_->WriteFileAtomic(At("m"), "second").ok());
  EXPECT_EQ(file->bytes(), "first");
  EXPECT_EQ(env_->ReadFile(At("m")).value(), "second");
  EXPECT_THAT(env_->List(dir_).value(), ElementsAre("m"));  // no temporary is left
}

// Errors carry the call, the path and the right code.
TEST_F(RealEnvTest, Errors) {
  const auto missing = env_->OpenReadable(At("no"));
  EXPECT_EQ(missing.status().code(), Code::kNotFound);
  EXPECT_THAT(missing.status().message(), HasSubstr(At("no")));
  EXPECT_EQ(env_->OpenReadable(dir_).status().code(), Code::kIo);
  EXPECT_EQ(env_->CreateDir(dir_).code(), Code::kAlreadyExists);
  EXPECT_EQ(env_->Stat(At("no")).status().code(), Code::kNotFound);
  EXPECT_EQ(env_->Remove(At("no")).code(), Code::kNotFound);
  EXPECT_FALSE(env_->WriteFileAtomic(At("no/file"), "x").ok());
  // A full device is kExhausted.
  if (::access("/dev/full", W_OK) == 0) {
    auto full = env_->OpenWritable("/dev/full", Env::Mode::kAppend).value();
    EXPECT_EQ(full->Append("x").code(), Code::kExhausted);
    EXPECT_EQ(full->Sync().code(), Code::kExhausted) << "the first failure sticks";
  }
}

TEST_F(RealEnvTest, Directories) {
  EXPECT_TRUE(env_->CreateDirs(At("x/y//z/")).ok());
  EXPECT_TRUE(env_->CreateDirs(At("x/y/z")).ok());
  EXPECT_EQ(env_->Stat(At("x/y/z"))->kind, FileInfo::Kind::kDirectory);
  ASSERT_TRUE(env_->WriteFileAtomic(At("x/f"), "1").ok());
  EXPECT_EQ(env_->CreateDirs(At("x/f/g")).code(), Code::kAlreadyExists);
  EXPECT_THAT(env_->List(At("x")).value(), ElementsAre("f", "y"));
  EXPECT_TRUE(env_->SyncDir(At("x")).ok());
  ASSERT_EQ(::symlink("f", At("x/link").c_str()), 0);
  EXPECT_EQ(env_->Stat(At("x/link"))->kind, FileInfo::Kind::kSymlink);
  EXPECT_TRUE(env_->Rename(At("x/f"), At("x/h")).ok());
  EXPECT_FALSE(env_->Exists(At("x/f")));
}

// Two holders never exist at once, in one process or in two; a dead holder frees the lock.
TEST_F(RealEnvTest, LockExcludes) {
  auto lock = env_->Lock(At("lock"));
  ASSERT_TRUE(lock.ok());
  EXPECT_EQ(env_->Lock(At("lock")).status().code(), Code::kPrecondition);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(env_->Lock(At("lock")).ok() ? 1 : 0);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  lock->reset();
  EXPECT_TRUE(env_->Lock(At("lock")).ok());
}

TEST_F(RealEnvTest, Clocks) {
  EXPECT_GT(env_->NowNs(), int64_t{1700000000} * 1000000000);
  const int64_t before = env_->MonotonicNs();
  EXPECT_GE(env_->MonotonicNs(), before);
}

TEST(FormatUtc, KnownTimes) {
  EXPECT_EQ(FormatUtc(0), "1970-01-01T00:00:00.000000000Z");
  EXPECT_EQ(FormatUtc(-1), "1969-12-31T23:59:59.999999999Z");
  EXPECT_EQ(FormatUtc(int64_t{951827696} * 1000000000 + 7), "2000-02-29T12:34:56.000000007Z");
  EXPECT_EQ(FormatUtc(int64_t{1795967138} * 1000000000 + 1), "2026-11-29T15:45:38.000000001Z");
}

}  // namespace
}  // namespace tare
