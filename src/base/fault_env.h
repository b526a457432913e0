#pragma once

// FaultEnv: a file system in memory that can fail and crash on purpose. Test code only;
// deterministic.
//
// What it holds it holds twice: as running programs see it, and as the device has it. An operation
// goes to the device when it is synced: bytes and sizes of a file by WritableFile::Sync, names in a
// directory (create, rename, remove, mkdir) by SyncDir of it, and by nothing else. `Crash` gives
// the file system that a restart may find: all synced operations, and of the unsynced ones whatever
// subset the test chooses, applied in order; a write may be kept in part, and leaves zeros where an
// earlier one was dropped. So a rename that outlives the bytes of its file gives an empty file, as
// it does on a real disk.
//
// Every call that changes something is a step, counted from 0. Faults are set by step or by size.

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/env.h"

namespace tare {

class FaultEnv : public Env {
 public:
  FaultEnv() = default;

  // An operation that a crash may drop.
  struct Pending {
    enum class Kind { kWrite, kTruncate, kLink, kUnlink, kMakeDir, kRename };
    Kind kind = Kind::kWrite;
    int64_t step = 0;
    std::string path;   // where it was called; for kRename the old name
    std::string to;     // kRename
    std::string bytes;  // kWrite
    uint64_t at = 0;    // kWrite: offset; kTruncate: new size
    int file = -1;      // identity of the file, stable over renames
  };
  // How much of an unsynced operation survives: a write that many bytes of its front, any other
  // operation if not 0.
  using Survives = std::function<size_t(const Pending&)>;
  static constexpr size_t kAll = std::numeric_limits<size_t>::max();

  // --- Faults ---
  // The step fails with `error` and does nothing; later ones work.
  void FailStep(int64_t step, Status error);
  // The step, if it is an Append, writes only `bytes` bytes, then fails with kIo.
  void ShortWriteAt(int64_t step, size_t bytes);
  // Files hold at most `bytes` together: the Append that goes past writes what fits and fails with
  // kExhausted, as ENOSPC does.
  void SetDiskBytes(uint64_t bytes);
  // Sync and SyncDir answer ok and sync nothing: a disk that lies.
  void LoseSyncs(bool lose);
  // Rename is three operations for a crash (remove the target, link it, remove the source), as on a
  // file system without atomic rename. Files only.
  void TearRenames(bool tear);
  // From this step on every call that changes something fails with kAborted: the process is dead.
  void CrashAtStep(int64_t step);

  // --- After the run ---
  int64_t steps() const;
  std::vector<Pending> pending() const;
  // The file system after a restart, without faults, locks or open files. This one stays as it is.
  std::unique_ptr<FaultEnv> Crash(const Survives& survives) const;
  std::unique_ptr<FaultEnv> CrashLosingAll() const;
  std::unique_ptr<FaultEnv> CrashKeepingAll() const;
  // Writes everything that running programs see below `dir` of another Env.
  Status ExportTo(Env* env, const std::string& dir) const;

  // --- Time: starts at 2026-01-01T00:00:00Z; each question moves it by a microsecond. ---
  void SetNow(int64_t ns);

  Result<std::unique_ptr<ReadableFile>> OpenReadable(const std::string& path) override;
  Result<std::unique_ptr<WritableFile>> OpenWritable(const std::string& path, Mode mode) override;
  Status Rename(const std::string& from, const std::string& to) override;
  Status Remove(const std::string& path) override;
  Status CreateDir(const std::string& path) override;
  Status SyncDir(const std::string& path) override;
  Status Truncate(const std::string& path, uint64_t size_bytes) override;
  Result<FileInfo> Stat(const std::string& path) override;
  Result<std::vector<std::string>> List(const std::string& dir) override;
  Result<std::unique_ptr<FileLock>> Lock(const std::string& path) override;
  int64_t NowNs() override;
  int64_t MonotonicNs() override;

 private:
  class File;
  class Held;
  // Paths to files; directories are paths with file -1. "" is the root, always there.
  struct Tree {
    std::map<std::string, int> names;
    std::map<int, std::string> data;
    void Apply(const Pending& op, size_t survives);
    bool IsDir(const std::string& path) const;
  };

  Status Step(const char* call, const std::string& path, size_t* allowed_bytes = nullptr);
  Status WriteTo(int file, const std::string& path, std::string_view bytes);
  Status SyncFile(int file, const std::string& path);
  void Record(Pending op);
  Status ParentExists(const char* call, const std::string& path) const;

  mutable std::mutex mutex_;
  Tree live_;
  Tree durable_;
  std::vector<Pending> pending_;
  // Shared with locks, which may outlive this object.
  std::shared_ptr<std::set<std::string>> locks_ = std::make_shared<std::set<std::string>>();
  int next_file_ = 0;
  int64_t steps_ = 0;
  int64_t now_ns_ = int64_t{1767225600} * 1000000000;

  std::map<int64_t, Status> fail_;
  std::map<int64_t, size_t> short_write_;
  uint64_t disk_bytes_ = std::numeric_limits<uint64_t>::max();
  bool lose_syncs_ = false;
  bool tear_renames_ = false;
  int64_t crash_at_ = std::numeric_limits<int64_t>::max();
};

// Runs `work` once for every step that it has, crashing there, and calls `check` on what restarts
// may find: nothing unsynced kept, all kept, each single operation lost, and `random_subsets` drawn
// ones with torn writes. `prepare` sets faults or files up before `work`; may be null. Returns the
// number of restarts that were checked.
int64_t ExploreCrashes(const std::function<void(FaultEnv*)>& prepare,
                       const std::function<void(FaultEnv*)>& work,
                       const std::function<void(FaultEnv*)>& check, int random_subsets = 8);

}  // namespace tare
