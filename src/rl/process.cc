#include "rl/process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

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
  const pid_t got = ::waitpid(pid_, &status, WNOHANG);
  if (got != pid_) return false;
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
  ::waitpid(pid_, nullptr, 0);
  reaped_ = true;
  exit_.ended = false;  // it did not end by itself
  exit_.signal = SIGKILL;
}

Json Process::ToJson() const {
  return Json{{"name", name_},        {"pid", pid_},        {"command", argv_},
              {"ended", exit_.ended}, {"code", exit_.code}, {"signal", exit_.signal}};
}

}  // namespace tare::rl
