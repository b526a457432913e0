#include "workflow/verify.h"

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "base/reasons.h"
#include "base/sha256.h"
#include "base/thread_pool.h"
#include "workflow/index.h"
#include "workflow/layout.h"
#include "workflow/signoff.h"
#include "workflow/task.h"

namespace tare::workflow {
namespace {

// The length of a path ends the nesting.
void Walk(Env* env, const std::string& dir, const std::string& relative,
          std::vector<TreeEntry>* out, std::vector<UnreadFolder>* unread) {
  auto names = env->List(relative.empty() ? dir : JoinPath(dir, relative));
  if (!names.ok()) {
    unread->push_back({relative, names.status()});
    return;
  }
  for (const std::string& name : *names) {
    const std::string path = relative.empty() ? name : relative + "/" + name;
    auto info = env->Stat(JoinPath(dir, path));
    if (!info.ok()) {
      if (info.status().code() == Code::kNotFound) continue;  // removed while we looked
      unread->push_back({path, info.status()});
    } else if (info->kind == FileInfo::Kind::kDirectory) {
      Walk(env, dir, path, out, unread);
    } else {
      out->push_back({path, *info});
    }
  }
}

// One verification: findings from several threads, files by path.
class Verifier {
 public:
  Verifier(Env* env, const std::string& dir, const VerifyOptions& options)
      : env_(env), dir_(dir), options_(options), pool_(options.threads) {}

  Result<VerifyReport> Run() {
    TARE_ASSIGN_OR_RETURN(log_, ReadLog(env_, dir_));
    Chain();
    std::vector<UnreadFolder> unread;
    TARE_ASSIGN_OR_RETURN(const std::vector<TreeEntry> tree, ListTree(env_, dir_, &unread));
    for (const TreeEntry& e : tree) files_[e.path] = e.info;
    // A folder that cannot be read hides what it holds, and must not hide the rest.
    for (const UnreadFolder& u : unread) Add(reason::kUnreadable, u.path, u.status.message());
    tree_known_ = unread.empty();
    Config();
    Artifacts();
    SetAside();
    Reviews();
    SignOffs(tree);
    Generated();
    Unrecorded();
    Stale();
    NotProven();
    report_.verdict = Verdict::kPass;
    for (const Finding& f : report_.findings) {
      const Reason* r = FindReason(f.reason);
      const Verdict v = r == nullptr ? Verdict::kFail : r->verdict;
      if (v == Verdict::kFail) report_.verdict = Verdict::kFail;
      if (v == Verdict::kInconclusive && report_.verdict == Verdict::kPass) {
        report_.verdict = Verdict::kInconclusive;
      }
    }
    const auto rank = [](const Finding& f) {
      const Reason* r = FindReason(f.reason);
      return r == nullptr || r->verdict == Verdict::kFail ? 0
             : r->verdict == Verdict::kInconclusive       ? 1
                                                          : 2;
    };
    std::stable_sort(report_.findings.begin(), report_.findings.end(),
                     [&](const Finding& a, const Finding& b) {
                       return std::make_pair(rank(a), a.where) < std::make_pair(rank(b), b.where);
                     });
    return std::move(report_);
  }

 private:
  void Add(std::string_view code, std::string_view where, std::string_view message) {
    std::lock_guard<std::mutex> hold(mutex_);
    report_.findings.push_back({std::string(code), Printable(where), Printable(message)});
  }

  void Chain() {
    const LogScan& scan = log_.scan;
    if (!scan.broken.ok()) Add(reason::kLogBroken, kLogFile, scan.broken.message());
    if (!scan.torn.empty()) {
      Add(reason::kLogTorn, kLogFile,
          fmt::format("{} bytes after event {} are not a whole line", scan.torn.size(),
                      static_cast<int64_t>(scan.lines.size()) - 1));
    }
    const size_t n = scan.lines.size();
    events_.resize(n);
    pool_.ParallelRanges(static_cast<int64_t>(n), 512, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        auto event = ParseEvent(scan.lines[static_cast<size_t>(i)], true);
        if (event.ok()) {
          events_[static_cast<size_t>(i)] = *std::move(event);
        } else {
          Add(reason::kLogContradiction, fmt::format("event {}", i), event.status().message());
        }
      }
    });
    for (const auto& event : events_) {
      if (event) state_.Apply(*event);
    }
    for (const LogProblem& p : state_.problems) {
      Add(reason::kLogContradiction, fmt::format("event {}", p.seq), p.message);
    }
    if (state_.task_id.empty()) {
      Add(reason::kLogContradiction, kLogFile, "no event creates the task");
    }
    report_.task_id = state_.task_id;
    report_.events = n;
    report_.head = {state_.task_id, n, scan.head};
    if (options_.checkpoint) {
      const Checkpoint& c = *options_.checkpoint;
      std::string why;
      if (c.origin != state_.task_id) {
        why = fmt::format("the checkpoint is of task {}, this is {}", c.origin, state_.task_id);
      } else if (c.size > n) {
        why = fmt::format("the checkpoint counts {} events, the log has {}: it was cut back",
                          c.size, n);
      } else if (LineHash(scan.lines[c.size - 1]) != c.head) {
        why = fmt::format("event {} is not the one the checkpoint was taken at", c.size - 1);
      }
      if (!why.empty()) Add(reason::kCheckpointMismatch, kLogFile, why);
    }
  }

  // The plain file of this name, or a finding and nothing.
  std::unique_ptr<ReadableFile> Open(const std::string& path) {
    seen_(path);
    // Looked up in the walk, which never passes through a link; a plain Stat could.
    const auto at = files_.find(path);
    if (at == files_.end()) {
      Add(reason::kArtifactMissing, path,
          tree_known_ ? "it is recorded and not there"
                      : "it is recorded and could not be looked for");
      return nullptr;
    }
    if (at->second.kind != FileInfo::Kind::kFile) {
      Add(reason::kNotPlainFile, path, "a plain file was recorded here");
      return nullptr;
    }
    auto file = env_->OpenReadable(JoinPath(dir_, path));
    if (!file.ok()) {
      Add(reason::kUnreadable, path, file.status().message());
      return nullptr;
    }
    return *std::move(file);
  }

  void seen_(const std::string& path) {
    std::lock_guard<std::mutex> hold(mutex_);
    recorded_.insert(path);
  }

  void Config() {
    recorded_.insert(std::string(kLogFile));
    const auto lock = files_.find(std::string(kLockFile));
    recorded_.insert(std::string(kLockFile));
    if (lock != files_.end() &&
        (lock->second.kind != FileInfo::Kind::kFile || lock->second.size_bytes != 0)) {
      Add(reason::kArtifactChanged, kLockFile, "the lock must be an empty plain file");
    }
    const ConfigRecord* config = state_.config();
    if (config == nullptr) {
      // A torn tail may be this very record: a crash during init, which acknowledged nothing.
      if (!state_.task_id.empty() && log_.scan.torn.empty()) {
        Add(reason::kConfigUnrecorded, kTaskFile, "the log holds no configuration");
      }
      return;
    }
    auto file = Open(std::string(kTaskFile));
    if (file == nullptr) return;
    const std::string digest = Hex(Sha256Of(file->bytes()));
    if (digest != config->sha256) {
      Add(reason::kConfigUnrecorded, kTaskFile,
          fmt::format("its SHA-256 is {}, event {} recorded {}", digest.substr(0, 12), config->seq,
                      config->sha256.substr(0, 12)));
      return;
    }
    auto parsed = ParseTaskConfig(file->bytes(), kTaskFile);
    if (!parsed.ok()) {
      Add(reason::kLogContradiction, kTaskFile, parsed.status().message());
      return;
    }
    // Values as recorded and as in the file: a re-sealed event could say something else.
    bool same = parsed->AuthorityDigest() == config->config.AuthorityDigest() &&
                parsed->values.size() == config->config.values.size();
    for (const auto& [key, value] : parsed->values) {
      same = same && config->config.Text(key) == value.text;
    }
    if (!same) {
      Add(reason::kLogContradiction, fmt::format("event {}", config->seq),
          "it records other values than the task.toml whose digest it holds");
    }
  }

  void Artifacts() {
    const auto& all = state_.artifacts;
    std::vector<const RunRecord*> run_of(all.size(), nullptr);
    for (const RunRecord& run : state_.runs) {
      for (const size_t i : run.artifacts) run_of[i] = &run;
    }
    report_.runs = state_.runs.size();
    report_.artifacts = all.size();
    for (const ArtifactRecord& a : all) {
      recorded_.insert(a.path);
      recorded_.insert(a.path + std::string(kSidecarSuffix));
    }
    std::vector<uint64_t> hashed(all.size(), 0);
    // Large files first would balance better; order by path keeps the disk happy. Ranges of 8.
    pool_.ParallelRanges(static_cast<int64_t>(all.size()), 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const size_t k = static_cast<size_t>(i);
        hashed[k] = OneArtifact(all[k], run_of[k]);
      }
    });
    for (const uint64_t n : hashed) report_.bytes_hashed += n;
  }

  uint64_t OneArtifact(const ArtifactRecord& a, const RunRecord* run) {
    uint64_t hashed = 0;
    if (auto file = OpenQuietly(a.path)) {
      const std::string_view bytes = file->bytes();
      if (bytes.size() != a.bytes) {
        Add(reason::kArtifactChanged, a.path,
            fmt::format("{} bytes, recorded were {}", bytes.size(), a.bytes));
      } else if (!options_.quick) {
        const std::string digest = Hex(Sha256Of(bytes));
        hashed += bytes.size();
        if (digest != a.sha256) {
          Add(reason::kArtifactChanged, a.path,
              fmt::format("SHA-256 {}, event {} recorded {}", digest.substr(0, 12), a.seq,
                          a.sha256.substr(0, 12)));
        } else if (a.role == Role::kConclusion && run != nullptr) {
          CheckConclusion(a, *run, bytes);
        }
      }
    }
    if (options_.quick) return 0;
    const std::string sidecar_path = a.path + std::string(kSidecarSuffix);
    auto file = OpenQuietly(sidecar_path);
    if (file == nullptr) return hashed;
    hashed += file->bytes().size();
    const std::string digest = Hex(Sha256Of(file->bytes()));
    if (digest != a.sidecar_sha256) {
      Add(reason::kArtifactChanged, sidecar_path,
          fmt::format("SHA-256 {}, event {} recorded {}", digest.substr(0, 12), a.seq,
                      a.sidecar_sha256.substr(0, 12)));
      return hashed;
    }
    auto s = ParseSidecar(file->bytes());
    if (!s.ok()) {
      Add(reason::kSidecarMismatch, sidecar_path, s.status().message());
    } else if (s->subject != a.path || s->subject_sha256 != a.sha256 || s->role != a.role ||
               s->task_id != state_.task_id || run == nullptr || s->run_id != run->id ||
               s->step != run->step || s->kind != run->kind || s->command != run->command) {
      Add(reason::kSidecarMismatch, sidecar_path,
          fmt::format("it does not say what event {} says", a.seq));
    } else {
      for (const auto& [path, sha] : {std::make_pair(s->config_path, s->config_sha256),
                                      std::make_pair(s->identity_path, s->identity_sha256)}) {
        if (path.empty()) continue;
        const ArtifactRecord* linked = state_.FindArtifact(path);
        if (linked == nullptr || linked->sha256 != sha) {
          Add(reason::kSidecarMismatch, sidecar_path, path + " is not recorded with that digest");
        }
      }
    }
    return hashed;
  }

  // Like Open, but `recorded_` is filled already (many threads).
  std::unique_ptr<ReadableFile> OpenQuietly(const std::string& path) {
    const auto at = files_.find(path);
    if (at == files_.end()) {
      Add(reason::kArtifactMissing, path,
          tree_known_ ? "it is recorded and not there"
                      : "it is recorded and could not be looked for");
      return nullptr;
    }
    if (at->second.kind != FileInfo::Kind::kFile) {
      Add(reason::kNotPlainFile, path, "a plain file was recorded here");
      return nullptr;
    }
    auto file = env_->OpenReadable(JoinPath(dir_, path));
    if (!file.ok()) {
      Add(reason::kUnreadable, path, file.status().message());
      return nullptr;
    }
    return *std::move(file);
  }

  void CheckConclusion(const ArtifactRecord& a, const RunRecord& run, std::string_view bytes) {
    if (!run.ended || !run.conclusion) return;
    auto c = Conclusion::Parse(bytes);
    if (!c.ok()) {
      Add(reason::kLogContradiction, a.path, c.status().message());
    } else if (c->ToJson() != run.conclusion->ToJson()) {
      Add(reason::kLogContradiction, a.path,
          fmt::format("event {} records another conclusion of run {}", run.end_seq, run.id));
    }
  }

  void SetAside() {
    for (const auto& [path, digest] : state_.set_aside) {
      auto file = Open(path);
      if (file != nullptr && Hex(Sha256Of(file->bytes())) != digest) {
        Add(reason::kArtifactChanged, path, "a torn line that was set aside has other bytes");
      }
    }
  }

  // What was signed is the bundle; the event beside it must say the same, the log before it too.
  void Reviews() {
    for (const ReviewRequest& r : state_.reviews) {
      std::string bytes;
      if (!ReadRecorded(r.bundle_path, &bytes)) continue;  // the artifact's own finding says it
      const auto head = CheckBundle(state_, r, bytes);
      Status status = head.status();
      if (head.ok() && (head->events == 0 || head->events > r.seq ||
                        LineHash(log_.scan.lines[head->events - 1]) != head->sha256)) {
        status = DataLoss("its bundle was made from another log");
      }
      if (!status.ok()) {
        Add(reason::kLogContradiction, fmt::format("event {} (review of {})", r.seq, r.step),
            status.message());
      }
    }
  }

  void SignOffs(const std::vector<TreeEntry>& tree) {
    report_.signoffs = state_.signoffs.size();
    if (state_.signoffs.empty()) return;
    const std::vector<KeyFile> key_files = KeyFilesAmong(env_, dir_, tree);
    for (const SignOffRecord& s : state_.signoffs) {
      const std::string where = fmt::format("event {} (sign-off of {})", s.seq, s.step);
      std::string statement, signature;
      if (!ReadRecorded(s.statement_path, &statement) ||
          !ReadRecorded(s.signature_path, &signature)) {
        continue;  // the artifact's own finding says it
      }
      Status status = RecheckSignOff(state_, s, statement, signature);
      if (!status.ok()) Add(reason::kSignatureFailed, where, status.message());
      const ConfigRecord* config = state_.config();
      if (config == nullptr) continue;
      for (const Reviewer& r : config->config.reviewers) {
        if (Fingerprint(r.public_key) != s.key) continue;
        if (const std::string* file = KeyFileOf(key_files, r.public_key)) {
          Add(reason::kKeyBesideTask, where, "its private key may lie at " + *file);
        }
      }
    }
  }

  bool ReadRecorded(const std::string& path, std::string* out) {
    const auto at = files_.find(path);
    if (at == files_.end() || at->second.kind != FileInfo::Kind::kFile) return false;
    auto bytes = env_->ReadFile(JoinPath(dir_, path));
    if (!bytes.ok()) return false;
    *out = *std::move(bytes);
    return true;
  }

  void Generated() {
    struct Page {
      std::string path, step, body;
      IndexFooter footer;
    };
    std::vector<Page> pages;
    for (const auto& [path, info] : files_) {
      std::string step;
      if (path != kIndexFile) {
        const size_t slash = path.find('/');
        if (slash == std::string::npos || path.substr(slash + 1) != kIndexFile ||
            !IsStep(path.substr(0, slash))) {
          continue;
        }
        step = path.substr(0, slash);
      }
      auto file = Open(path);
      if (file == nullptr) continue;
      auto split = SplitFooter(file->bytes());
      if (!split.ok()) {
        Add(reason::kGeneratedEdited, path, split.status().message());
        continue;
      }
      const IndexFooter& footer = split->second;
      if (footer.events == 0 || footer.events > log_.scan.lines.size() ||
          LineHash(log_.scan.lines[footer.events - 1]) != footer.head) {
        Add(reason::kGeneratedEdited, path, "it was not generated from this log");
        continue;
      }
      pages.push_back({path, step, split->first, footer});
    }
    std::sort(pages.begin(), pages.end(),
              [](const Page& a, const Page& b) { return a.footer.events < b.footer.events; });
    const auto render = [](const State& state, const std::string& step) {
      Staleness staleness(state);
      return step.empty() ? RenderTaskIndex(state, &staleness)
                          : RenderStepIndex(state, &staleness, step);
    };
    // One pass through the log, stopping where a page was made.
    State at;
    size_t next = 0;
    for (const Page& page : pages) {
      for (; next < page.footer.events; ++next) {
        if (events_[next]) at.Apply(*events_[next]);
      }
      if (render(at, page.step) != page.body) {
        Add(reason::kGeneratedEdited, page.path, "the log gives another page");
      } else if (page.footer.events < events_.size() && render(state_, page.step) != page.body) {
        Add(reason::kGeneratedOutdated, page.path,
            fmt::format("made at event {} of {}", page.footer.events, events_.size()));
      }
    }
  }

  void Unrecorded() {
    std::set<std::string> open_runs;
    for (const RunRecord& run : state_.runs) {
      if (!run.ended && !run.lost) open_runs.insert(run.step + "/" + run.id + "/");
    }
    for (const auto& [path, info] : files_) {
      if (recorded_.count(path) != 0) continue;
      const bool of_open_run =
          std::any_of(open_runs.begin(), open_runs.end(),
                      [&file = path](const std::string& p) { return file.starts_with(p); });
      Add(reason::kUnrecordedFile, path,
          of_open_run ? "it belongs to a run that is still open" : "no event names it");
    }
  }

  void Stale() {
    Staleness staleness(state_);
    for (const RunRecord& run : state_.runs) {
      if (run.kind && run.ended && staleness.Of(run)) ++report_.stale_runs;
    }
  }

  void NotProven() {
    auto& out = report_.not_proven;
    if (!options_.checkpoint) {
      out.push_back(
          "that the log was not cut back to an earlier event, or rewritten from scratch: only a "
          "checkpoint kept elsewhere shows it (--checkpoint)");
    } else {
      out.push_back(
          fmt::format("that no events after number {}, where the checkpoint was taken, were "
                      "cut off or rewritten",
                      options_.checkpoint->size - 1));
    }
    if (options_.quick) out.push_back("the bytes of artifacts: they were not read");
    out.push_back(
        "that recorded commands did what they say: their outputs are bound to them, not judged");
    if (AuthorityInForce(state_, UINT64_MAX) != nullptr) {
      std::string keys;
      for (const Reviewer& r : AuthorityInForce(state_, UINT64_MAX)->config.reviewers) {
        keys += fmt::format(" {} {}", Printable(r.person), Fingerprint(r.public_key));
      }
      out.push_back("that the first list of reviewers names the right people; compare:" + keys);
    }
    out.push_back("wall-clock times: they are what the writer's clock said");
    out.push_back("files that no event names: they are listed and count for nothing");
  }

  Env* env_;
  const std::string dir_;
  const VerifyOptions options_;
  ThreadPool pool_;
  LogView log_;
  std::vector<std::optional<Event>> events_;
  State state_;
  std::unordered_map<std::string, FileInfo> files_;
  bool tree_known_ = false;
  std::set<std::string> recorded_;
  std::mutex mutex_;
  VerifyReport report_;
};

}  // namespace

Result<std::vector<TreeEntry>> ListTree(Env* env, const std::string& dir,
                                        std::vector<UnreadFolder>* unread) {
  std::vector<TreeEntry> out;
  std::vector<UnreadFolder> failed;
  Walk(env, dir, "", &out, &failed);
  if (unread == nullptr && !failed.empty()) return failed.front().status;
  if (unread != nullptr) *unread = std::move(failed);
  return out;
}

Result<VerifyReport> VerifyTask(Env* env, const std::string& dir, const VerifyOptions& options) {
  return Verifier(env, dir, options).Run();
}

}  // namespace tare::workflow
