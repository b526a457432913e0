#include "tools/replay_run.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include "base/reasons.h"
#include "tools/command.h"

extern char** environ;

namespace tare {
namespace {

// Runs this program with `args`. The exit status, or an error.
Result<int> RunSelf(const std::vector<std::string>& args, bool loud) {
  std::vector<std::string> all = {"tare"};
  all.insert(all.end(), args.begin(), args.end());
  std::vector<char*> argv;
  argv.reserve(all.size() + 1);
  for (std::string& a : all) argv.push_back(a.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  if (loud) {
    ::posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  } else {
    ::posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    ::posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  }
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) return Errno("posix_spawn", "/proc/self/exe", error);
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) return Errno("waitpid", "tare", errno);
  }
  if (!WIFEXITED(status))
    return Error(Code::kAborted, "the recorded command ended by signal {}", WTERMSIG(status));
  return WEXITSTATUS(status);
}

}  // namespace

Result<std::shared_ptr<ScratchDir>> ScratchDir::Create() {
  std::string path = (std::filesystem::temp_directory_path() / "tare_replay_XXXXXX").string();
  if (::mkdtemp(path.data()) == nullptr) return Errno("mkdtemp", path, errno);
  return std::shared_ptr<ScratchDir>(new ScratchDir(std::move(path)));
}

ScratchDir::~ScratchDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

Result<Dump> RunRecorded(const compare::Bundle& bundle, const std::string& side,
                         const compare::ReplayBatch& batch, const std::string& dir, bool loud,
                         const std::vector<std::string>& extra) {
  const std::string tokens = fmt::format("{}/{}.jsonl", dir, side);
  const std::string dump = fmt::format("{}/{}.dump", dir, side);
  TARE_RETURN_IF_ERROR(Env::Real()->WriteFileAtomic(tokens, compare::FormatReplayBatch(batch)));
  std::vector<std::string> command = compare::ReplayCommand(bundle, side);
  for (std::string& arg : command) {
    for (const auto& [mark, value] : {std::pair{"{dump}", &dump}, std::pair{"{tokens}", &tokens}}) {
      const size_t length = std::string_view(mark).size();
      for (size_t at = arg.find(mark); at != std::string::npos; at = arg.find(mark, at)) {
        arg.replace(at, length, *value);
        at += value->size();
      }
    }
  }
  command.insert(command.end(), extra.begin(), extra.end());
  TARE_ASSIGN_OR_RETURN(const int status, RunSelf(command, loud));
  if (status >= kExitUsage) {
    return Error(Code::kAborted, "the recorded command of side {} ended with status {}: tare {}",
                 side, status, fmt::join(command, " "));
  }
  return Dump::Open(Env::Real(), dump);
}

int ReportBundleError(const Status& status) {
  if (status.message().find("bundle was altered") == std::string::npos) return ReportError(status);
  fmt::print(stderr, "tare: {}\n", status.ToString());
  PrintReason(Verdict::kRefused, reason::kBundleAltered);
  return ExitCode(Verdict::kRefused);
}

}  // namespace tare
