#include "workflow/record.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <thread>

#include "base/reasons.h"
#include "base/sha256.h"
#include "workflow/ladder.h"
#include "workflow/layout.h"
#include "workflow/process.h"
#include "workflow/tracks.h"
#include "workflow/verify.h"

extern char** environ;

namespace tare::workflow {
namespace {

std::string BaseName(const std::string& path) { return path.substr(path.find_last_of('/') + 1); }

std::string AbsolutePath(const std::string& path) {
  if (path.starts_with('/')) return path;
  char buffer[4096];
  if (::getcwd(buffer, sizeof(buffer)) == nullptr) return path;
  return JoinPath(buffer, path);
}

// The file that execvp would run, or empty.
std::string FindExecutable(const std::string& name) {
  if (name.find('/') != std::string::npos) return name;
  const char* path = std::getenv("PATH");
  std::string_view rest = path == nullptr ? "/usr/bin:/bin" : path;
  while (!rest.empty()) {
    const size_t colon = std::min(rest.find(':'), rest.size());
    const std::string candidate = JoinPath(rest.substr(0, colon), name);
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
    rest.remove_prefix(std::min(colon + 1, rest.size()));
  }
  return "";
}

Result<Dependency> ParseInput(Env* env, const std::string& text) {
  const size_t colon = text.find(':');
  const auto type = ParseDependencyType(text.substr(0, colon));
  if (colon == std::string::npos || !type || *type == DependencyType::kConfig ||
      *type == DependencyType::kArtifact) {
    return InvalidArgument(
        "--input {}: TYPE:PATH or TYPE:NAME=PATH is needed, TYPE one of code, contract, image, "
        "weights, tokens, hardware, tool, threshold",
        Printable(text));
  }
  std::string name = text.substr(colon + 1), path = name;
  const size_t equals = name.find('=');
  if (equals != std::string::npos) {
    path = name.substr(equals + 1);
    name = name.substr(0, equals);
  }
  TARE_ASSIGN_OR_RETURN(std::string digest, HashPath(env, path));
  return Dependency{*type, name, digest};
}

Result<Dependency> ParseDepends(const State& state, const std::string& text) {
  const size_t colon = text.find(':');
  const auto type = ParseDependencyType(text.substr(0, colon));
  if (colon == std::string::npos || !type) {
    return InvalidArgument("--depends {}: TYPE:NAME=SHA256 or artifact:STEP/NAME is needed",
                           Printable(text));
  }
  std::string name = text.substr(colon + 1);
  const size_t equals = name.rfind('=');
  if (*type == DependencyType::kArtifact && equals == std::string::npos) {
    // The latest artifact of that name.
    for (auto a = state.artifacts.rbegin(); a != state.artifacts.rend(); ++a) {
      auto path = ParseArtifactPath(a->path);
      if (path.ok() && LogicalName(*path) == name) return Dependency{*type, name, a->sha256};
    }
    return Error(Code::kNotFound, "--depends {}: no artifact of that name is recorded",
                 Printable(text));
  }
  if (equals == std::string::npos) {
    return InvalidArgument("--depends {}: =SHA256 is missing", Printable(text));
  }
  const std::string digest = name.substr(equals + 1);
  TARE_RETURN_IF_ERROR(ParseSha256(digest).status().Annotate("--depends " + Printable(text)));
  return Dependency{*type, name.substr(0, equals), digest};
}

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

// What the process has mapped as code; nothing while it is still our own image before its exec.
std::vector<std::string> MappedLibraries(int64_t pid, const std::string& executable) {
  char now[PATH_MAX] = {}, own[PATH_MAX] = {};
  if (::readlink(fmt::format("/proc/{}/exe", pid).c_str(), now, sizeof(now) - 1) < 0) return {};
  if (::readlink("/proc/self/exe", own, sizeof(own) - 1) < 0) return {};
  if (std::strcmp(now, own) == 0 && executable != own) return {};
  std::set<std::string> out;
  std::ifstream maps(fmt::format("/proc/{}/maps", pid));
  for (std::string line; std::getline(maps, line);) {
    const size_t slash = line.find('/');
    if (slash == std::string::npos || line.find(" r-xp ") == std::string::npos) continue;
    out.insert(line.substr(slash));
  }
  return {out.begin(), out.end()};
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

// Copies what comes through `from` to a file and, unless quiet, to our own stream.
struct Pipe {
  int from = -1;
  int to = -1;
  std::unique_ptr<WritableFile> file;
  bool Pump() {
    char buffer[1 << 16];
    const ssize_t n = ::read(from, buffer, sizeof(buffer));
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) return true;
    if (n <= 0) return false;
    if (Status s = file->Append({buffer, static_cast<size_t>(n)}); !s.ok() && failed.ok())
      failed = s;
    for (ssize_t at = 0; to >= 0 && at < n;) {
      const ssize_t w = ::write(to, buffer + at, static_cast<size_t>(n - at));
      if (w <= 0) break;  // nobody reads our output any more: the file still gets it
      at += w;
    }
    return true;
  }
  Status failed;
};

volatile sig_atomic_t child_to_signal = 0;
void Forward(int number) {
  if (child_to_signal > 0) ::kill(child_to_signal, number);
}

struct Ran {
  std::optional<int64_t> exit_code;
  int64_t signal = 0;
  std::vector<std::string> libraries;
};

Result<Ran> Spawn(Env* env, const RecordOptions& options, const std::string& run_dir,
                  const std::string& task_dir, const std::string& run_id) {
  TARE_RETURN_IF_ERROR(EnsurePlainDir(env, run_dir + "/out"));
  Pipe pipes[2];
  int fds[2][2];
  const char* names[2] = {"/stdout.txt", "/stderr.txt"};
  for (int i = 0; i < 2; ++i) {
    TARE_ASSIGN_OR_RETURN(pipes[i].file,
                          env->OpenWritable(run_dir + names[i], Env::Mode::kExclusive));
    if (::pipe2(fds[i], O_CLOEXEC) != 0) return Errno("pipe", names[i], errno);
    pipes[i].from = fds[i][0];
    pipes[i].to = options.quiet ? -1 : i + 1;
  }
  // Everything that allocates happens before the fork.
  std::vector<std::string> variables = {"TARE_TASK=" + AbsolutePath(task_dir),
                                        "TARE_STEP=" + options.step, "TARE_RUN_ID=" + run_id,
                                        "TARE_OUT=" + AbsolutePath(run_dir) + "/out"};
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string_view v = *e;
    if (!v.starts_with("TARE_TASK=") && !v.starts_with("TARE_STEP=") &&
        !v.starts_with("TARE_RUN_ID=") && !v.starts_with("TARE_OUT=")) {
      variables.emplace_back(v);
    }
  }
  std::vector<char*> envp, argv;
  for (std::string& v : variables) envp.push_back(v.data());
  envp.push_back(nullptr);
  std::vector<std::string> words = options.command;
  if (options.expand_out) {
    const std::string out = AbsolutePath(run_dir) + "/out";
    for (std::string& w : words) {
      for (size_t at = w.find("{out}"); at != std::string::npos; at = w.find("{out}", at)) {
        w.replace(at, 5, out);
        at += out.size();
      }
    }
  }
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  const std::string executable = FindExecutable(options.command[0]);
  if (executable.empty()) {
    return Error(Code::kNotFound, "{}: no such command", Printable(options.command[0]));
  }
  char resolved[PATH_MAX] = {};
  if (::realpath(executable.c_str(), resolved) == nullptr)
    return Errno("realpath", executable, errno);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return Errno("fork", options.command[0], errno);
  if (child == 0) {
    // A recorder that is killed takes the command along: no half-recorded run goes on unseen.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    ::dup2(fds[0][1], 1);
    ::dup2(fds[1][1], 2);
    ::execve(executable.c_str(), argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(fds[0][1]);
  ::close(fds[1][1]);
  child_to_signal = child;
  struct sigaction forward = {}, old_int = {}, old_term = {};
  forward.sa_handler = Forward;
  ::sigaction(SIGINT, &forward, &old_int);
  ::sigaction(SIGTERM, &forward, &old_term);
  struct sigaction ignore = {}, old_pipe = {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &old_pipe);

  Ran ran;
  std::set<std::string> libraries;
  const std::string heartbeat = JoinPath(run_dir, kHeartbeatFile);
  int64_t next_beat = 0;
  // A program loads most libraries as it starts: look often then, and at every heartbeat.
  const int64_t start = env->MonotonicNs();
  int64_t next_look = start;
  bool open[2] = {true, true};
  bool exited = false;
  int status = 0;
  while (!exited || open[0] || open[1]) {
    const int64_t now = env->MonotonicNs();
    if (now >= next_beat) {
      auto file = env->OpenWritable(heartbeat, Env::Mode::kTruncate);
      if (file.ok()) (void)(*file)->Append(FormatUtc(env->NowNs()) + "\n");
      next_beat = now + options.heartbeat_s * 1'000'000'000;
      next_look = std::min(next_look, now);
    }
    if (now >= next_look) {
      for (std::string& l : MappedLibraries(child, resolved)) libraries.insert(std::move(l));
      next_look = now - start < 300'000'000 ? now + 200'000 : INT64_MAX;
    }
    pollfd polls[2];
    nfds_t count = 0;
    for (int i = 0; i < 2; ++i) {
      if (open[i]) polls[count++] = {pipes[i].from, POLLIN, 0};
    }
    // A grandchild may hold the pipes open after the command itself has ended.
    if (::poll(polls, count,
               exited                      ? 200
               : now - start < 20'000'000  ? 0
               : now - start < 300'000'000 ? 2
                                           : 20) > 0) {
      for (int i = 0; i < 2; ++i) {
        for (nfds_t k = 0; k < count; ++k) {
          if (open[i] && polls[k].fd == pipes[i].from && polls[k].revents != 0)
            open[i] = pipes[i].Pump();
        }
      }
    } else if (exited) {
      break;
    }
    if (!exited) exited = ::waitpid(child, &status, WNOHANG) == child;
  }
  child_to_signal = 0;
  ::sigaction(SIGINT, &old_int, nullptr);
  ::sigaction(SIGTERM, &old_term, nullptr);
  ::sigaction(SIGPIPE, &old_pipe, nullptr);
  for (Pipe& p : pipes) {
    ::close(p.from);
    if (!p.failed.ok()) return p.failed.Annotate("output of the command");
    TARE_RETURN_IF_ERROR(p.file->Sync());
  }
  if (WIFEXITED(status)) ran.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) ran.signal = WTERMSIG(status);
  ran.libraries.assign(libraries.begin(), libraries.end());
  return ran;
}

}  // namespace

Result<std::vector<Dependency>> ResolveDependencies(Env* env, const State& state,
                                                    const std::vector<std::string>& inputs,
                                                    const std::vector<std::string>& depends,
                                                    const std::vector<std::string>& config_keys) {
  std::vector<Dependency> out;
  for (const std::string& text : inputs) {
    TARE_ASSIGN_OR_RETURN(Dependency d, ParseInput(env, text));
    out.push_back(std::move(d));
  }
  for (const std::string& text : depends) {
    TARE_ASSIGN_OR_RETURN(Dependency d, ParseDepends(state, text));
    out.push_back(std::move(d));
  }
  if (state.config() != nullptr) {
    const TaskConfig& config = state.config()->config;
    if (config_keys.empty()) {
      for (Dependency& d : config.SemanticDependencies()) out.push_back(std::move(d));
    }
    for (const std::string& key : config_keys) {
      if (key == "none") continue;
      if (FindKey(key) == nullptr) {
        return InvalidArgument("--config-key {}: unknown; the nearest known one is {}",
                               Printable(key), NearestKey(key));
      }
      out.push_back({DependencyType::kConfig, key, config.KeyDigest(key)});
    }
  }
  std::set<std::string> seen;
  for (const Dependency& d : out) {
    if (!seen.insert(DependencyId(d.type, d.name)).second) {
      return InvalidArgument("dependency {} is given twice", DependencyId(d.type, d.name));
    }
  }
  return out;
}

Result<std::string> HashPath(Env* env, const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const FileInfo info, env->Stat(path));
  if (info.kind == FileInfo::Kind::kFile) {
    TARE_ASSIGN_OR_RETURN(const auto file, env->OpenReadable(path));
    return Hex(Sha256Of(file->bytes()));
  }
  if (info.kind != FileInfo::Kind::kDirectory) {
    return InvalidArgument("{}: a plain file or a folder is needed", Printable(path));
  }
  TARE_ASSIGN_OR_RETURN(const auto tree, ListTree(env, path));
  std::string lines;
  for (const TreeEntry& e : tree) {
    if (e.info.kind != FileInfo::Kind::kFile) {
      return InvalidArgument("{}: a link or device inside a folder has no digest",
                             Printable(e.path));
    }
    TARE_ASSIGN_OR_RETURN(const auto file, env->OpenReadable(JoinPath(path, e.path)));
    lines += Hex(Sha256Of(file->bytes())) + "  " + e.path + "\n";
  }
  return Hex(Sha256Of(lines));
}

Result<std::unique_ptr<Task>> OpenWaiting(Env* env, const std::string& dir,
                                          const std::string& actor, int64_t wait_s) {
  const int64_t end = env->MonotonicNs() + wait_s * 1'000'000'000;
  while (true) {
    auto task = Task::Open(env, dir, actor);
    const bool held = !task.ok() && task.status().code() == Code::kPrecondition &&
                      task.status().message().find("held by another writer") != std::string::npos;
    if (!held || env->MonotonicNs() > end) return task;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

Json ExecutionIdentity(Env* env, const std::vector<std::string>& command,
                       const std::vector<std::string>& libraries) {
  Json out = {{"schema", "tare-identity-1"}};
  const ProcessIdentity self = ThisProcess();
  out["host"] = self.host;
  utsname name = {};
  ::uname(&name);
  out["kernel"] = fmt::format("{} {} {}", name.sysname, name.release, name.machine);
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (line.starts_with("model name") && !out.contains("cpu")) out["cpu"] = line.substr(colon + 2);
    if (line.starts_with("flags")) {
      out["cpu_features"] = line.substr(colon + 2);
      break;
    }
  }
  out["cpus"] = static_cast<uint64_t>(std::thread::hardware_concurrency());
  Json devices = Json::array();
  for (const char* folder : {"/proc/driver/nvidia/gpus"}) {
    auto names = env->List(folder);
    if (!names.ok()) continue;
    for (const std::string& gpu : *names) {
      auto text = env->ReadFile(fmt::format("{}/{}/information", folder, gpu));
      if (text.ok()) devices.push_back(*text);
    }
  }
  auto driver = env->ReadFile("/proc/driver/nvidia/version");
  out["driver"] = driver.ok() ? *driver : "none";
  out["devices"] = std::move(devices);
  char cwd[4096];
  if (::getcwd(cwd, sizeof(cwd)) != nullptr) out["working_directory"] = cwd;
  if (!command.empty()) {
    const std::string executable = FindExecutable(command[0]);
    char resolved[PATH_MAX];
    if (!executable.empty() && ::realpath(executable.c_str(), resolved) != nullptr) {
      auto digest = HashPath(env, resolved);
      out["executable"] = {{"path", resolved}, {"sha256", digest.ok() ? *digest : "unknown"}};
    }
  }
  Json hashed = Json::array();
  for (const std::string& path : libraries) {
    auto digest = HashPath(env, path);
    hashed.push_back({{"path", path}, {"sha256", digest.ok() ? *digest : "unknown"}});
  }
  out["libraries"] = std::move(hashed);
  // Names of all variables; values only of those known to move arithmetic, as others hold secrets.
  Json values = Json::object(), names = Json::array();
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string_view entry = *e;
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string key(entry.substr(0, equals));
    bool keep = key == "PATH" || key == "LD_LIBRARY_PATH" || key == "LD_PRELOAD";
    for (const char* prefix :
         {"TARE_", "CUDA_", "NCCL_", "OMP_", "MKL_", "VLLM_", "SGLANG_", "TORCH_", "PYTORCH_",
          "CUBLAS_", "NVTE_", "OPENBLAS_", "HIP_", "TRITON_"}) {
      keep = keep || key.starts_with(prefix);
    }
    for (const char* secret : {"TOKEN", "KEY", "SECRET", "PASSWORD"}) {
      if (key.find(secret) != std::string::npos) keep = false;
    }
    if (keep) {
      values[Printable(key)] = Printable(entry.substr(equals + 1));
    } else {
      names.push_back(Printable(key));
    }
  }
  std::sort(names.begin(), names.end());
  out["environment"] = std::move(values);
  out["environment_names"] = std::move(names);
  return out;
}

namespace {

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
    TARE_RETURN_IF_ERROR(task->AddBytes(run, ExcuseName(level), Role::kMaterial, text + "\n"));
  }
  return task->EndRun(run, {});
}

}  // namespace

Result<RecordReport> RecordCommand(Env* env, const std::string& dir, const std::string& actor,
                                   const RecordOptions& options) {
  if (options.command.empty()) return InvalidArgument("a command is needed after --");
  if (options.heartbeat_s < 1) return InvalidArgument("--heartbeat: at least 1 second is needed");
  for (const std::string& word : options.command) {
    if (!ParseJson(Json(word).dump(-1, ' ', false, Json::error_handler_t::replace)).ok()) {
      return InvalidArgument("the command holds bytes that no log can keep");
    }
  }
  if (options.conclude == "exit-status" && options.scope.empty()) {
    return InvalidArgument("--conclude exit-status needs --scope: a pass without scope is no pass");
  }
  RecordReport report;
  std::string run_dir;
  {
    TARE_ASSIGN_OR_RETURN(const auto task, OpenWaiting(env, dir, actor));
    TARE_RETURN_IF_ERROR(task->MarkLostRuns().status());
    if (const EvidenceStatus may = MayRecord(task->state(), options);
        may.verdict != Verdict::kPass) {
      TARE_RETURN_IF_ERROR(task->Refuse("record", may.reason, may.detail));
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
    TARE_ASSIGN_OR_RETURN(const std::string config,
                          RunConfig(env, task->state(), options.command, start.dependencies));
    start.step = options.step;
    start.kind = options.kind;
    start.parent = options.parent;
    start.command = options.command;
    start.candidate = options.candidate;
    start.content_id = Hex(Sha256Of(config));
    start.heartbeat_s = options.heartbeat_s;
    TARE_ASSIGN_OR_RETURN(report.run_id, task->StartRun(start));
    run_dir = task->RunDir(*task->state().FindRun(report.run_id));
    TARE_RETURN_IF_ERROR(task->AddBytes(report.run_id, "config.json", Role::kConfig, config));
  }
  auto ran = Spawn(env, options, run_dir, dir, report.run_id);
  TARE_ASSIGN_OR_RETURN(const auto task, OpenWaiting(env, dir, actor));
  RunEnd end;
  if (!ran.ok()) {
    // The run began, so it must end in the log: as one that never came to a result.
    TARE_RETURN_IF_ERROR(task->EndRun(report.run_id, end));
    return ran.status();
  }
  end.exit_code = report.exit_code = ran->exit_code;
  end.signal = report.signal = ran->signal;
  const Json identity = ExecutionIdentity(env, options.command, ran->libraries);
  TARE_RETURN_IF_ERROR(
      task->AddBytes(report.run_id, "identity.json", Role::kIdentity, identity.dump(1) + "\n"));
  Status trouble;
  const auto keep = [&](const std::string& name, Role role) {
    Status s = task->AddFile(report.run_id, name, role, run_dir + "/" + name);
    if (!s.ok() && trouble.ok()) trouble = s;
  };
  // Output that says nothing is no raw result, but it is kept.
  for (const char* name : {"stdout.txt", "stderr.txt"}) {
    TARE_ASSIGN_OR_RETURN(const auto file, env->OpenReadable(run_dir + "/" + name));
    const bool raw = std::strcmp(name, "stdout.txt") == 0 && !EmptinessOf(name, file->bytes());
    keep(name, raw ? Role::kRaw : Role::kMaterial);
  }
  std::string conclusion_path = options.conclude == "exit-status" ? "" : options.conclude;
  TARE_ASSIGN_OR_RETURN(const auto tree, ListTree(env, run_dir + "/out"));
  for (const TreeEntry& e : tree) {
    if (e.path == "conclusion.json") {
      if (conclusion_path.empty() && options.conclude.empty())
        conclusion_path = run_dir + "/out/" + e.path;
      continue;
    }
    const bool material = std::find(options.materials.begin(), options.materials.end(), e.path) !=
                          options.materials.end();
    keep("out/" + e.path, material ? Role::kMaterial : Role::kRaw);
  }
  std::optional<Conclusion> conclusion;
  if (options.conclude == "exit-status") {
    conclusion = FromExitStatus(end.exit_code.value_or(-1), end.signal, options.scope);
  } else if (!conclusion_path.empty()) {
    TARE_RETURN_IF_ERROR(CheckPlainFile(env, conclusion_path));
    TARE_ASSIGN_OR_RETURN(const std::string bytes, env->ReadFile(conclusion_path));
    auto parsed = Conclusion::Parse(bytes);
    if (parsed.ok()) {
      conclusion = *std::move(parsed);
    } else if (trouble.ok()) {
      trouble = parsed.status();
    }
  }
  if (conclusion) {
    TARE_ASSIGN_OR_RETURN(const std::string text, CanonicalJson(conclusion->ToJson()));
    TARE_RETURN_IF_ERROR(
        task->AddBytes(report.run_id, "conclusion.json", Role::kConclusion, text + "\n"));
    if (conclusion_path == run_dir + "/out/conclusion.json") {
      TARE_RETURN_IF_ERROR(
          env->Remove(conclusion_path));  // recorded above it, in canonical spelling
    }
  }
  end.conclusion = conclusion;
  TARE_RETURN_IF_ERROR(task->EndRun(report.run_id, end));
  TARE_RETURN_IF_ERROR(task->WriteIndexes());
  const RunRecord& run = *task->state().FindRun(report.run_id);
  for (const size_t i : run.artifacts) report.artifacts.push_back(task->state().artifacts[i].path);
  Staleness staleness(task->state());
  report.status = AssessRun(task->state(), &staleness, run);
  if (!trouble.ok()) {
    report.status.detail += (report.status.detail.empty() ? "" : "; ") + trouble.message();
  }
  return report;
}

Result<RecordReport> AddArtifacts(Env* env, const std::string& dir, const std::string& actor,
                                  const AddOptions& options) {
  if (options.raw.empty()) return InvalidArgument("at least one file is needed");
  // Everything is looked at before anything is written.
  std::set<std::string> names;
  for (const auto* list : {&options.raw, &options.materials}) {
    for (const std::string& path : *list) {
      TARE_RETURN_IF_ERROR(CheckPlainFile(env, path));
      TARE_RETURN_IF_ERROR(CheckRelativePath(BaseName(path)));
      if (!names.insert(BaseName(path)).second) {
        return InvalidArgument("{}: two files of that name in one run", Printable(BaseName(path)));
      }
    }
  }
  for (const std::string& path : options.raw) {
    TARE_ASSIGN_OR_RETURN(const auto file, env->OpenReadable(path));
    if (auto why = EmptinessOf(BaseName(path), file->bytes())) {
      TARE_ASSIGN_OR_RETURN(const auto task, OpenWaiting(env, dir, actor));
      TARE_RETURN_IF_ERROR(
          task->Refuse("add", reason::kEmptyArtifact, BaseName(path) + " " + *why));
      RecordReport refused;
      refused.status = {Verdict::kRefused, std::string(reason::kEmptyArtifact),
                        Printable(BaseName(path)) + " " + *why};
      return refused;
    }
  }
  std::optional<Conclusion> conclusion;
  if (!options.conclusion.empty()) {
    TARE_RETURN_IF_ERROR(CheckPlainFile(env, options.conclusion));
    TARE_ASSIGN_OR_RETURN(const std::string bytes, env->ReadFile(options.conclusion));
    TARE_ASSIGN_OR_RETURN(conclusion, Conclusion::Parse(bytes));
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
  if (!options.config.empty()) {
    TARE_RETURN_IF_ERROR(
        task->AddFile(report.run_id, "config.json", Role::kConfig, options.config));
  }
  if (!options.identity.empty()) {
    TARE_RETURN_IF_ERROR(
        task->AddFile(report.run_id, "identity.json", Role::kIdentity, options.identity));
  }
  for (const std::string& path : options.raw) {
    TARE_RETURN_IF_ERROR(task->AddFile(report.run_id, "out/" + BaseName(path), Role::kRaw, path));
  }
  for (const std::string& path : options.materials) {
    TARE_RETURN_IF_ERROR(
        task->AddFile(report.run_id, "out/" + BaseName(path), Role::kMaterial, path));
  }
  if (conclusion) {
    TARE_ASSIGN_OR_RETURN(const std::string text, CanonicalJson(conclusion->ToJson()));
    TARE_RETURN_IF_ERROR(
        task->AddBytes(report.run_id, "conclusion.json", Role::kConclusion, text + "\n"));
  }
  RunEnd end;
  end.exit_code = options.exit_code;
  end.conclusion = conclusion;
  TARE_RETURN_IF_ERROR(task->EndRun(report.run_id, end));
  TARE_RETURN_IF_ERROR(task->WriteIndexes());
  const RunRecord& run = *task->state().FindRun(report.run_id);
  report.exit_code = options.exit_code;
  for (const size_t i : run.artifacts) report.artifacts.push_back(task->state().artifacts[i].path);
  Staleness staleness(task->state());
  report.status = AssessRun(task->state(), &staleness, run);
  return report;
}

}  // namespace tare::workflow
