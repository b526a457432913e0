// `tare replay BUNDLE`: runs the commands recorded in a bundle and asks whether the recorded bits
// come back on each side.

#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "base/reasons.h"
#include "compare/bundle.h"
#include "tools/command.h"

extern char** environ;

namespace tare {
namespace {

struct Options {
  std::string bundle;
  bool json = false;
};

// Runs this program with `args`; its output goes to our stderr. The exit status, or an error.
Result<int> RunSelf(const std::vector<std::string>& args) {
  std::vector<std::string> all = {"tare"};
  all.insert(all.end(), args.begin(), args.end());
  std::vector<char*> argv;
  for (std::string& a : all) argv.push_back(a.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
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

Result<compare::ReplayResult> ReplaySide(const compare::Bundle& bundle, const std::string& side) {
  std::vector<std::string> command = compare::ReplayCommand(bundle, side);
  if (command.empty()) {
    compare::ReplayResult none;
    none.reason = reason::kMissingCapture;
    none.detail = "no command was recorded (identity.replay of the dump's manifest)";
    return none;
  }
  std::string root = (std::filesystem::temp_directory_path() / "tare_replay_XXXXXX").string();
  if (::mkdtemp(root.data()) == nullptr) return Errno("mkdtemp", root, errno);
  const std::string dump = root + "/replay.dump";
  for (std::string& arg : command) {
    for (size_t at = arg.find("{dump}"); at != std::string::npos; at = arg.find("{dump}"))
      arg.replace(at, 6, dump);
  }
  const auto run = [&]() -> Result<compare::ReplayResult> {
    TARE_ASSIGN_OR_RETURN(const int status, RunSelf(command));
    if (status >= kExitUsage)
      return Error(Code::kAborted, "the recorded command of side {} ended with status {}", side,
                   status);
    TARE_ASSIGN_OR_RETURN(const Dump fresh, Dump::Open(Env::Real(), dump));
    return compare::CheckReplay(bundle, side, fresh);
  };
  Result<compare::ReplayResult> result = run();
  std::error_code ignored;
  std::filesystem::remove_all(root, ignored);
  return result;
}

int Run(const Options& o) {
  const Result<compare::Bundle> bundle = compare::OpenBundle(Env::Real(), o.bundle);
  if (!bundle.ok()) {
    if (bundle.status().message().find("altered") == std::string::npos)
      return ReportError(bundle.status());
    fmt::print(stderr, "tare: {}\ntare: refused {}\n", bundle.status().ToString(),
               reason::kBundleAltered);
    return ExitCode(Verdict::kRefused);
  }
  Json out = {{"schema", "tare.replay/1"}, {"bundle", o.bundle}};
  Verdict verdict = Verdict::kPass;
  std::string_view why;
  for (const std::string side : {"a", "b"}) {
    const Result<compare::ReplayResult> r = ReplaySide(*bundle, side);
    if (!r.ok()) return ReportError(r.status());
    out[side] = {
        {"verdict", VerdictName(r->verdict)}, {"reason", r->reason}, {"detail", r->detail}};
    if (!o.json) fmt::print("{}: {} {} {}\n", side, VerdictName(r->verdict), r->reason, r->detail);
    const bool worse = r->verdict == Verdict::kFail || r->verdict == Verdict::kRefused ||
                       (verdict == Verdict::kPass && r->verdict != Verdict::kPass);
    if (worse) {
      verdict = r->verdict;
      why = r->reason;
    }
  }
  out["verdict"] = VerdictName(verdict);
  out["reason"] = why;
  if (o.json) fmt::print("{}\n", out.dump(1, ' ', false, Json::error_handler_t::replace));
  if (!why.empty()) fmt::print(stderr, "tare: {} {}\n", VerdictName(verdict), why);
  return ExitCode(verdict);
}

}  // namespace
}  // namespace tare

TARE_COMMAND(replay, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "replay", "run a bundle's recorded commands: do the recorded bits come back?");
  auto o = std::make_shared<tare::Options>();
  app->add_option("bundle", o->bundle, "directory written by tare locate --bundle")->required();
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] { tare::SetExit(tare::Run(*o)); });
});
