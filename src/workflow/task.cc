#include "workflow/task.h"

#include <algorithm>
#include <set>

#include "base/reasons.h"
#include "base/sha256.h"
#include "base/thread_pool.h"
#include "workflow/index.h"
#include "workflow/layout.h"
#include "workflow/process.h"
#include "workflow/signoff.h"
#include "workflow/uuid.h"

namespace tare::workflow {
namespace {

// The user's values as one layer: a file in task.toml's format, then single keys over it.
// What a single key takes the place of goes to `dropped`.
Result<TaskConfig> UserLayer(Env* env, const InitOptions& options,
                             std::vector<std::pair<std::string, ConfigValue>>* dropped) {
  TaskConfig user;
  if (!options.user_toml.empty()) {
    TARE_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(options.user_toml));
    const std::string name = options.user_toml.substr(options.user_toml.find_last_of('/') + 1);
    TARE_ASSIGN_OR_RETURN(user, ParseTaskConfig(text, name));
  }
  std::string lines;
  std::set<std::string> seen;
  for (const auto& [key, value] : options.user_values) {
    const KeySpec* spec = FindKey(key);
    if (spec == nullptr) {
      return InvalidArgument("--set {}: unknown key; the nearest known one is {}", Printable(key),
                             NearestKey(key));
    }
    if (!seen.insert(key).second) return InvalidArgument("--set {}: given twice", key);
    if (!IsUtf8(value)) return InvalidArgument("--set {}: not valid utf-8", key);
    // Strings may come without quotes, as a shell leaves them.
    std::string text = value;
    if (spec->type == ValueType::kString && !value.starts_with('"')) text = Json(value).dump();
    if (text.find('\n') != std::string::npos)
      return InvalidArgument("--set {}: one line only", key);
    auto one =
        ParseTaskConfig(fmt::format("schema = \"tare-task-1\"\n{} = {}\n", key, text), "--set");
    if (!one.ok()) return one.status();
    for (auto& [k, v] : one->values) {
      if (const auto old = user.values.find(k); old != user.values.end())
        dropped->emplace_back(k, old->second);
      user.values[k] = {v.text, "user: --set " + k};
    }
  }
  return user;
}

// Every event of a verified scan, in order; large logs on all CPUs.
std::vector<Result<Event>> ParseLines(const LogScan& scan) {
  const int64_t n = static_cast<int64_t>(scan.lines.size());
  std::vector<Result<Event>> out(scan.lines.size(), Result<Event>(DataLoss("not parsed")));
  ThreadPool pool(n < 4096 ? 1 : 0);
  pool.ParallelRanges(n, 512, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      out[static_cast<size_t>(i)] = ParseEvent(scan.lines[static_cast<size_t>(i)], false);
    }
  });
  return out;
}

}  // namespace

bool IsPlainDir(Env* env, const std::string& path) {
  auto info = env->Stat(path);
  return info.ok() && info->kind == FileInfo::Kind::kDirectory;
}

Status EnsurePlainDir(Env* env, const std::string& path) {
  auto info = env->Stat(path);
  if (info.ok()) {
    if (info->kind == FileInfo::Kind::kDirectory) return Ok();
    return Error(Code::kPrecondition, "{}: not a folder; links are never followed",
                 Printable(path));
  }
  if (info.status().code() != Code::kNotFound) return info.status();
  Status made = env->CreateDir(path);
  if (!made.ok() && made.code() != Code::kAlreadyExists) return made;
  const size_t slash = path.find_last_of('/');
  return env->SyncDir(slash == std::string::npos ? "." : path.substr(0, slash));
}

Status CheckPlainFile(Env* env, const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const FileInfo info, env->Stat(path));
  if (info.kind != FileInfo::Kind::kFile) {
    return Error(Code::kPrecondition, "{}: not a plain file; links and devices are refused",
                 Printable(path));
  }
  return Ok();
}

Result<TaskView> ReadTask(Env* env, const std::string& dir) {
  TaskView view;
  view.dir = dir;
  TARE_ASSIGN_OR_RETURN(view.log, ReadLog(env, dir));
  for (const Result<Event>& event : ParseLines(view.log.scan)) {
    if (!event.ok()) {
      view.state.problems.push_back({view.state.events, event.status().message()});
      ++view.state.events;
      continue;
    }
    view.state.Apply(*event);
  }
  MarkSignOffs(env, dir, &view.state);
  return view;
}

Result<std::unique_ptr<Task>> Task::Init(Env* env, const std::string& at, const std::string& actor,
                                         const InitOptions& options, InitReport* report) {
  // Behind a slash the folder would pass for its own parent, and the parent would not be synced.
  const size_t last = at.find_last_not_of('/');
  const std::string dir = last == std::string::npos ? at : at.substr(0, last + 1);
  // Everything that can be wrong with the request is found before anything is written.
  std::vector<std::pair<std::string, ConfigValue>> dropped;
  TARE_ASSIGN_OR_RETURN(const TaskConfig user, UserLayer(env, options, &dropped));
  TaskConfig recipe;
  if (!options.recipe.empty()) {
    TARE_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(options.recipe));
    const std::string name = options.recipe.substr(options.recipe.find_last_of('/') + 1);
    TARE_ASSIGN_OR_RETURN(recipe, ParseRecipe(text, name));
  }
  TARE_ASSIGN_OR_RETURN(const Recovery recovery,
                        RecoverConfig(env, options.model_path, options.config_files));
  const TaskConfig defaults = DefaultConfig();
  MergedConfig merged = MergeConfigs({&user, &recipe, &recovery.config, &defaults});
  report->notes = recovery.notes;
  report->conflicts = merged.conflicts;
  // Within a layer: a single value over the user's file, and the files that values come from.
  dropped.insert(dropped.end(), recovery.dropped.begin(), recovery.dropped.end());
  for (const auto& [key, value] : dropped) {
    const ConfigValue& kept = merged.config.values.at(key);
    if (kept.text != value.text) report->conflicts.push_back({key, kept, value});
  }
  const std::string toml = RenderTaskToml(merged.config);
  TARE_ASSIGN_OR_RETURN(const TaskConfig written, ParseTaskConfig(toml, std::string(kTaskFile)));
  bool same = written.values.size() == merged.config.values.size() &&
              written.AuthorityDigest() == merged.config.AuthorityDigest();
  for (const auto& [key, value] : merged.config.values)
    same = same && written.Text(key) == value.text;
  if (!same) return Error(Code::kInternal, "task.toml would not say what was asked for");

  TARE_RETURN_IF_ERROR(EnsurePlainDir(env, dir));
  const std::string log_path = JoinPath(dir, kLogFile);
  const bool has_log = env->Stat(log_path).ok();
  if (has_log) {
    TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env, dir));
    if (!view.log.scan.broken.ok() || view.state.config() != nullptr) {
      return Error(Code::kAlreadyExists, "{} is a task already ({}); one directory holds one task",
                   Printable(dir),
                   view.state.task_id.empty() ? "its log is broken" : view.state.task_id);
    }
    // An init that was cut short before its configuration was recorded was not acknowledged: go on.
  } else {
    TARE_ASSIGN_OR_RETURN(const std::vector<std::string> names, env->List(dir));
    for (const std::string& name : names) {
      if (name == kLockFile || name.starts_with(std::string(kTaskFile))) continue;
      return Error(Code::kPrecondition, "{} is not empty ({}); a task needs a directory of its own",
                   Printable(dir), Printable(name));
    }
    if (env->Stat(JoinPath(dir, kTaskFile)).ok()) {
      return Error(Code::kPrecondition,
                   "{} holds a task.toml but no log; move it out and give it with --from",
                   Printable(dir));
    }
  }
  std::unique_ptr<Task> task(new Task());
  task->env_ = env;
  task->dir_ = dir;
  task->actor_ = actor;
  if (has_log) {
    TARE_ASSIGN_OR_RETURN(task->log_, EventLog::Open(env, dir, actor));
    for (const Result<Event>& event : ParseLines(task->log_->opened().scan)) {
      if (!event.ok()) return event.status();
      task->state_.Apply(*event);
    }
    for (const Event& e : task->log_->recovery_events()) task->state_.Apply(e);
  } else {
    TARE_ASSIGN_OR_RETURN(task->log_, EventLog::Create(env, dir, actor));
  }
  TARE_RETURN_IF_ERROR(env->WriteFileAtomic(JoinPath(dir, kTaskFile), toml));
  if (task->state_.task_id.empty()) {
    EventDraft draft;
    draft.run_id = NewRunId(env);
    draft.type = "task-created";
    draft.data = {{"schema", "tare-task-1"}, {"tool", kToolVersion}};
    TARE_RETURN_IF_ERROR(task->Append(draft).status());
  }
  // Origins as merged, values as written: the log keeps where each came from.
  TARE_RETURN_IF_ERROR(task->RecordConfig(merged.config, toml, "init", report));
  TARE_RETURN_IF_ERROR(task->WriteIndexes());
  return task;
}

Result<std::unique_ptr<Task>> Task::Open(Env* env, const std::string& dir,
                                         const std::string& actor) {
  std::unique_ptr<Task> task(new Task());
  task->env_ = env;
  task->dir_ = dir;
  task->actor_ = actor;
  TARE_ASSIGN_OR_RETURN(task->log_, EventLog::Open(env, dir, actor));
  for (const Result<Event>& event : ParseLines(task->log_->opened().scan)) {
    if (!event.ok()) return event.status();
    task->state_.Apply(*event);
  }
  for (const Event& e : task->log_->recovery_events()) task->state_.Apply(e);
  if (task->state_.config() == nullptr) {
    return Error(Code::kPrecondition,
                 "{} holds no task yet: `tare init` was cut short, run it again", Printable(dir));
  }
  MarkSignOffs(env, dir, &task->state_);
  return task;
}

Result<Event> Task::Append(const EventDraft& draft) {
  return log_->Append(draft, [this](const Event& e) {
    Status status = state_.Accept(e);
    return status.ok() ? status
                       : Error(Code::kPrecondition, "event {}: {}", e.type, status.message());
  });
}

Status Task::RecordConfig(const TaskConfig& config, std::string_view bytes,
                          const std::string& reason, InitReport* report) {
  EventDraft draft;
  draft.run_id = NewRunId(env_);
  draft.type = "config";
  draft.data = ConfigToJson(config);
  draft.data["sha256"] = Hex(Sha256Of(bytes));
  draft.data["reason"] = reason;
  TARE_RETURN_IF_ERROR(Append(draft).status());
  report->questions = OpenQuestions(config);
  std::set<std::string> open;
  for (const Question& q : report->questions) {
    open.insert(q.key);
    if (state_.questions.count(q.key) != 0) continue;
    EventDraft ask{draft.run_id,
                   "question",
                   {{"key", q.key}, {"text", q.text}, {"blocks", q.blocks}, {"open", true}}};
    TARE_RETURN_IF_ERROR(Append(ask).status());
  }
  const std::map<std::string, std::string> asked = state_.questions;
  for (const auto& [key, text] : asked) {
    if (open.count(key) != 0) continue;
    const std::string answer(config.Text(key));
    EventDraft close{
        draft.run_id,
        "question",
        {{"key", key}, {"text", "answered: " + answer}, {"blocks", ""}, {"open", false}}};
    TARE_RETURN_IF_ERROR(Append(close).status());
  }
  return Ok();
}

Result<InitReport> Task::Amend(const std::string& reason) {
  if (reason.empty() || Printable(reason) != reason) {
    return InvalidArgument("a reason in printable text is needed for a change of configuration");
  }
  const std::string path = JoinPath(dir_, kTaskFile);
  TARE_RETURN_IF_ERROR(CheckPlainFile(env_, path));
  TARE_ASSIGN_OR_RETURN(const std::string bytes, env_->ReadFile(path));
  TARE_ASSIGN_OR_RETURN(const TaskConfig config, ParseTaskConfig(bytes, std::string(kTaskFile)));
  if (state_.config() != nullptr && state_.config()->sha256 == Hex(Sha256Of(bytes))) {
    return Error(Code::kPrecondition,
                 "task.toml is the one in the log; there is nothing to record");
  }
  InitReport report;
  TARE_RETURN_IF_ERROR(RecordConfig(config, bytes, reason, &report));
  TARE_RETURN_IF_ERROR(WriteIndexes());
  return report;
}

std::string Task::RunDir(const RunRecord& run) const {
  return JoinPath(dir_, run.step + "/" + run.id);
}

Result<std::string> Task::StartRun(const RunStart& start) {
  const ProcessIdentity self = ThisProcess();
  EventDraft draft;
  draft.run_id = NewRunId(env_);
  draft.type = "run-started";
  draft.data = {{"step", start.step},
                {"kind", start.kind ? EvidenceKindName(*start.kind) : "none"},
                {"parent", start.parent},
                {"command", start.command},
                {"candidate", start.candidate},
                {"content_id", start.content_id},
                {"host", self.host},
                {"boot_id", self.boot_id},
                {"pid", self.pid},
                {"pid_start", self.start_ticks},
                {"heartbeat_s", start.heartbeat_s},
                {"dependencies", DependenciesToJson(start.dependencies)}};
  if (!IsStep(start.step)) {
    return InvalidArgument("{} is not a step (C0 to C10, task)", Printable(start.step));
  }
  // Its artifacts' sidecars repeat most of it, beside a few paths.
  RunRecord run;
  run.id = draft.run_id;
  run.step = start.step;
  run.kind = start.kind;
  run.command = start.command;
  run.dependencies = start.dependencies;
  TARE_ASSIGN_OR_RETURN(const std::string sidecar, SidecarFor(run, "", Role::kConclusion, ""));
  constexpr size_t kPathBytes = size_t{16} << 10;
  if (sidecar.size() > kMaxSidecarBytes - kPathBytes) {
    return Error(Code::kExhausted,
                 "command and dependencies take {} bytes of a sidecar; at most {} are recorded",
                 sidecar.size(), kMaxSidecarBytes - kPathBytes);
  }
  TARE_RETURN_IF_ERROR(EnsurePlainDir(env_, JoinPath(dir_, start.step)));
  TARE_RETURN_IF_ERROR(Append(draft).status());
  TARE_RETURN_IF_ERROR(EnsurePlainDir(env_, JoinPath(dir_, start.step + "/" + draft.run_id)));
  return draft.run_id;
}

Result<std::string> Task::SidecarFor(const RunRecord& run, const std::string& path, Role role,
                                     const std::string& sha256) const {
  Sidecar s;
  s.subject = path;
  s.subject_sha256 = sha256;
  s.run_id = run.id;
  s.task_id = state_.task_id;
  s.step = run.step;
  s.kind = run.kind;
  s.role = role;
  s.command = run.command;
  s.producer = actor_;
  s.tool_version = kToolVersion;
  if (const ArtifactRecord* config = state_.ArtifactOf(run, Role::kConfig)) {
    s.config_path = config->path;
    s.config_sha256 = config->sha256;
  }
  if (const ArtifactRecord* identity = state_.ArtifactOf(run, Role::kIdentity)) {
    s.identity_path = identity->path;
    s.identity_sha256 = identity->sha256;
  }
  for (const Dependency& d : run.dependencies) {
    // Configuration values are in the linked configuration; a task has dozens of them.
    if (d.type != DependencyType::kConfig) s.inputs.push_back(d);
  }
  s.started = run.started;
  s.finished = FormatUtc(env_->NowNs());
  return EncodeSidecar(s);
}

Status Task::Record(const RunRecord& run, const std::string& path, Role role,
                    std::string_view bytes) {
  const std::string sha256 = Hex(Sha256Of(bytes));
  TARE_ASSIGN_OR_RETURN(const std::string sidecar, SidecarFor(run, path, role, sha256));
  TARE_RETURN_IF_ERROR(
      env_->WriteFileAtomic(JoinPath(dir_, path) + std::string(kSidecarSuffix), sidecar));
  EventDraft draft;
  draft.run_id = run.id;
  draft.type = "artifact";
  draft.data = {{"path", path},
                {"sha256", sha256},
                {"sidecar", Hex(Sha256Of(sidecar))},
                {"bytes", bytes.size()},
                {"role", RoleName(role)}};
  return Append(draft).status();
}

Status Task::CheckArtifact(const RunRecord& run, const std::string& name, Role role,
                           std::string_view bytes) const {
  const std::string path = run.step + "/" + run.id + "/" + name;
  TARE_RETURN_IF_ERROR(CheckRecordable(path).status());
  if (role != Role::kMaterial && role != Role::kReview) {
    if (auto why = EmptinessOf(name, bytes)) {
      return InvalidArgument("{}: {} {}; that is no {}", reason::kEmptyArtifact, Printable(name),
                             *why, role == Role::kRaw ? "raw result" : RoleName(role));
    }
  }
  if (env_->Exists(JoinPath(dir_, path) + std::string(kSidecarSuffix))) {
    return Error(Code::kAlreadyExists,
                 "{}{} lies where its sidecar belongs; nothing is overwritten", path,
                 kSidecarSuffix);
  }
  if (!IsPlainDir(env_, JoinPath(dir_, run.step)) || !IsPlainDir(env_, RunDir(run))) {
    return Error(Code::kPrecondition, "{}: the run's folder is gone or a link",
                 Printable(RunDir(run)));
  }
  return Ok();
}

Status Task::AddBytes(const std::string& run_id, const std::string& name, Role role,
                      std::string_view bytes) {
  const RunRecord* found = state_.FindRun(run_id);
  if (found == nullptr)
    return Error(Code::kNotFound, "run {} is not in the log", Printable(run_id));
  const RunRecord run = *found;
  if (run.ended)
    return Error(Code::kPrecondition, "run {} has ended; nothing is added late", run.id);
  const std::string path = run.step + "/" + run.id + "/" + name;
  if (state_.FindArtifact(path) != nullptr) {
    return Error(Code::kAlreadyExists, "{} was recorded before; nothing is overwritten", path);
  }
  TARE_RETURN_IF_ERROR(CheckArtifact(run, name, role, bytes));
  // Every folder on the way must be a real one.
  const std::string folder = RunDir(run);
  for (size_t slash = name.find('/'); slash != std::string::npos;
       slash = name.find('/', slash + 1)) {
    TARE_RETURN_IF_ERROR(EnsurePlainDir(env_, folder + "/" + name.substr(0, slash)));
  }
  const std::string full = JoinPath(dir_, path);
  TARE_RETURN_IF_ERROR(env_->WriteFileAtomic(full, bytes));
  return Record(run, path, role, bytes);
}

Status Task::AddFile(const std::string& run_id, const std::string& name, Role role,
                     const std::string& source) {
  const RunRecord* run = state_.FindRun(run_id);
  if (run == nullptr) return Error(Code::kNotFound, "run {} is not in the log", Printable(run_id));
  TARE_RETURN_IF_ERROR(CheckPlainFile(env_, source));
  TARE_ASSIGN_OR_RETURN(const auto file, env_->OpenReadable(source));
  if (source != JoinPath(RunDir(*run), name)) return AddBytes(run_id, name, role, file->bytes());
  // It lies where it belongs: the command wrote it there. Sync it and record it in place.
  const std::string path = run->step + "/" + run->id + "/" + name;
  TARE_RETURN_IF_ERROR(CheckArtifact(*run, name, role, file->bytes()));
  for (size_t at = name.find('/'); at != std::string::npos; at = name.find('/', at + 1)) {
    const std::string folder = JoinPath(RunDir(*run), name.substr(0, at));
    if (!IsPlainDir(env_, folder)) {
      return Error(Code::kPrecondition, "{}: not a folder; links are never followed",
                   Printable(folder));
    }
  }
  TARE_ASSIGN_OR_RETURN(const auto handle, env_->OpenWritable(source, Env::Mode::kAppend));
  TARE_RETURN_IF_ERROR(handle->Sync());
  const size_t slash = source.find_last_of('/');
  TARE_RETURN_IF_ERROR(env_->SyncDir(source.substr(0, slash)));
  const RunRecord copy = *run;
  return Record(copy, path, role, file->bytes());
}

Status Task::EndRun(const std::string& run_id, const RunEnd& end) {
  const RunRecord* run = state_.FindRun(run_id);
  if (run == nullptr) return Error(Code::kNotFound, "run {} is not in the log", Printable(run_id));
  EventDraft draft;
  draft.run_id = run_id;
  draft.type = "run-ended";
  draft.data = {{"exit", end.exit_code ? Json(*end.exit_code) : Json()},
                {"signal", end.signal},
                {"conclusion", end.conclusion ? end.conclusion->ToJson() : Json()},
                {"dependencies", DependenciesToJson(end.dependencies)}};
  TARE_RETURN_IF_ERROR(Append(draft).status());
  RemoveHeartbeat(*run);
  return Ok();
}

// The log says that the run is over; what lies in the heartbeat's place changes nothing about it.
void Task::RemoveHeartbeat(const RunRecord& run) {
  if (!IsPlainDir(env_, JoinPath(dir_, run.step)) || !IsPlainDir(env_, RunDir(run))) return;
  const std::string heartbeat = JoinPath(RunDir(run), kHeartbeatFile);
  if (env_->Stat(heartbeat).ok()) (void)env_->Remove(heartbeat);
}

Result<std::vector<std::string>> Task::MarkLostRuns() {
  std::vector<std::string> lost;
  std::vector<std::pair<RunRecord, std::string>> gone;
  for (const RunRecord& run : state_.runs) {
    if (run.ended || run.lost) continue;
    const LivenessReport report = CheckLiveness(env_, run, RunDir(run));
    if (report.liveness == Liveness::kLost) gone.emplace_back(run, report.why);
  }
  for (const auto& [run, why] : gone) {
    EventDraft draft{run.id, "run-lost", {{"why", why}}};
    TARE_RETURN_IF_ERROR(Append(draft).status());
    RemoveHeartbeat(run);
    lost.push_back(run.id);
  }
  return lost;
}

Status Task::Refuse(const std::string& what, std::string_view reason, const std::string& detail) {
  EventDraft draft{NewRunId(env_),
                   "refused",
                   {{"what", Printable(what)}, {"reason", reason}, {"detail", Printable(detail)}}};
  return Append(draft).status();
}

Status Task::WriteIndexes() {
  Staleness staleness(state_);
  const IndexFooter footer{log_->size(), log_->head()};
  const auto write = [&](const std::string& path, const std::string& body) -> Status {
    auto info = env_->Stat(path);
    if (info.ok() && info->kind == FileInfo::Kind::kFile) {
      auto old = env_->ReadFile(path);
      if (old.ok()) {
        auto split = SplitFooter(*old);
        // The same body stays: its older footer is as true as before.
        if (split.ok() && split->first == body) return Ok();
      }
    } else if (info.ok()) {
      return Error(Code::kPrecondition, "{}: not a plain file", Printable(path));
    }
    return env_->WriteFileAtomic(path, WithFooter(body, footer));
  };
  TARE_RETURN_IF_ERROR(write(JoinPath(dir_, kIndexFile), RenderTaskIndex(state_, &staleness)));
  for (const std::string_view name : AllSteps()) {
    const std::string step(name);
    const std::string folder = JoinPath(dir_, step);
    if (!IsPlainDir(env_, folder)) continue;
    TARE_RETURN_IF_ERROR(
        write(JoinPath(folder, kIndexFile), RenderStepIndex(state_, &staleness, step)));
  }
  return Ok();
}

}  // namespace tare::workflow
