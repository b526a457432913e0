#pragma once

// Env: files, directories, locks and time behind an interface, so that a test can make any of them
// fail. `Env::Real()` is the operating system; `FaultEnv` (base/fault_env.h) is the test twin with
// short writes, lost fsyncs, a full disk and torn renames.
//
// Paths are bytes. Nothing here follows a policy about where a caller may write: that is the
// caller's. Errors are kIo, kNotFound, kAlreadyExists or kExhausted (disk full) with call and path.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tare {

// An open file for appending or writing from the start. Destruction closes without sync.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  virtual Status Append(std::string_view bytes) = 0;
  // Data and metadata are on the device when this returns ok.
  virtual Status Sync() = 0;
  virtual Status Close() = 0;
};

// A read-only view of a whole file. Memory-mapped by the real Env: `bytes()` costs no copy. The
// pages stay valid while this object lives, even when the name is unlinked or replaced; a file
// that another process truncates is outside what a mapping can promise.
class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  virtual std::string_view bytes() const = 0;
};

// Held until destroyed. Two holders never exist at once, also across processes (flock).
class FileLock {
 public:
  virtual ~FileLock() = default;
};

struct FileInfo {
  enum class Kind { kFile, kDirectory, kSymlink, kOther };
  Kind kind = Kind::kOther;
  uint64_t size_bytes = 0;
  int64_t modified_ns = 0;  // since the epoch
  uint64_t device = 0;
  uint64_t inode = 0;
  uint32_t mode = 0;  // permission bits
};

class Env {
 public:
  virtual ~Env() = default;
  static Env* Real();

  virtual Result<std::unique_ptr<ReadableFile>> OpenReadable(const std::string& path) = 0;
  // kTruncate creates or empties, kAppend creates or goes to the end, kExclusive fails if it
  // exists.
  enum class Mode { kTruncate, kAppend, kExclusive };
  virtual Result<std::unique_ptr<WritableFile>> OpenWritable(const std::string& path,
                                                             Mode mode) = 0;
  virtual Status Rename(const std::string& from, const std::string& to) = 0;
  virtual Status Remove(const std::string& path) = 0;     // a file or an empty directory
  virtual Status CreateDir(const std::string& path) = 0;  // one level; kAlreadyExists if there
  virtual Status SyncDir(const std::string& path) = 0;    // names in it are on the device
  virtual Status Truncate(const std::string& path, uint64_t size_bytes) = 0;
  virtual Result<FileInfo> Stat(const std::string& path) = 0;  // does not follow a final symlink
  virtual Result<std::vector<std::string>> List(const std::string& dir) = 0;  // names, sorted
  // kPrecondition when someone else holds it.
  virtual Result<std::unique_ptr<FileLock>> Lock(const std::string& path) = 0;

  virtual int64_t NowNs() = 0;        // wall clock, since the epoch
  virtual int64_t MonotonicNs() = 0;  // never goes back

  // Built on the calls above.
  Result<std::string> ReadFile(const std::string& path);
  // Writes beside `path`, syncs, renames over it, syncs the directory: after a crash the old or the
  // new content is there, whole.
  Status WriteFileAtomic(const std::string& path, std::string_view bytes);
  // The same with the bytes written by `write`, piece by piece.
  Status WriteFileAtomic(const std::string& path,
                         const std::function<Status(WritableFile*)>& write);
  Status CreateDirs(const std::string& path);
  bool Exists(const std::string& path);
};

// RFC 3339 in UTC with nine decimals: "2026-11-29T15:45:38.000000001Z".
std::string FormatUtc(int64_t ns_since_epoch);

}  // namespace tare
