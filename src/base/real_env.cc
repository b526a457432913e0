// Env::Real(): the operating system. Every call that fails names itself and the path.

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>

#include "base/env.h"
#include "base/overwrite.h"

namespace tare {
namespace {

template <typename Call>
auto RetryEintr(Call call) {
  decltype(call()) r;
  do {
    r = call();
  } while (r == -1 && errno == EINTR);
  return r;
}

class Fd {
 public:
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }
  int Release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// The first failure sticks: after a failed write or fsync the kernel may have dropped dirty pages,
// so that a later fsync that succeeds would be a lie.
class RealWritableFile : public WritableFile {
 public:
  RealWritableFile(int fd, std::string path, bool overwrites = false)
      : fd_(fd), path_(std::move(path)), overwrites_(overwrites) {}

  Status Append(std::string_view bytes) override {
    TARE_RETURN_IF_ERROR(Usable("write"));
    while (!bytes.empty()) {
      // Linux moves at most 2 GiB in one call.
      const size_t most = overwrites_ ? kEarly : size_t{1} << 30;
      const ssize_t n = RetryEintr(
          [&] { return ::write(fd_.get(), bytes.data(), std::min(bytes.size(), most)); });
      if (n < 0) return failed_ = Errno("write", path_, errno);
      if (n == 0) return failed_ = Error(Code::kIo, "write {}: no progress", path_);
      bytes.remove_prefix(static_cast<size_t>(n));
      written_ += n;
      if (!overwrites_ || written_ - begun_ < static_cast<off_t>(kEarly)) continue;
      // The disk starts on these while the next ones are copied. A wish: Sync waits for all.
      (void)::sync_file_range(fd_.get(), begun_, written_ - begun_, SYNC_FILE_RANGE_WRITE);
      begun_ = written_;
    }
    return Ok();
  }

  Status Sync() override {
    TARE_RETURN_IF_ERROR(Usable("fsync"));
    if (overwrites_ && RetryEintr([&] { return ::ftruncate(fd_.get(), written_); }) != 0) {
      return failed_ = Errno("ftruncate", path_, errno);
    }
    if (RetryEintr([&] { return ::fsync(fd_.get()); }) != 0) {
      return failed_ = Errno("fsync", path_, errno);
    }
    return Ok();
  }

  Status Close() override {
    TARE_RETURN_IF_ERROR(Usable("close"));
    // Not retried: after EINTR Linux has released the descriptor already.
    if (::close(fd_.Release()) != 0 && errno != EINTR)
      return failed_ = Errno("close", path_, errno);
    return Ok();
  }

 private:
  static constexpr size_t kEarly = 8 << 20;

  Status Usable(const char* call) const {
    TARE_RETURN_IF_ERROR(failed_);
    if (fd_.get() < 0) return Error(Code::kPrecondition, "{} {}: the file is closed", call, path_);
    return Ok();
  }

  Fd fd_;
  std::string path_;
  bool overwrites_;
  off_t written_ = 0, begun_ = 0;  // bytes appended; bytes that the disk was told of
  Status failed_;
};

class MappedFile : public ReadableFile {
 public:
  MappedFile(void* data, size_t size) : data_(data), size_(size) {}
  ~MappedFile() override { ::munmap(data_, size_); }
  std::string_view bytes() const override { return {static_cast<const char*>(data_), size_}; }

 private:
  void* data_;
  size_t size_;
};

// Pipes, devices and files of /proc have no size to map.
class BufferedFile : public ReadableFile {
 public:
  explicit BufferedFile(std::string bytes) : bytes_(std::move(bytes)) {}
  std::string_view bytes() const override { return bytes_; }

 private:
  std::string bytes_;
};

class RealFileLock : public FileLock {
 public:
  explicit RealFileLock(int fd) : fd_(fd) {}

 private:
  Fd fd_;  // closing releases the lock
};

class RealEnv : public Env {
 public:
  Result<std::unique_ptr<ReadableFile>> OpenReadable(const std::string& path) override {
    const Fd fd(RetryEintr([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC); }));
    if (fd.get() < 0) return Errno("open", path, errno);
    struct stat st = {};
    if (::fstat(fd.get(), &st) != 0) return Errno("stat", path, errno);
    if (S_ISDIR(st.st_mode)) return Error(Code::kIo, "open {}: is a directory, not a file", path);
    if (S_ISREG(st.st_mode) && st.st_size > 0) {
      const size_t size = static_cast<size_t>(st.st_size);
      void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd.get(), 0);
      if (data != MAP_FAILED) return std::unique_ptr<ReadableFile>(new MappedFile(data, size));
      if (errno != ENODEV) return Errno("mmap", path, errno);
    }
    std::string bytes;
    char buffer[1 << 16];
    while (true) {
      const ssize_t n = RetryEintr([&] { return ::read(fd.get(), buffer, sizeof(buffer)); });
      if (n < 0) return Errno("read", path, errno);
      if (n == 0) break;
      bytes.append(buffer, static_cast<size_t>(n));
    }
    return std::unique_ptr<ReadableFile>(new BufferedFile(std::move(bytes)));
  }

  Result<std::unique_ptr<WritableFile>> OpenWritable(const std::string& path, Mode mode) override {
    const int flags = O_WRONLY | O_CREAT | O_CLOEXEC |
                      (mode == Mode::kTruncate ? O_TRUNC
                       : mode == Mode::kAppend ? O_APPEND
                                               : O_EXCL);
    const int fd = RetryEintr([&] { return ::open(path.c_str(), flags, 0666); });
    if (fd < 0) return Errno("open for writing", path, errno);
    return std::unique_ptr<WritableFile>(new RealWritableFile(fd, path));
  }

  Status Rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) return Errno("rename", from + " to " + to, errno);
    return Ok();
  }

  Status Remove(const std::string& path) override {
    if (::remove(path.c_str()) != 0) return Errno("remove", path, errno);
    return Ok();
  }

  Status CreateDir(const std::string& path) override {
    if (::mkdir(path.c_str(), 0777) != 0) return Errno("mkdir", path, errno);
    return Ok();
  }

  Status SyncDir(const std::string& path) override {
    const Fd fd(
        RetryEintr([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); }));
    if (fd.get() < 0) return Errno("open directory", path, errno);
    if (RetryEintr([&] { return ::fsync(fd.get()); }) != 0) return Errno("fsync", path, errno);
    return Ok();
  }

  Status Truncate(const std::string& path, uint64_t size_bytes) override {
    if (RetryEintr([&] { return ::truncate(path.c_str(), static_cast<off_t>(size_bytes)); }) != 0) {
      return Errno("truncate", path, errno);
    }
    return Ok();
  }

  Result<FileInfo> Stat(const std::string& path) override {
    struct stat st = {};
    if (::lstat(path.c_str(), &st) != 0) return Errno("stat", path, errno);
    FileInfo info;
    info.kind = S_ISREG(st.st_mode)   ? FileInfo::Kind::kFile
                : S_ISDIR(st.st_mode) ? FileInfo::Kind::kDirectory
                : S_ISLNK(st.st_mode) ? FileInfo::Kind::kSymlink
                                      : FileInfo::Kind::kOther;
    info.size_bytes = static_cast<uint64_t>(st.st_size);
    info.modified_ns = int64_t{st.st_mtim.tv_sec} * 1000000000 + st.st_mtim.tv_nsec;
    info.device = st.st_dev;
    info.inode = st.st_ino;
    info.mode = st.st_mode & 07777;
    return info;
  }

  Result<std::vector<std::string>> List(const std::string& dir) override {
    std::unique_ptr<DIR, int (*)(DIR*)> d(::opendir(dir.c_str()), ::closedir);
    if (d == nullptr) return Errno("opendir", dir, errno);
    std::vector<std::string> names;
    while (true) {
      errno = 0;
      const dirent* entry = ::readdir(d.get());
      if (entry == nullptr) {
        if (errno != 0) return Errno("readdir", dir, errno);
        break;
      }
      const std::string_view name = entry->d_name;
      if (name != "." && name != "..") names.emplace_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  Result<std::unique_ptr<FileLock>> Lock(const std::string& path) override {
    // Whoever held the lock may have removed the file: the lock counts only while the name still
    // leads to the file that is locked.
    for (int attempt = 0; attempt < 100; ++attempt) {
      Fd fd(RetryEintr(
          [&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666); }));
      if (fd.get() < 0) return Errno("open lock", path, errno);
      if (RetryEintr([&] { return ::flock(fd.get(), LOCK_EX | LOCK_NB); }) != 0) {
        if (errno != EWOULDBLOCK) return Errno("flock", path, errno);
        return Error(Code::kPrecondition, "lock {} is held by another writer", path);
      }
      struct stat held = {};
      struct stat named = {};
      if (::fstat(fd.get(), &held) != 0) return Errno("stat", path, errno);
      if (::stat(path.c_str(), &named) == 0 && held.st_dev == named.st_dev &&
          held.st_ino == named.st_ino) {
        return std::unique_ptr<FileLock>(new RealFileLock(fd.Release()));
      }
    }
    return Error(Code::kPrecondition, "lock {} is removed again and again by others", path);
  }

  int64_t NowNs() override { return Clock(CLOCK_REALTIME); }
  int64_t MonotonicNs() override { return Clock(CLOCK_MONOTONIC); }

 private:
  static int64_t Clock(clockid_t id) {
    timespec ts = {};
    ::clock_gettime(id, &ts);
    return int64_t{ts.tv_sec} * 1000000000 + ts.tv_nsec;
  }
};

}  // namespace

Result<std::unique_ptr<WritableFile>> OpenToOverwrite(const std::string& path) {
  Fd fd(RetryEintr([&] { return ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW); }));
  if (fd.get() < 0) return Errno("open to overwrite", path, errno);
  struct stat st = {};
  if (::fstat(fd.get(), &st) != 0) return Errno("stat", path, errno);
  if (!S_ISREG(st.st_mode) || st.st_nlink != 1) {
    return Error(Code::kPrecondition, "overwrite {}: not a regular file with one name", path);
  }
  return std::unique_ptr<WritableFile>(
      new RealWritableFile(fd.Release(), path, /*overwrites=*/true));
}

Env* Env::Real() {
  static auto* env = new RealEnv();
  return env;
}

}  // namespace tare
