// The two tracks of a task and what lies between them: `tare ladder` (cheapest level first),
// `tare tracks`, `tare lease` (one device, one job) and `tare handover`.

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <vector>

#include "base/reasons.h"
#include "tools/command.h"
#include "workflow/ladder.h"
#include "workflow/lease.h"
#include "workflow/process.h"
#include "workflow/task.h"
#include "workflow/tracks.h"

namespace tare {
namespace {

struct Options {
  std::string task = ".", candidate, device, dir, track = "none", package, target;
  double wait_s = 600;
  std::vector<std::string> command;
  bool json = false, resume = false;
};

int Ladder(const Options& o) {
  const auto view = workflow::ReadTask(Env::Real(), o.task);
  if (!view.ok()) return ReportError(view.status());
  workflow::Staleness staleness(view->state);
  const auto ladder = workflow::LadderOf(view->state, &staleness, o.candidate);
  const int lowest = workflow::LowestOpen(ladder);
  Json levels = Json::array();
  for (const workflow::LadderLevel& l : ladder) {
    levels.push_back({{"level", l.level},
                      {"state", workflow::LadderStateName(l.state)},
                      {"runs", l.runs},
                      {"cost_s", l.cost_s},
                      {"detail", l.detail}});
    if (o.json) continue;
    fmt::print("{} {:<22} {:>3} runs {:>10.1f} s  {}\n", l.level,
               workflow::LadderStateName(l.state), l.runs, l.cost_s, Printable(l.detail));
  }
  if (o.json) {
    fmt::print("{}\n",
               Json{{"candidate", o.candidate}, {"levels", levels}, {"next", lowest}}.dump(1));
  } else if (lowest == 0) {
    fmt::print("every level has passed or has its reason\n");
  } else {
    fmt::print("next: level {}\n", lowest);
  }
  return 0;
}

int Tracks(const Options& o) {
  const auto view = workflow::ReadTask(Env::Real(), o.task);
  if (!view.ok()) return ReportError(view.status());
  workflow::Staleness staleness(view->state);
  const workflow::BaselineTrack baseline = workflow::BaselineOf(view->state, &staleness);
  const workflow::ConsistencyTrack consistency = workflow::ConsistencyOf(view->state, &staleness);
  const workflow::EvidenceStatus shared = workflow::TracksShareContract(view->state);
  if (o.json) {
    fmt::print("{}\n", Json{{"baseline", baseline.ToJson()},
                            {"consistency", consistency.ToJson()},
                            {"contract",
                             {{"verdict", VerdictName(shared.verdict)},
                              {"reason", shared.reason},
                              {"detail", shared.detail}}}}
                           .dump(1));
  } else {
    fmt::print("baseline     {} {}{}{}\n", baseline.state, Printable(baseline.audit),
               baseline.candidate.empty() ? "" : "; frozen in run ", baseline.candidate);
    fmt::print("consistency  {}\n",
               consistency.next.empty() ? "C2 to C8 are open" : "next is " + consistency.next);
    if (shared.verdict != Verdict::kPass) fmt::print("{}\n", Printable(shared.detail));
  }
  if (!shared.reason.empty()) PrintReason(shared.verdict, shared.reason);
  return ExitCode(shared.verdict);
}

// Runs the command as a child and waits; its exit status, or 128 and the signal.
int RunChild(const std::vector<std::string>& command) {
  std::vector<char*> argv;
  argv.reserve(command.size() + 1);
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t child = ::fork();
  if (child < 0) return ReportError(Errno("fork", command[0], errno));
  if (child == 0) {
    ::execvp(argv[0], argv.data());
    ::_exit(127);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return ReportError(Errno("waitpid", command[0], errno));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int TakeLease(Options o) {
  Env* env = Env::Real();
  if (o.device.empty()) {
    const auto lines = workflow::Leases(env, o.dir);
    if (!lines.ok()) return ReportError(lines.status());
    for (const workflow::LeaseLine& l : *lines)
      fmt::print("{} {} {}\n", l.device, l.holds ? "held by" : "waits:", Printable(l.who));
    return 0;
  }
  if (Status s = TakeTyped(&o.command); !s.ok()) return ReportError(s);
  if (o.command.empty()) return ReportError(InvalidArgument("a command is needed after --"));
  const auto lease = workflow::Lease::Acquire(
      env, o.dir, o.device, fmt::format("{} track, process {}", o.track, ::getpid()), o.wait_s);
  if (!lease.ok()) {
    if (lease.status().code() != Code::kExhausted) return ReportError(lease.status());
    fmt::print(stderr, "{}\n", lease.status().message());
    PrintReason(Verdict::kInconclusive, reason::kLeaseHeld);
    return ExitCode(Verdict::kInconclusive);
  }
  return RunChild(o.command);
}

int HandOver(const Options& o) {
  Env* env = Env::Real();
  std::vector<std::string> held;
  if (!o.dir.empty()) {
    const auto lines = workflow::Leases(env, o.dir);
    if (!lines.ok()) return ReportError(lines.status());
    for (const workflow::LeaseLine& l : *lines)
      held.push_back(fmt::format("{} ({}, {})", l.device, l.who, l.holds ? "holds" : "waits"));
  }
  const auto done =
      o.resume ? workflow::ResumeHandover(env, o.package, o.target, workflow::CurrentActor())
               : workflow::WriteHandover(env, o.package, o.target, workflow::CurrentActor(), held);
  if (!done.ok()) return ReportError(done.status());
  for (const std::string& line : done->waiting) fmt::print("waits: {}\n", Printable(line));
  for (const std::string& line : held) fmt::print("to give back: {}\n", Printable(line));
  fmt::print("{} files to {}\n", done->files, o.target);
  return 0;
}

}  // namespace

TARE_COMMAND(tracks, [](CLI::App& root) {
  auto o = std::make_shared<Options>();
  CLI::App* ladder = root.add_subcommand(
      "ladder", "levels of a candidate, cheapest first: state, cost, and which comes next");
  ladder->add_option("task", o->task, "the task directory (default: here)");
  ladder->add_option("--candidate", o->candidate, "whose ladder")->required();
  ladder->add_flag("--json", o->json, "for machines");
  ladder->callback([o] { SetExit(Ladder(*o)); });

  auto t = std::make_shared<Options>();
  CLI::App* tracks = root.add_subcommand(
      "tracks", "the baseline's and the consistency track, each with its own state");
  tracks->add_option("task", t->task, "the task directory (default: here)");
  tracks->add_flag("--json", t->json, "for machines");
  tracks->callback([t] { SetExit(Tracks(*t)); });

  auto l = std::make_shared<Options>();
  CLI::App* lease = root.add_subcommand(
      "lease", "run a command while holding a device; without a device: who holds what");
  lease->add_option("device", l->device, "its name, \"cuda:0\"");
  lease->add_option("--dir", l->dir, "folder of the leases, one for all tracks of the machine")
      ->required();
  lease->add_option("--track", l->track, "who asks: baseline or consistency");
  lease->add_option("--wait", l->wait_s, "seconds to wait, at most")
      ->check(CLI::Range(0.0, 1e7))
      ->capture_default_str();
  lease->add_option("command", l->command, "the command, after --");
  lease->callback([l] { SetExit(TakeLease(*l)); });

  auto h = std::make_shared<Options>();
  CLI::App* handover = root.add_subcommand(
      "handover", "hand a task that waits for a person over, or --resume one from its package");
  handover->add_option("from", h->package, "the task; with --resume the package")->required();
  handover->add_option("to", h->target, "new folder: the package; with --resume the task")
      ->required();
  handover->add_option("--leases", h->dir, "folder of leases: what should be given back is listed");
  handover->add_flag("--resume", h->resume, "take a package up");
  handover->callback([h] { SetExit(HandOver(*h)); });
});

}  // namespace tare
