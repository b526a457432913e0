#include "rl/process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <thread>

#include "base/env.h"
#include "base/sha256.h"

extern char** environ;

namespace tare::rl {

Result<Process> Process::Start(const std::string& name, std::vector<std::string> argv,
                               const std::vector<std::pair<std::string, std::string>>& environment,
                               const std::string& log) {
  std::vector<std::string> env;
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string entry = *e;
    bool replaced = false;
    for (const auto& [key, value] : environment) replaced |= entry.starts_with(key + "=");
    if (!replaced) env.push_back(entry);
  }
  for (const auto& [key, value] : environment) {
    if (!value.empty()) env.push_back(key + "=" + value);
  }
  std::vector<char*> arguments, variables;
  for (std::string& a : argv) arguments.push_back(a.data());
  for (std::string& e : env) variables.push_back(e.data());
  arguments.push_back(nullptr);
  variables.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  Process p;
  p.name_ = name;
  p.log_ = log;
  const int error = ::posix_spawn(&p.pid_, argv[0].c_str(), &actions, nullptr, arguments.data(),
                                  variables.data());
  posix_spawn_file_actions_destroy(&actions);
  p.argv_ = std::move(argv);
  if (error != 0) {
    p.pid_ = -1;
    return Errno("start", p.argv_[0], error);
  }
  return p;
}

Process::Process(Process&& other) noexcept
    : name_(std::move(other.name_)),
      log_(std::move(other.log_)),
      argv_(std::move(other.argv_)),
      pid_(std::exchange(other.pid_, -1)),
      reaped_(other.reaped_),
      exit_(other.exit_) {}

Process::~Process() {
  if (pid_ > 0 && !reaped_) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
}

bool Process::Poll() {
  if (pid_ <= 0 || reaped_) return true;
  int status = 0;
  struct rusage usage {};
  const pid_t got = ::wait4(pid_, &status, WNOHANG, &usage);
  if (got != pid_) return false;
  exit_.peak_rss_bytes = int64_t{usage.ru_maxrss} * 1024;
  reaped_ = true;
  exit_.ended = true;
  if (WIFSIGNALED(status)) {
    exit_.signal = WTERMSIG(status);
  } else {
    exit_.code = WEXITSTATUS(status);
  }
  return true;
}

Exit Process::Wait(double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!Poll()) {
    if (std::chrono::steady_clock::now() > deadline) {
      Kill();
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return exit_;
}

void Process::Kill() {
  if (pid_ <= 0 || reaped_) return;
  ::kill(pid_, SIGKILL);
  struct rusage usage {};
  if (::wait4(pid_, nullptr, 0, &usage) == pid_)
    exit_.peak_rss_bytes = int64_t{usage.ru_maxrss} * 1024;
  reaped_ = true;
  exit_.ended = false;  // it did not end by itself
  exit_.signal = SIGKILL;
}

bool Process::Stopped() const {
  if (pid_ <= 0 || reaped_) return false;
  const Result<std::string> text = Env::Real()->ReadFile(fmt::format("/proc/{}/stat", pid_));
  if (!text.ok()) return false;
  const size_t end = text->rfind(')');  // of the name, which may hold anything
  return end != std::string::npos && end + 2 < text->size() && (*text)[end + 2] == 'T';
}

void Process::Continue() {
  if (pid_ > 0 && !reaped_) ::kill(pid_, SIGCONT);
}

int64_t Process::RssBytes() const {
  if (pid_ <= 0 || reaped_) return 0;
  std::FILE* f = std::fopen(fmt::format("/proc/{}/statm", pid_).c_str(), "r");
  if (f == nullptr) return 0;
  long long size = 0, resident = 0;
  const int read = std::fscanf(f, "%lld %lld", &size, &resident);
  std::fclose(f);
  return read == 2 ? resident * ::sysconf(_SC_PAGESIZE) : 0;
}

Json Process::LoadedFiles() const {
  Json files = Json::object();
  if (pid_ <= 0 || reaped_) return files;
  std::FILE* f = std::fopen(fmt::format("/proc/{}/maps", pid_).c_str(), "r");
  if (f == nullptr) return files;
  std::map<std::string, std::string> digests;
  char* line = nullptr;
  size_t capacity = 0;
  while (::getline(&line, &capacity, f) > 0) {
    // address perms offset dev inode path
    const std::string text = line;
    const size_t perms = text.find(' ') + 1, path = text.find('/');
    if (path == std::string::npos || text.size() < perms + 4 || text[perms + 2] != 'x') continue;
    const std::string name = text.substr(path, text.find('\n') - path);
    if (digests.contains(name)) continue;
    const auto bytes = Env::Real()->OpenReadable(name);
    digests[name] = bytes.ok() ? Hex(Sha256Of((*bytes)->bytes())) : "unreadable";
  }
  std::free(line);
  std::fclose(f);
  for (const auto& [name, digest] : digests) files[name] = digest;
  return files;
}

Json Process::ToJson() const {
  return Json{{"name", name_},
              {"pid", pid_},
              {"command", argv_},
              {"ended", exit_.ended},
              {"code", exit_.code},
              {"signal", exit_.signal},
              {"peak_rss_bytes", exit_.peak_rss_bytes}};
}

}  // namespace tare::rl
