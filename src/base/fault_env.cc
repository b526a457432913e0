#include "base/fault_env.h"

#include <algorithm>

namespace tare {
namespace {

// One spelling for a path: no doubled or trailing slashes, no "." parts. The root is "".
std::string Clean(const std::string& path) {
  std::string out;
  for (size_t at = 0; at < path.size();) {
    const size_t end = std::min(path.find('/', at), path.size());
    const std::string part = path.substr(at, end - at);
    if (!part.empty() && part != ".") out += "/" + part;
    at = end + 1;
  }
  return out;
}

std::string ParentOf(const std::string& clean) { return clean.substr(0, clean.rfind('/')); }

bool IsBelow(const std::string& path, const std::string& dir) {
  return path.size() > dir.size() && path.compare(0, dir.size(), dir) == 0 &&
         path[dir.size()] == '/';
}

Status NotFound(const char* call, const std::string& path) {
  return Error(Code::kNotFound, "{} {}: No such file or directory", call, path);
}

class Snapshot : public ReadableFile {
 public:
  explicit Snapshot(std::string bytes) : bytes_(std::move(bytes)) {}
  std::string_view bytes() const override { return bytes_; }

 private:
  std::string bytes_;
};

}  // namespace

class FaultEnv::File : public WritableFile {
 public:
  File(FaultEnv* env, int file, std::string path)
      : env_(env), file_(file), path_(std::move(path)) {}
  Status Append(std::string_view bytes) override {
    TARE_RETURN_IF_ERROR(Usable());
    return failed_ = env_->WriteTo(file_, path_, bytes);
  }
  Status Sync() override {
    TARE_RETURN_IF_ERROR(Usable());
    return failed_ = env_->SyncFile(file_, path_);
  }
  Status Close() override {
    TARE_RETURN_IF_ERROR(Usable());
    closed_ = true;
    return Ok();
  }

 private:
  Status Usable() const {
    TARE_RETURN_IF_ERROR(failed_);
    if (closed_) return Error(Code::kPrecondition, "{}: the file is closed", path_);
    return Ok();
  }

  FaultEnv* env_;
  int file_;
  std::string path_;
  bool closed_ = false;
  Status failed_;
};

class FaultEnv::Held : public FileLock {
 public:
  Held(std::shared_ptr<std::set<std::string>> locks, std::string path)
      : locks_(std::move(locks)), path_(std::move(path)) {}
  ~Held() override { locks_->erase(path_); }

 private:
  std::shared_ptr<std::set<std::string>> locks_;
  std::string path_;
};

bool FaultEnv::Tree::IsDir(const std::string& path) const {
  if (path.empty()) return true;
  const auto it = names.find(path);
  return it != names.end() && it->second < 0;
}

void FaultEnv::Tree::Apply(const Pending& op, size_t survives) {
  if (survives == 0) return;
  switch (op.kind) {
    case Pending::Kind::kWrite: {
      std::string& bytes = data[op.file];
      const size_t n = std::min(survives, op.bytes.size());
      if (bytes.size() < op.at + n) bytes.resize(op.at + n, '\0');
      bytes.replace(op.at, n, op.bytes, 0, n);
      return;
    }
    case Pending::Kind::kTruncate:
      data[op.file].resize(op.at, '\0');
      return;
    case Pending::Kind::kLink:
      names[op.path] = op.file;
      data[op.file];
      return;
    case Pending::Kind::kUnlink:
      names.erase(op.path);
      return;
    case Pending::Kind::kMakeDir:
      names[op.path] = -1;
      return;
    case Pending::Kind::kRename: {
      const auto it = names.find(op.path);
      // Its creation was dropped: the rename brings the file that the program meant.
      const int file = it == names.end() ? op.file : it->second;
      if (it != names.end()) names.erase(it);
      names[op.to] = file;
      if (file >= 0) {
        data[file];
        return;
      }
      std::map<std::string, int> moved;
      for (auto n = names.begin(); n != names.end();) {
        if (IsBelow(n->first, op.path)) {
          moved[op.to + n->first.substr(op.path.size())] = n->second;
          n = names.erase(n);
        } else {
          ++n;
        }
      }
      names.merge(moved);
      return;
    }
  }
}

void FaultEnv::FailStep(int64_t step, Status error) {
  TARE_CHECK(!error.ok());
  fail_[step] = std::move(error);
}
void FaultEnv::ShortWriteAt(int64_t step, size_t bytes) { short_write_[step] = bytes; }
void FaultEnv::SetDiskBytes(uint64_t bytes) { disk_bytes_ = bytes; }
void FaultEnv::LoseSyncs(bool lose) { lose_syncs_ = lose; }
void FaultEnv::TearRenames(bool tear) { tear_renames_ = tear; }
void FaultEnv::CrashAtStep(int64_t step) { crash_at_ = step; }
void FaultEnv::SetNow(int64_t ns) { now_ns_ = ns; }

int64_t FaultEnv::steps() const {
  const std::lock_guard<std::mutex> hold(mutex_);
  return steps_;
}
std::vector<FaultEnv::Pending> FaultEnv::pending() const {
  const std::lock_guard<std::mutex> hold(mutex_);
  return pending_;
}

std::unique_ptr<FaultEnv> FaultEnv::Crash(const Survives& survives) const {
  const std::lock_guard<std::mutex> hold(mutex_);
  auto after = std::make_unique<FaultEnv>();
  Tree tree = durable_;
  for (const Pending& op : pending_) tree.Apply(op, survives(op));
  // A name whose directory did not survive is unreachable.
  for (auto it = tree.names.begin(); it != tree.names.end();) {
    it = tree.IsDir(ParentOf(it->first)) ? std::next(it) : tree.names.erase(it);
  }
  after->live_ = tree;
  after->durable_ = std::move(tree);
  after->next_file_ = next_file_;
  after->now_ns_ = now_ns_;
  return after;
}

std::unique_ptr<FaultEnv> FaultEnv::CrashLosingAll() const {
  return Crash([](const Pending&) { return size_t{0}; });
}
std::unique_ptr<FaultEnv> FaultEnv::CrashKeepingAll() const {
  return Crash([](const Pending&) { return kAll; });
}

Status FaultEnv::ExportTo(Env* env, const std::string& dir) const {
  const std::lock_guard<std::mutex> hold(mutex_);
  TARE_RETURN_IF_ERROR(env->CreateDirs(dir));
  for (const auto& [path, file] : live_.names) {  // parents sort before children
    if (file < 0) {
      TARE_RETURN_IF_ERROR(env->CreateDirs(dir + path));
      continue;
    }
    TARE_ASSIGN_OR_RETURN(auto out, env->OpenWritable(dir + path, Mode::kTruncate));
    TARE_RETURN_IF_ERROR(out->Append(live_.data.at(file)));
    TARE_RETURN_IF_ERROR(out->Close());
  }
  return Ok();
}

// Counts a step and gives its fault. A short write is no error yet: it limits `allowed_bytes`.
Status FaultEnv::Step(const char* call, const std::string& path, size_t* allowed_bytes) {
  if (steps_ >= crash_at_)
    return Error(Code::kAborted, "{} {}: crashed at step {}", call, path, crash_at_);
  const int64_t step = steps_++;
  if (const auto it = fail_.find(step); it != fail_.end()) {
    return it->second.Annotate(fmt::format("{} {}", call, path));
  }
  if (const auto it = short_write_.find(step);
      it != short_write_.end() && allowed_bytes != nullptr) {
    *allowed_bytes = it->second;
  }
  return Ok();
}

void FaultEnv::Record(Pending op) {
  op.step = steps_ - 1;
  live_.Apply(op, kAll);
  pending_.push_back(std::move(op));
}

Status FaultEnv::ParentExists(const char* call, const std::string& path) const {
  return live_.IsDir(ParentOf(path)) ? Ok() : NotFound(call, path);
}

Status FaultEnv::WriteTo(int file, const std::string& path, std::string_view bytes) {
  const std::lock_guard<std::mutex> hold(mutex_);
  size_t allowed = kAll;
  TARE_RETURN_IF_ERROR(Step("write", path, &allowed));
  uint64_t used = 0;
  for (const auto& [name, id] : live_.names) {
    if (id >= 0) used += live_.data.at(id).size();
  }
  const uint64_t room = disk_bytes_ > used ? disk_bytes_ - used : 0;
  const std::string_view written = bytes.substr(0, std::min<uint64_t>(allowed, room));
  if (!written.empty()) {
    Record({.kind = Pending::Kind::kWrite,
            .path = path,
            .to = {},
            .bytes = std::string(written),
            .at = live_.data[file].size(),
            .file = file});
  }
  if (written.size() == bytes.size()) return Ok();
  if (written.size() == room)
    return Error(Code::kExhausted, "write {}: No space left on device", path);
  return Error(Code::kIo, "write {}: {} of {} bytes written", path, written.size(), bytes.size());
}

Status FaultEnv::SyncFile(int file, const std::string& path) {
  const std::lock_guard<std::mutex> hold(mutex_);
  TARE_RETURN_IF_ERROR(Step("fsync", path));
  if (lose_syncs_) return Ok();
  std::vector<Pending> rest;
  for (Pending& op : pending_) {
    const bool data = op.kind == Pending::Kind::kWrite || op.kind == Pending::Kind::kTruncate;
    if (data && op.file == file) {
      durable_.Apply(op, kAll);
    } else {
      rest.push_back(std::move(op));
    }
  }
  pending_ = std::move(rest);
  return Ok();
}

Result<std::unique_ptr<ReadableFile>> FaultEnv::OpenReadable(const std::string& path) {
  const std::lock_guard<std::mutex> hold(mutex_);
  const auto it = live_.names.find(Clean(path));
  if (live_.IsDir(Clean(path)))
    return Error(Code::kIo, "open {}: is a directory, not a file", path);
  if (it == live_.names.end()) return NotFound("open", path);
  return std::unique_ptr<ReadableFile>(new Snapshot(live_.data.at(it->second)));
}

Result<std::unique_ptr<WritableFile>> FaultEnv::OpenWritable(const std::string& path, Mode mode) {
  const std::lock_guard<std::mutex> hold(mutex_);
  TARE_RETURN_IF_ERROR(Step("open for writing", path));
  const std::string clean = Clean(path);
  TARE_RETURN_IF_ERROR(ParentExists("open for writing", clean));
  if (live_.IsDir(clean)) return Error(Code::kIo, "open for writing {}: Is a directory", path);
  const auto it = live_.names.find(clean);
  if (it == live_.names.end()) {
    const int file = next_file_++;
    Record({.kind = Pending::Kind::kLink, .path = clean, .to = {}, .bytes = {}, .file = file});
    return std::unique_ptr<WritableFile>(new File(this, file, clean));
  }
  if (mode == Mode::kExclusive) {
    return Error(Code::kAlreadyExists, "open for writing {}: File exists", path);
  }
  const int file = it->second;
  if (mode == Mode::kTruncate && !live_.data[file].empty()) {
    Record({.kind = Pending::Kind::kTruncate,
            .path = clean,
            .to = {},
            .bytes = {},
            .at = 0,
            .file = file});
  }
  return std::unique_ptr<WritableFile>(new File(this, file, clean));
}

Status FaultEnv::Rename(const std::string& from, const std::string& to) {
  const std::lock_guard<std::mutex> hold(mutex_);
  TARE_RETURN_IF_ERROR(Step("rename", from + " to " + to));
  const std::string a = Clean(from);
  const std::string b = Clean(to);
  const auto it = live_.names.find(a);
  if (it == live_.names.end()) return NotFound("rename", from + " to " + to);
  TARE_RETURN_IF_ERROR(ParentExists("rename", b));
  const int file = it->second;
  const bool target_is_dir = live_.IsDir(b);
  if (IsBelow(b, a) || (live_.names.count(b) != 0 && target_is_dir != (file < 0))) {
    return Error(Code::kIo, "rename {} to {}: not possible", from, to);
  }
  if (target_is_dir) {
    const auto child = live_.names.upper_bound(b + "/");
    if (child != live_.names.end() && IsBelow(child->first, b)) {
      return Error(Code::kIo, "rename {} to {}: Directory not empty", from, to);
    }
  }
  if (a == b) return Ok();
  if (tear_renames_ && file >= 0) {
    if (live_.names.count(b) != 0) {
      Record({.kind = Pending::Kind::kUnlink, .path = b, .to = {}, .bytes = {}});
    }
    Record({.kind = Pending::Kind::kLink, .path = b, .to = {}, .bytes = {}, .file = file});
    Record({.kind = Pending::Kind::kUnlink, .path = a, .to = {}, .bytes = {}});
    return Ok();
  }
  Record({.kind = Pending::Kind::kRename, .path = a, .to = b, .bytes = {}, .file = file});
  return Ok();
}

Status FaultEnv::Remove(const std::string& path) {
  const std::lock_guard<std::mutex> hold(mutex_);
  TARE_RETURN_IF_ERROR(Step("remove", path));
  const std::string clean = Clean(path);
  if (live_.names.count(clean) == 0) return NotFound("remove", path);
  const auto child = live_.names.upper_bound(clean + "/");
  if (child != live_.names.end() && IsBelow(child->first, clean)) {
    return Error(Code::kIo, "remove {}: Directory not empty", path);
  }
  Record({.kind = Pending::Kind::kUnlink, .path = clean, .to = {}, .bytes = {}});
  return Ok();
}

Status FaultEnv::CreateDir(const std::string& path) {
  const std::lock_guard<std::mutex> hold(mutex_);
  TARE_RETURN_IF_ERROR(Step("mkdir", path));
  const std::string clean = Clean(path);
  if (clean.empty() || live_.names.count(clean) != 0) {
    return Error(Code::kAlreadyExists, "mkdir {}: File exists", path);
  }
  TARE_RETURN_IF_ERROR(ParentExists("mkdir", clean));
  Record({.kind = Pending::Kind::kMakeDir, .path = clean, .to = {}, .bytes = {}});
  return Ok();
}

Status FaultEnv::SyncDir(const std::string& path) {
  const std::lock_guard<std::mutex> hold(mutex_);
  TARE_RETURN_IF_ERROR(Step("fsync", path));
  const std::string dir = Clean(path);
  if (!live_.IsDir(dir)) return NotFound("open directory", path);
  if (lose_syncs_) return Ok();
  std::vector<Pending> rest;
  for (Pending& op : pending_) {
    const bool name = op.kind != Pending::Kind::kWrite && op.kind != Pending::Kind::kTruncate;
    if (name && ParentOf(op.kind == Pending::Kind::kRename ? op.to : op.path) == dir) {
      durable_.Apply(op, kAll);
    } else {
      rest.push_back(std::move(op));
    }
  }
  pending_ = std::move(rest);
  return Ok();
}

Status FaultEnv::Truncate(const std::string& path, uint64_t size_bytes) {
  const std::lock_guard<std::mutex> hold(mutex_);
  TARE_RETURN_IF_ERROR(Step("truncate", path));
  const std::string clean = Clean(path);
  const auto it = live_.names.find(clean);
  if (it == live_.names.end()) return NotFound("truncate", path);
  if (it->second < 0) return Error(Code::kIo, "truncate {}: Is a directory", path);
  Record({.kind = Pending::Kind::kTruncate,
          .path = clean,
          .to = {},
          .bytes = {},
          .at = size_bytes,
          .file = it->second});
  return Ok();
}

Result<FileInfo> FaultEnv::Stat(const std::string& path) {
  const std::lock_guard<std::mutex> hold(mutex_);
  const std::string clean = Clean(path);
  FileInfo info;
  if (live_.IsDir(clean)) {
    info.kind = FileInfo::Kind::kDirectory;
    info.mode = 0755;
    return info;
  }
  const auto it = live_.names.find(clean);
  if (it == live_.names.end()) return NotFound("stat", path);
  info.kind = FileInfo::Kind::kFile;
  info.size_bytes = live_.data.at(it->second).size();
  info.inode = static_cast<uint64_t>(it->second) + 1;
  info.mode = 0644;
  return info;
}

Result<std::vector<std::string>> FaultEnv::List(const std::string& dir) {
  const std::lock_guard<std::mutex> hold(mutex_);
  const std::string clean = Clean(dir);
  if (!live_.IsDir(clean)) return NotFound("opendir", dir);
  std::vector<std::string> names;
  for (const auto& [path, file] : live_.names) {
    if (ParentOf(path) == clean) names.push_back(path.substr(clean.size() + 1));
  }
  std::sort(names.begin(), names.end());
  return names;
}

Result<std::unique_ptr<FileLock>> FaultEnv::Lock(const std::string& path) {
  const std::lock_guard<std::mutex> hold(mutex_);
  TARE_RETURN_IF_ERROR(Step("open lock", path));
  const std::string clean = Clean(path);
  TARE_RETURN_IF_ERROR(ParentExists("open lock", clean));
  if (!locks_->insert(clean).second) {
    return Error(Code::kPrecondition, "lock {} is held by another writer", path);
  }
  if (live_.names.count(clean) == 0) {
    Record(
        {.kind = Pending::Kind::kLink, .path = clean, .to = {}, .bytes = {}, .file = next_file_++});
  }
  return std::unique_ptr<FileLock>(new Held(locks_, clean));
}

int64_t FaultEnv::NowNs() {
  const std::lock_guard<std::mutex> hold(mutex_);
  return now_ns_ += 1000;
}
int64_t FaultEnv::MonotonicNs() { return NowNs(); }

int64_t ExploreCrashes(const std::function<void(FaultEnv*)>& prepare,
                       const std::function<void(FaultEnv*)>& work,
                       const std::function<void(FaultEnv*)>& check, int random_subsets) {
  int64_t checked = 0;
  uint64_t random = 0x9e3779b97f4a7c15u;
  const auto draw = [&] {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return random >> 33;
  };
  for (int64_t step = 0;; ++step) {
    FaultEnv env;
    if (prepare) prepare(&env);
    const int64_t start = env.steps();
    env.CrashAtStep(start + step);
    work(&env);
    const auto visit = [&](const FaultEnv::Survives& survives) {
      const auto after = env.Crash(survives);
      check(after.get());
      ++checked;
    };
    visit([](const FaultEnv::Pending&) { return size_t{0}; });
    visit([](const FaultEnv::Pending&) { return FaultEnv::kAll; });
    const size_t count = env.pending().size();
    for (size_t lost = 0; lost < count; ++lost) {
      size_t i = 0;
      visit([&](const FaultEnv::Pending&) { return i++ == lost ? size_t{0} : FaultEnv::kAll; });
    }
    for (int r = 0; r < random_subsets && count > 0; ++r) {
      visit([&](const FaultEnv::Pending& op) -> size_t {
        const uint64_t die = draw() % 3;
        if (die == 0) return 0;
        return die == 1 || op.bytes.empty() ? FaultEnv::kAll : draw() % (op.bytes.size() + 1);
      });
    }
    if (env.steps() < start + step) return checked;  // the work ended before the crash
  }
}

}  // namespace tare
