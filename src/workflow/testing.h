#pragma once

// Shared by the tests of this room: a temporary directory, an Env without fsync (tests of logic
// need none), and one with a settable clock.

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"

namespace tare::workflow {

class TempDir {
 public:
  TempDir() {
    std::string pattern = ::testing::TempDir() + "tare-ledger-XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempDir() {
    std::error_code error;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path_, error)) {
      if (entry.is_directory(error) && !entry.is_symlink(error)) {
        std::filesystem::permissions(entry.path(), std::filesystem::perms::owner_all, error);
      }
    }
    std::filesystem::remove_all(path_, error);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// Forwards to the real Env; sync is counted instead of done, and the clock can be set.
class TestEnv : public Env {
 public:
  Result<std::unique_ptr<ReadableFile>> OpenReadable(const std::string& path) override {
    if (path == unreadable) return Error(Code::kIo, "open {}: Permission denied", path);
    return Env::Real()->OpenReadable(path);
  }
  Result<std::unique_ptr<WritableFile>> OpenWritable(const std::string& path, Mode mode) override {
    TARE_ASSIGN_OR_RETURN(auto file, Env::Real()->OpenWritable(path, mode));
    return std::unique_ptr<WritableFile>(new File(this, std::move(file)));
  }
  Status Rename(const std::string& from, const std::string& to) override {
    return Env::Real()->Rename(from, to);
  }
  Status Remove(const std::string& path) override { return Env::Real()->Remove(path); }
  Status CreateDir(const std::string& path) override { return Env::Real()->CreateDir(path); }
  Status SyncDir(const std::string&) override {
    ++syncs;
    return Ok();
  }
  Status Truncate(const std::string& path, uint64_t size_bytes) override {
    return Env::Real()->Truncate(path, size_bytes);
  }
  Result<FileInfo> Stat(const std::string& path) override { return Env::Real()->Stat(path); }
  Result<std::vector<std::string>> List(const std::string& dir) override {
    return Env::Real()->List(dir);
  }
  Result<std::unique_ptr<FileLock>> Lock(const std::string& path) override {
    return Env::Real()->Lock(path);
  }
  int64_t NowNs() override {
    if (now_ns == 0) return Env::Real()->NowNs();
    now_ns += step_ns;
    return now_ns;
  }
  int64_t MonotonicNs() override { return Env::Real()->MonotonicNs(); }

  int64_t now_ns = 0;  // 0: the real clock
  int64_t step_ns = 1000;
  int64_t syncs = 0;
  std::string unreadable;  // opening this path fails, as root cannot be made to fail
  Status next_append;      // the next append to any file fails with this

 private:
  class File : public WritableFile {
   public:
    File(TestEnv* env, std::unique_ptr<WritableFile> file) : env_(env), file_(std::move(file)) {}
    Status Append(std::string_view bytes) override {
      if (!env_->next_append.ok()) {
        // As a full disk does: half of the bytes arrive.
        TARE_RETURN_IF_ERROR(file_->Append(bytes.substr(0, bytes.size() / 2)));
        return std::exchange(env_->next_append, Ok());
      }
      return file_->Append(bytes);
    }
    Status Sync() override {
      ++env_->syncs;
      return Ok();
    }
    Status Close() override { return file_->Close(); }

   private:
    TestEnv* env_;
    std::unique_ptr<WritableFile> file_;
  };
};

}  // namespace tare::workflow
