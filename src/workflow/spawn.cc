#include "workflow/spawn.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>

#include "base/json.h"
#include "workflow/layout.h"
#include "workflow/task.h"

extern char** environ;

namespace tare::workflow {
namespace {

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

}  // namespace

std::string AbsolutePath(const std::string& path) {
  if (path.starts_with('/')) return path;
  char buffer[4096];
  if (::getcwd(buffer, sizeof(buffer)) == nullptr) return path;
  return JoinPath(buffer, path);
}

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

void Heartbeat::Beat() {
  const int64_t now = env_->MonotonicNs();
  if (now < next_ns_) return;
  next_ns_ = now + period_ns_;
  // Written beside it and moved there: the command may have put a link or a folder in its place.
  if (!IsPlainDir(env_, run_dir_)) return;
  const std::string path = JoinPath(run_dir_, kHeartbeatFile);
  const std::string fresh = path + ".new";
  if (env_->Exists(fresh)) (void)env_->Remove(fresh);
  auto file = env_->OpenWritable(fresh, Env::Mode::kExclusive);
  if (!file.ok()) return;
  const Status written = (*file)->Append(FormatUtc(env_->NowNs()) + "\n");
  if (!written.ok() || !env_->Rename(fresh, path).ok()) (void)env_->Remove(fresh);
}

Result<Spawned> Spawn(Env* env, const SpawnOptions& options, const std::string& run_dir,
                      Heartbeat* heartbeat) {
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
  std::vector<std::string> variables = options.variables;
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string_view v = *e;
    const std::string_view name = v.substr(0, v.find('='));
    const bool replaced = std::any_of(
        options.variables.begin(), options.variables.end(), [&](const std::string& ours) {
          return std::string_view(ours).substr(0, ours.find('=')) == name;
        });
    if (!replaced) variables.emplace_back(v);
  }
  std::vector<char*> envp, argv;
  for (std::string& v : variables) envp.push_back(v.data());
  envp.push_back(nullptr);
  std::vector<std::string> words = options.command;
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  const std::string executable = FindExecutable(options.command[0]);
  if (executable.empty()) {
    return Error(Code::kNotFound, "{}: no such command", Printable(options.command[0]));
  }
  char resolved[PATH_MAX] = {};
  if (::realpath(executable.c_str(), resolved) == nullptr)
    return Errno("realpath", executable, errno);
  // Where our own parent ignores the end of its children, ours would end unseen.
  struct sigaction plain = {}, old_child = {};
  plain.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &plain, &old_child);
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

  Spawned ran;
  std::set<std::string> libraries;
  // A program loads most libraries as it starts: look often then, and at every heartbeat.
  const int64_t start = env->MonotonicNs();
  int64_t next_look = start;
  bool open[2] = {true, true};
  bool exited = false;
  int64_t deadline = 0;  // for output, once the command has ended
  int status = 0;
  while (!exited || open[0] || open[1]) {
    const int64_t now = env->MonotonicNs();
    if (now >= heartbeat->next_ns()) {
      heartbeat->Beat();
      next_look = std::min(next_look, now);
    }
    if (exited && now > deadline) {
      // What the command itself wrote is in the pipes already, which hold less than this.
      for (int i = 0; i < 2; ++i) {
        pollfd ready = {pipes[i].from, POLLIN, 0};
        for (int reads = 0; open[i] && reads < 16 && ::poll(&ready, 1, 0) > 0; ++reads)
          open[i] = pipes[i].Pump();
      }
      ran.cut_off = open[0] || open[1];
      break;
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
    if (!exited && ::waitpid(child, &status, WNOHANG) == child) {
      exited = true;
      deadline = env->MonotonicNs() + kLingerNs;
    }
  }
  child_to_signal = 0;
  ::sigaction(SIGINT, &old_int, nullptr);
  ::sigaction(SIGTERM, &old_term, nullptr);
  ::sigaction(SIGPIPE, &old_pipe, nullptr);
  ::sigaction(SIGCHLD, &old_child, nullptr);
  for (Pipe& p : pipes) {
    ::close(p.from);
    if (p.failed.ok()) p.failed = p.file->Sync();
    if (!p.failed.ok()) ran.output = p.failed.Annotate("the command's output was not kept whole");
  }
  if (WIFEXITED(status)) ran.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) ran.signal = WTERMSIG(status);
  ran.libraries.assign(libraries.begin(), libraries.end());
  return ran;
}

}  // namespace tare::workflow
