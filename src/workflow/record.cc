#include "workflow/record.h"

#include <signal.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <set>
#include <thread>

#include "base/reasons.h"
#include "base/sha256.h"
#include "workflow/ladder.h"
#include "workflow/layout.h"
#include "workflow/spawn.h"
#include "workflow/tracks.h"

namespace tare::workflow {
namespace {

std::string BaseName(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

// Resolved configuration of a run; its digest is the content ID: equal for equal runs anywhere.
Result<std::string> RunConfig(Env* env, const State& state, const std::vector<std::string>& command,
                              const std::vector<Dependency>& dependencies) {
  Json scripts = Json::array();
  for (size_t i = 0; i < command.size(); ++i) {
    auto info = env->Stat(command[i]);
    if (!info.ok() || info->kind != FileInfo::Kind::kFile || info->size_bytes > (16 << 20))
      continue;
    TARE_ASSIGN_OR_RETURN(const std::string digest, HashPath(env, command[i]));
    scripts.push_back({{"argument", i}, {"sha256", digest}});
  }
  Json values = Json::object();
  if (state.config() != nullptr) {
    for (const auto& [key, value] : state.config()->config.values) {
      const KeySpec* spec = FindKey(key);
      if (spec != nullptr && IsSemantic(spec->config_class)) values[key] = value.text;
    }
  }
  TARE_ASSIGN_OR_RETURN(std::string text,
                        CanonicalJson({{"schema", "tare-run-config-1"},
                                       {"command", command},
                                       {"scripts", std::move(scripts)},
                                       {"task", std::move(values)},
                                       {"dependencies", DependenciesToJson(dependencies)}}));
  return text + "\n";
}

bool HeldByAnother(const Status& status) {
  return status.code() == Code::kPrecondition &&
         status.message().find("held by another writer") != std::string::npos;
}

Conclusion FromExitStatus(int64_t exit_code, int64_t signal, const Scope& scope) {
  Conclusion c;
  c.scope = scope;
  c.verdict = Verdict::kInconclusive;
  c.reason = reason::kAbnormalExit;
  if (signal != 0) return c;
  for (const Verdict v : {Verdict::kPass, Verdict::kFail, Verdict::kInconclusive, Verdict::kRefused,
                          Verdict::kWaitingHuman, Verdict::kNotCovered, Verdict::kDiagnosticOnly}) {
    if (ExitCode(v) == exit_code) {
      c.verdict = v;
      c.reason = v == Verdict::kPass ? "" : fmt::format("exit-{}", VerdictName(v));
    }
  }
  return c;
}

}  // namespace

Result<std::unique_ptr<Task>> OpenWaiting(Env* env, const std::string& dir,
                                          const std::string& actor, int64_t wait_s) {
  const int64_t end = env->MonotonicNs() + wait_s * 1'000'000'000;
  while (true) {
    auto task = Task::Open(env, dir, actor);
    if (!HeldByAnother(task.status()) || env->MonotonicNs() > end) return task;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

namespace {

// One line on stderr, and nothing worse when nobody reads it.
void Tell(const std::string& line) { std::fprintf(stderr, "tare: %s\n", Printable(line).c_str()); }

// While a run ends: a reader of our output that goes away must not take the recorder along.
class NoPipeSignal {
 public:
  NoPipeSignal() {
    struct sigaction ignore = {};
    ignore.sa_handler = SIG_IGN;
    ::sigaction(SIGPIPE, &ignore, &old_);
  }
  ~NoPipeSignal() { ::sigaction(SIGPIPE, &old_, nullptr); }
  NoPipeSignal(const NoPipeSignal&) = delete;
  NoPipeSignal& operator=(const NoPipeSignal&) = delete;

 private:
  struct sigaction old_ = {};
};

// For the end of a run: what its command cost must not be lost to a writer that takes its time.
Result<std::unique_ptr<Task>> OpenToEnd(Env* env, const std::string& dir, const std::string& actor,
                                        const std::string& run_id, Heartbeat* heartbeat) {
  const int64_t begin = env->MonotonicNs();
  bool said = false;
  while (true) {
    auto task = Task::Open(env, dir, actor);
    if (!HeldByAnother(task.status())) return task;
    heartbeat->Beat();
    if (!said && env->MonotonicNs() - begin > 2'000'000'000) {
      said = true;
      Tell(
          fmt::format("the command of run {} has ended; to record it, this waits for another "
                      "writer to leave {}",
                      run_id, JoinPath(dir, kLockFile)));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// Before anything runs: the frozen baseline (TRACK-03, STOP-02) and the ladder (CHEAP-01).
EvidenceStatus MayRecord(const State& state, const RecordOptions& options) {
  Staleness staleness(state);
  if (options.step == "C1" && options.kind == EvidenceKind::kE10) {
    const EvidenceStatus tune = MayTune(state, &staleness);
    if (tune.verdict != Verdict::kPass) return tune;
  }
  if (options.candidate.empty()) return {Verdict::kPass, "", ""};
  return MaySchedule(state, &staleness, options.candidate, options.kind,
                     !options.skip_levels.empty());
}

// The run was started and cannot go on: it ends without a result, and `why` goes to the caller.
Status EndWithout(Task* task, const std::string& run_id, const RunEnd& end, const Status& why) {
  const Status ended = task->EndRun(run_id, end);
  if (!ended.ok()) return ended.Annotate("after " + why.ToString());
  return why.Annotate(fmt::format("run {} ended without a result", run_id));
}

// Keeps why the candidate's unrun cheaper levels are passed over, a run of step `task`.
Status Excuse(Task* task, const RecordOptions& options) {
  std::vector<int> levels;
  {
    Staleness staleness(task->state());
    for (const LadderLevel& l : LadderOf(task->state(), &staleness, options.candidate)) {
      if (l.level < LevelOf(options.kind) && l.state == LadderLevel::State::kUnrun)
        levels.push_back(l.level);
    }
  }
  if (levels.empty()) return Ok();
  RunStart start;
  start.step = "task";
  start.candidate = options.candidate;
  TARE_ASSIGN_OR_RETURN(const std::string run, task->StartRun(start));
  for (const int level : levels) {
    TARE_ASSIGN_OR_RETURN(const std::string text, CanonicalJson({{"schema", "tare.ladder-unrun/1"},
                                                                 {"candidate", options.candidate},
                                                                 {"level", level},
                                                                 {"reason", options.skip_levels}}));
    const Status s = task->AddBytes(run, ExcuseName(level), Role::kMaterial, text + "\n");
    if (!s.ok()) return EndWithout(task, run, {}, s);
  }
  return task->EndRun(run, {});
}

// How a run ends whose command has run. Nothing that goes wrong in here keeps the end out of the
// log: what cannot be kept is refused by name, and the run then concludes no pass.
class Ending {
 public:
  Ending(Env* env, const RecordOptions& options, Task* task, std::string run_id,
         Heartbeat* heartbeat)
      : env_(env),
        options_(options),
        task_(task),
        run_id_(std::move(run_id)),
        step_(task->state().FindRun(run_id_)->step),
        run_dir_(task->RunDir(*task->state().FindRun(run_id_))),
        heartbeat_(heartbeat) {}

  // `end` holds exit status and changed inputs.
  Result<RecordReport> Write(const Spawned& ran, const std::string& identity, RunEnd end) {
    if (!ran.output.ok()) Refuse(reason::kUnreadable, "stdout.txt", ran.output.message());
    if (IsPlainDir(env_, JoinPath(task_->dir(), step_)) && IsPlainDir(env_, run_dir_)) {
      Status s = task_->AddBytes(run_id_, "identity.json", Role::kIdentity, identity);
      if (!s.ok()) Refuse(reason::kUnreadable, "identity.json", s.message());
      Output("stdout.txt");
      Output("stderr.txt");
      Folder();
    } else {
      Replace(run_id_, "the run's folder is no folder any more; links are never followed");
    }
    end.conclusion = Conclude(end);
    if (end.conclusion) KeepConclusion(*end.conclusion);
    for (const Refusal& r : refusals_) {
      const std::string what = fmt::format("{}: {}", r.name, r.why);
      (void)task_->Refuse("record", r.reason, fmt::format("run {}: {}", run_id_, what));
      report_.refused.push_back(fmt::format("{} ({})", what, r.reason));
    }
    Status ended = task_->EndRun(run_id_, end);
    if (!ended.ok() && end.conclusion) {
      // A conclusion that no event can hold is none.
      report_.refused.push_back(fmt::format("conclusion: {}", ended.message()));
      end.conclusion.reset();
      ended = task_->EndRun(run_id_, end);
    }
    if (!ended.ok()) return ended.Annotate(fmt::format("the end of run {}", run_id_));
    TARE_RETURN_IF_ERROR(task_->WriteIndexes());
    const RunRecord& run = *task_->state().FindRun(run_id_);
    report_.run_id = run_id_;
    report_.exit_code = end.exit_code;
    report_.signal = end.signal;
    for (const size_t i : run.artifacts)
      report_.artifacts.push_back(task_->state().artifacts[i].path);
    Staleness staleness(task_->state());
    report_.status = AssessRun(task_->state(), &staleness, run);
    if (!report_.refused.empty()) {
      report_.status.detail += report_.status.detail.empty() ? "" : "; ";
      report_.status.detail += report_.refused.size() == 1
                                   ? "refused: " + report_.refused[0]
                                   : fmt::format("{} refused, the first: {}",
                                                 report_.refused.size(), report_.refused[0]);
    }
    return std::move(report_);
  }

 private:
  struct Refusal {
    std::string_view reason;
    std::string name, why;
  };
  void Refuse(std::string_view reason, std::string_view name, std::string_view why) {
    refusals_.push_back({reason, Printable(name), Printable(why)});
  }
  // Its folder was exchanged for something else: then nothing that it says counts.
  void Replace(std::string_view name, std::string_view why) {
    Refuse(reason::kNotPlainFile, name, why);
    replaced_ = true;
  }

  std::string InTask(const std::string& name) const {
    return fmt::format("{}/{}/{}", step_, run_id_, name);
  }

  void Keep(const std::string& name, Role role) {
    heartbeat_->Beat();
    const auto path = CheckRecordable(InTask(name));
    if (!path.ok()) return Refuse(reason::kUnrecordedFile, name, path.status().message());
    const Status s = task_->AddFile(run_id_, name, role, JoinPath(run_dir_, name));
    if (s.ok()) return;
    // An empty result says its reason in front.
    const bool empty = s.message().starts_with(reason::kEmptyArtifact);
    Refuse(empty ? reason::kEmptyArtifact : reason::kUnrecordedFile, name, s.message());
  }

  // Output that says nothing is no raw result, but it is kept.
  void Output(const std::string& name) {
    const std::string path = JoinPath(run_dir_, name);
    Status s = CheckPlainFile(env_, path);
    if (s.ok()) {
      const auto file = env_->OpenReadable(path);
      s = file.status();
      if (file.ok()) {
        const bool raw = name == "stdout.txt" && !EmptinessOf(name, (*file)->bytes());
        return Keep(name, raw ? Role::kRaw : Role::kMaterial);
      }
    }
    Refuse(reason::kArtifactMissing, name, s.message());
  }

  // Every plain file that the command left in TARE_OUT.
  void Folder() {
    const std::string out = JoinPath(run_dir_, "out");
    if (!env_->Exists(out)) {
      return Refuse(reason::kArtifactMissing, "out", "the command removed its own folder");
    }
    if (!IsPlainDir(env_, out)) {
      return Replace("out", "no folder any more; links are never followed");
    }
    std::vector<std::string> files, folders = {"out"};
    while (!folders.empty()) {
      const std::string folder = folders.back();
      folders.pop_back();
      const auto names = env_->List(JoinPath(run_dir_, folder));
      if (!names.ok()) {
        Refuse(reason::kUnreadable, folder, names.status().message());
        continue;
      }
      if (names->empty()) continue;
      if (!CheckRecordable(InTask(folder + "/x")).ok()) {
        Refuse(reason::kUnrecordedFile, folder,
               fmt::format("its files would lie deeper than {} parts, or have a name that no log "
                           "can keep",
                           kMaxPathParts));
        continue;
      }
      for (const std::string& name : *names) {
        const std::string path = JoinPath(folder, name);
        const auto info = env_->Stat(JoinPath(run_dir_, path));
        if (!info.ok()) {
          Refuse(reason::kUnreadable, path, info.status().message());
        } else if (info->kind == FileInfo::Kind::kDirectory) {
          folders.push_back(path);
        } else if (info->kind == FileInfo::Kind::kFile) {
          files.push_back(path);
        } else {
          Refuse(reason::kNotPlainFile, path, "a link, pipe or device is no result");
        }
      }
    }
    std::sort(files.begin(), files.end());
    for (const std::string& path : files) {
      if (path == "out/conclusion.json") {
        conclusion_in_out_ = true;
        continue;
      }
      const bool material = std::find(options_.materials.begin(), options_.materials.end(),
                                      path.substr(4)) != options_.materials.end();
      Keep(path, material ? Role::kMaterial : Role::kRaw);
    }
  }

  std::optional<Conclusion> Conclude(const RunEnd& end) {
    const std::string left = JoinPath(run_dir_, "out/conclusion.json");
    std::optional<Conclusion> conclusion;
    if (options_.conclude == "exit-status") {
      conclusion = FromExitStatus(end.exit_code.value_or(-1), end.signal, options_.scope);
    } else if (!options_.conclude.empty() || conclusion_in_out_) {
      const std::string path = options_.conclude.empty() ? left : options_.conclude;
      const std::string name = options_.conclude.empty() ? "out/conclusion.json" : path;
      auto parsed = ReadConclusion(path);
      if (parsed.ok()) {
        conclusion = *std::move(parsed);
      } else {
        Refuse(reason::kMalformedEvidence, name, parsed.status().message());
      }
    }
    const bool taken = conclusion && options_.conclude.empty();
    if (replaced_) {
      conclusion = Conclusion();
      conclusion->verdict = Verdict::kRefused;
      conclusion->reason = reason::kNotPlainFile;
      conclusion->scope = options_.scope;
    } else if (conclusion && conclusion->verdict == Verdict::kPass && !refusals_.empty()) {
      conclusion->verdict = Verdict::kInconclusive;
      conclusion->reason = refusals_[0].reason;
      conclusion->inferences.clear();
      conclusion_in_out_ = conclusion_in_out_ && !taken;
      if (taken) Keep("out/conclusion.json", Role::kMaterial);  // as the command wrote it
    } else if (taken) {
      // Recorded above it, in canonical spelling.
      const Status removed = env_->Remove(left);
      conclusion_in_out_ = !removed.ok();
    }
    if (conclusion_in_out_ && !replaced_) Keep("out/conclusion.json", Role::kMaterial);
    return conclusion;
  }

  Result<Conclusion> ReadConclusion(const std::string& path) {
    TARE_RETURN_IF_ERROR(CheckPlainFile(env_, path));
    TARE_ASSIGN_OR_RETURN(const std::string bytes, env_->ReadFile(path));
    TARE_ASSIGN_OR_RETURN(Conclusion conclusion, Conclusion::Parse(bytes));
    TARE_ASSIGN_OR_RETURN(const std::string text, CanonicalJson(conclusion.ToJson()));
    if (text.size() > kMaxEventBytes / 2) {
      return Error(Code::kExhausted, "a conclusion of {} bytes; at most {} fit into the log",
                   text.size(), kMaxEventBytes / 2);
    }
    return conclusion;
  }

  void KeepConclusion(const Conclusion& conclusion) {
    const auto text = CanonicalJson(conclusion.ToJson());
    Status s = text.status();
    if (s.ok()) s = task_->AddBytes(run_id_, "conclusion.json", Role::kConclusion, *text + "\n");
    if (!s.ok()) Refuse(reason::kUnreadable, "conclusion.json", s.message());
  }

  Env* env_;
  const RecordOptions& options_;
  Task* task_;
  const std::string run_id_, step_, run_dir_;
  Heartbeat* heartbeat_;
  std::vector<Refusal> refusals_;
  bool replaced_ = false;
  bool conclusion_in_out_ = false;
  RecordReport report_;
};

}  // namespace

Result<RecordReport> RecordCommand(Env* env, const std::string& dir, const std::string& actor,
                                   const RecordOptions& options) {
  if (options.command.empty()) return InvalidArgument("a command is needed after --");
  if (options.heartbeat_s < 1 || options.heartbeat_s > 86400)
    return InvalidArgument("--heartbeat: 1 to 86,400 seconds are needed");
  for (const std::string& word : options.command) {
    if (!IsUtf8(word)) return InvalidArgument("the command holds bytes that no log can keep");
  }
  if (options.conclude == "exit-status" && options.scope.empty()) {
    return InvalidArgument("--conclude exit-status needs --scope: a pass without scope is no pass");
  }
  std::string run_id, run_dir;
  std::vector<Input> inputs;
  std::optional<Heartbeat> heartbeat;
  {
    TARE_ASSIGN_OR_RETURN(const auto task, OpenWaiting(env, dir, actor));
    TARE_RETURN_IF_ERROR(task->MarkLostRuns().status());
    if (const EvidenceStatus may = MayRecord(task->state(), options);
        may.verdict != Verdict::kPass) {
      TARE_RETURN_IF_ERROR(task->Refuse("record", may.reason, may.detail));
      RecordReport report;
      report.status = may;
      return report;
    }
    if (!options.candidate.empty() && !options.skip_levels.empty())
      TARE_RETURN_IF_ERROR(Excuse(task.get(), options));
    RunStart start;
    TARE_ASSIGN_OR_RETURN(start.dependencies,
                          ResolveDependencies(env, task->state(), options.inputs, options.depends,
                                              options.config_keys));
    const std::string executable = FindExecutable(options.command[0]);
    if (executable.empty()) {
      return Error(Code::kNotFound, "{}: no such command", Printable(options.command[0]));
    }
    char resolved[PATH_MAX];
    if (::realpath(executable.c_str(), resolved) == nullptr) {
      return Errno("realpath", executable, errno);
    }
    TARE_ASSIGN_OR_RETURN(const std::string tool, HashPath(env, resolved));
    start.dependencies.push_back({DependencyType::kTool, BaseName(resolved), tool});
    inputs.push_back({start.dependencies.back(), resolved});
    for (const std::string& text : options.inputs) {
      TARE_ASSIGN_OR_RETURN(Input input, ParseInput(text));
      for (const Dependency& d : start.dependencies) {
        if (d.type == input.dependency.type && d.name == input.dependency.name)
          input.dependency = d;
      }
      inputs.push_back(std::move(input));
    }
    TARE_ASSIGN_OR_RETURN(const std::string config,
                          RunConfig(env, task->state(), options.command, start.dependencies));
    start.step = options.step;
    start.kind = options.kind;
    start.parent = options.parent;
    start.command = options.command;
    start.candidate = options.candidate;
    start.content_id = Hex(Sha256Of(config));
    start.heartbeat_s = options.heartbeat_s;
    TARE_ASSIGN_OR_RETURN(run_id, task->StartRun(start));
    run_dir = task->RunDir(*task->state().FindRun(run_id));
    heartbeat.emplace(env, run_dir, options.heartbeat_s);
    heartbeat->Beat();  // others may look as soon as the lock is free
    Status ready = EnsurePlainDir(env, run_dir + "/out");
    if (ready.ok()) ready = task->AddBytes(run_id, "config.json", Role::kConfig, config);
    if (!ready.ok()) return EndWithout(task.get(), run_id, {}, ready);
  }
  SpawnOptions spawn;
  spawn.command = options.command;
  spawn.quiet = options.quiet;
  const std::string out = AbsolutePath(run_dir) + "/out";
  spawn.variables = {"TARE_TASK=" + AbsolutePath(dir), "TARE_STEP=" + options.step,
                     "TARE_RUN_ID=" + run_id, "TARE_OUT=" + out};
  for (std::string& w : spawn.command) {
    if (!options.expand_out) break;
    for (size_t at = w.find("{out}"); at != std::string::npos; at = w.find("{out}", at)) {
      w.replace(at, 5, out);
      at += out.size();
    }
  }
  const auto ran = Spawn(env, spawn, run_dir, &*heartbeat);
  const NoPipeSignal no_pipe_signal;
  RunEnd end;
  std::string identity;
  if (ran.ok()) {
    if (ran->cut_off) {
      Tell(fmt::format(
          "a process that the command left behind still wrote {} s after the command's end; what "
          "came later is not kept",
          kLingerNs / 1'000'000'000));
    }
    end.exit_code = ran->exit_code;
    end.signal = ran->signal;
    end.dependencies = ChangedInputs(env, inputs, [&] { heartbeat->Beat(); });
    identity = ExecutionIdentity(env, options.command, ran->libraries)
                   .dump(1, ' ', false, Json::error_handler_t::replace) +
               "\n";
  }
  TARE_ASSIGN_OR_RETURN(const auto task, OpenToEnd(env, dir, actor, run_id, &*heartbeat));
  if (!ran.ok()) return EndWithout(task.get(), run_id, end, ran.status());
  return Ending(env, options, task.get(), run_id, &*heartbeat).Write(*ran, identity, end);
}

Result<RecordReport> AddArtifacts(Env* env, const std::string& dir, const std::string& actor,
                                  const AddOptions& options) {
  if (options.raw.empty()) return InvalidArgument("at least one file is needed");
  // Everything is looked at before anything is written.
  struct Source {
    std::string path, name;
    Role role;
  };
  std::vector<Source> sources;
  if (!options.config.empty()) sources.push_back({options.config, "config.json", Role::kConfig});
  if (!options.identity.empty())
    sources.push_back({options.identity, "identity.json", Role::kIdentity});
  for (const std::string& path : options.raw)
    sources.push_back({path, "out/" + BaseName(path), Role::kRaw});
  for (const std::string& path : options.materials)
    sources.push_back({path, "out/" + BaseName(path), Role::kMaterial});
  std::set<std::string> names;
  for (const Source& s : sources) {
    TARE_RETURN_IF_ERROR(CheckPlainFile(env, s.path));
    TARE_RETURN_IF_ERROR(CheckRecordable(SomeArtifactPath(options.step, s.name)).status());
    if (!names.insert(s.name).second) {
      return InvalidArgument("{}: two files of that name in one run", Printable(BaseName(s.path)));
    }
  }
  if (!options.conclusion.empty()) TARE_RETURN_IF_ERROR(CheckPlainFile(env, options.conclusion));
  std::vector<Source> meaningful = sources;
  if (!options.conclusion.empty())
    meaningful.push_back({options.conclusion, "conclusion.json", Role::kConclusion});
  for (const Source& s : meaningful) {
    if (s.role == Role::kMaterial) continue;
    TARE_ASSIGN_OR_RETURN(const auto file, env->OpenReadable(s.path));
    if (auto why = EmptinessOf(s.name, file->bytes())) {
      TARE_ASSIGN_OR_RETURN(const auto task, OpenWaiting(env, dir, actor));
      TARE_RETURN_IF_ERROR(
          task->Refuse("add", reason::kEmptyArtifact, BaseName(s.path) + " " + *why));
      RecordReport refused;
      refused.status = {Verdict::kRefused, std::string(reason::kEmptyArtifact),
                        Printable(BaseName(s.path)) + " " + *why};
      return refused;
    }
  }
  std::optional<Conclusion> conclusion;
  std::string conclusion_text;
  if (!options.conclusion.empty()) {
    TARE_ASSIGN_OR_RETURN(const std::string bytes, env->ReadFile(options.conclusion));
    TARE_ASSIGN_OR_RETURN(conclusion, Conclusion::Parse(bytes));
    TARE_ASSIGN_OR_RETURN(conclusion_text, CanonicalJson(conclusion->ToJson()));
  }
  TARE_ASSIGN_OR_RETURN(const auto task, OpenWaiting(env, dir, actor));
  RunStart start;
  TARE_ASSIGN_OR_RETURN(start.dependencies,
                        ResolveDependencies(env, task->state(), options.inputs, options.depends,
                                            options.config_keys));
  start.step = options.step;
  start.kind = options.kind;
  start.parent = options.parent;
  start.candidate = options.candidate;
  if (!options.config.empty()) {
    TARE_ASSIGN_OR_RETURN(start.content_id, HashPath(env, options.config));
  }
  RecordReport report;
  TARE_ASSIGN_OR_RETURN(report.run_id, task->StartRun(start));
  RunEnd end;
  end.exit_code = options.exit_code;
  const auto fill = [&]() -> Status {
    for (const Source& s : sources)
      TARE_RETURN_IF_ERROR(task->AddFile(report.run_id, s.name, s.role, s.path));
    if (!conclusion) return Ok();
    TARE_RETURN_IF_ERROR(task->AddBytes(report.run_id, "conclusion.json", Role::kConclusion,
                                        conclusion_text + "\n"));
    end.conclusion = conclusion;
    return task->EndRun(report.run_id, end);
  };
  Status filled = fill();
  if (!filled.ok() || !conclusion) {
    end.conclusion.reset();
    if (!filled.ok()) return EndWithout(task.get(), report.run_id, end, filled);
    TARE_RETURN_IF_ERROR(task->EndRun(report.run_id, end));
  }
  TARE_RETURN_IF_ERROR(task->WriteIndexes());
  const RunRecord& run = *task->state().FindRun(report.run_id);
  report.exit_code = options.exit_code;
  for (const size_t i : run.artifacts) report.artifacts.push_back(task->state().artifacts[i].path);
  Staleness staleness(task->state());
  report.status = AssessRun(task->state(), &staleness, run);
  return report;
}

}  // namespace tare::workflow
