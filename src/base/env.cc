#include "base/env.h"

#include <atomic>
#include <chrono>

namespace tare {
namespace {

std::string ParentOf(const std::string& path) {
  const size_t slash = path.find_last_of('/');
  if (slash == std::string::npos) return ".";
  if (slash == 0) return "/";
  return path.substr(0, slash);
}

}  // namespace

Result<std::string> Env::ReadFile(const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const auto file, OpenReadable(path));
  return std::string(file->bytes());
}

Status Env::WriteFileAtomic(const std::string& path, std::string_view bytes) {
  return WriteFileAtomic(path, [&](WritableFile* file) { return file->Append(bytes); });
}

Status Env::WriteFileAtomic(const std::string& path,
                            const std::function<Status(WritableFile*)>& write) {
  // A name that no other writer of this process uses; kExclusive guards against other processes,
  // and a name left behind by a crash is stepped over.
  static std::atomic<uint64_t> serial{0};
  std::unique_ptr<WritableFile> file;
  std::string temporary;
  for (int attempt = 0; file == nullptr; ++attempt) {
    temporary = fmt::format("{}.tmp-{}", path, serial.fetch_add(1));
    auto opened = OpenWritable(temporary, Mode::kExclusive);
    if (opened.ok()) {
      file = std::move(*opened);
    } else if (opened.status().code() != Code::kAlreadyExists || attempt == 1000) {
      return opened.status();
    }
  }
  const auto finish = [&]() -> Status {
    TARE_RETURN_IF_ERROR(write(file.get()));
    TARE_RETURN_IF_ERROR(file->Sync());
    TARE_RETURN_IF_ERROR(file->Close());
    return Rename(temporary, path);
  };
  if (Status status = finish(); !status.ok()) {
    file.reset();
    (void)Remove(temporary);  // best effort; the first error is the one to report
    return status;
  }
  return SyncDir(ParentOf(path));
}

Status Env::CreateDirs(const std::string& path) {
  if (path.empty()) return InvalidArgument("CreateDirs: the path is empty");
  for (size_t at = 0; at != std::string::npos;) {
    at = path.find('/', at + 1);
    const std::string prefix = path.substr(0, at);
    if (prefix.empty() || prefix.back() == '/') continue;
    // Asked first, so that an existing parent needs no write permission.
    if (auto info = Stat(prefix); info.ok()) {
      if (info->kind == FileInfo::Kind::kDirectory || info->kind == FileInfo::Kind::kSymlink)
        continue;
      return Error(Code::kAlreadyExists, "CreateDirs {}: {} is not a directory", path, prefix);
    }
    if (Status status = CreateDir(prefix); !status.ok()) {
      if (status.code() == Code::kAlreadyExists) continue;  // another process was faster
      return status;
    }
    TARE_RETURN_IF_ERROR(SyncDir(ParentOf(prefix)));
  }
  return Ok();
}

bool Env::Exists(const std::string& path) { return Stat(path).ok(); }

std::string FormatUtc(int64_t ns_since_epoch) {
  using std::chrono::nanoseconds;
  const std::chrono::sys_time<nanoseconds> t{nanoseconds(ns_since_epoch)};
  const auto day = std::chrono::floor<std::chrono::days>(t);
  const std::chrono::year_month_day date(day);
  const std::chrono::hh_mm_ss<nanoseconds> time(t - day);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:09}Z", static_cast<int>(date.year()),
                     static_cast<unsigned>(date.month()), static_cast<unsigned>(date.day()),
                     time.hours().count(), time.minutes().count(), time.seconds().count(),
                     time.subseconds().count());
}

}  // namespace tare
