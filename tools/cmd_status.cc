// `tare status`: the board of steps with one reason for each closed one; --explain says more.

#include <cstdio>
#include <memory>

#include "base/json.h"
#include "base/reasons.h"
#include "base/sha256.h"
#include "tools/command.h"
#include "workflow/index.h"
#include "workflow/layout.h"
#include "workflow/ledger.h"
#include "workflow/process.h"
#include "workflow/scope.h"
#include "workflow/signoff.h"
#include "workflow/staleness.h"
#include "workflow/task.h"

namespace tare {
namespace {

struct Options {
  std::string dir = ".";
  std::string covered, step, kind;
  bool explain = false;
  bool json = false;
};

// "Is this point covered?": pass only inside the scope of a usable run of this step and kind.
int Covered(const Options& options, const workflow::State& state, workflow::Staleness* staleness,
            bool recorded) {
  const auto kind = workflow::ParseEvidenceKind(options.kind);
  if (!workflow::IsStep(options.step) || !kind) {
    return ReportError(
        InvalidArgument("--covered asks about one step and kind: --step C0..C10 --kind E1..E10"));
  }
  auto scope = workflow::Scope::FromText(options.covered);
  if (!scope.ok()) return ReportError(scope.status().Annotate("--covered"));
  const workflow::ScopeBox& box = scope->boxes()[0];
  workflow::ScopePoint point;
  for (const auto& [values, to] :
       {std::pair{&box.shape, &point.shape}, std::pair{&box.topology, &point.topology},
        std::pair{&box.dtype, &point.dtype}, std::pair{&box.model, &point.model},
        std::pair{&box.path, &point.path}}) {
    if (values->size() != 1)
      return ReportError(
          InvalidArgument("--covered asks about one point: one value for each axis"));
    *to = values->front();
  }
  workflow::Coverage answer = workflow::QueryScope(state, staleness, options.step, *kind, point);
  if (!recorded) {
    answer.verdict = Verdict::kInconclusive;
    answer.reason = reason::kConfigUnrecorded;
  }
  if (options.json) {
    fmt::print("{}\n", Json{{"verdict", VerdictName(answer.verdict)},
                            {"reason", answer.reason},
                            {"run", answer.run_id},
                            {"step", options.step},
                            {"kind", options.kind}}
                           .dump(1, ' ', false, Json::error_handler_t::replace));
  } else {
    fmt::print("{} {}: {}{}\n", options.step, options.kind, VerdictName(answer.verdict),
               answer.run_id.empty() ? "" : " by run " + answer.run_id);
  }
  if (answer.verdict != Verdict::kPass) PrintReason(answer.verdict, answer.reason);
  return ExitCode(answer.verdict);
}

int Run(const Options& options) {
  Env* env = Env::Real();
  auto view = workflow::ReadTask(env, options.dir);
  if (!view.ok()) return ReportError(view.status());
  const workflow::State& state = view->state;
  const workflow::LogScan& scan = view->log.scan;
  if (!scan.broken.ok()) return ReportError(scan.broken.Annotate("events.jsonl"));
  workflow::Staleness staleness(state);
  auto board = workflow::Board(state, &staleness);
  // An edit that is in no event would make every line a guess.
  std::string unrecorded;
  // A link or pipe in its place is not read, as none would be by the verification.
  const std::string path = workflow::JoinPath(options.dir, workflow::kTaskFile);
  const Status plain = workflow::CheckPlainFile(env, path);
  auto toml = plain.ok() ? env->ReadFile(path) : Result<std::string>(plain);
  if (state.config() == nullptr || !toml.ok() || Hex(Sha256Of(*toml)) != state.config()->sha256) {
    unrecorded = "task.toml is not the one in the log";
    for (auto& line : board) {
      line.verdict = Verdict::kInconclusive;
      line.reason = reason::kConfigUnrecorded;
      line.detail = unrecorded;
    }
  }
  if (!options.covered.empty()) return Covered(options, state, &staleness, unrecorded.empty());
  bool all = true;
  for (const auto& line : board) all = all && line.verdict == Verdict::kPass;
  Json open_runs = Json::array();
  for (const workflow::RunRecord& run : state.runs) {
    if (run.ended || run.lost) continue;
    const auto live =
        workflow::CheckLiveness(env, run, workflow::JoinPath(options.dir, run.step + "/" + run.id));
    open_runs.push_back(
        {{"run", run.id},
         {"step", run.step},
         {"state", live.liveness == workflow::Liveness::kRunning ? "running" : "lost"},
         {"why", live.why}});
  }
  if (options.json) {
    Json steps = Json::array();
    for (const auto& line : board) {
      steps.push_back({{"step", line.step},
                       {"verdict", VerdictName(line.verdict)},
                       {"reason", line.reason},
                       {"detail", line.detail},
                       {"runs", line.runs}});
    }
    Json questions = Json::array();
    for (const auto& [key, text] : state.questions)
      questions.push_back({{"key", key}, {"text", text}});
    fmt::print("{}\n", Json{{"task", state.task_id},
                            {"events", state.events},
                            {"artifacts", state.artifacts.size()},
                            {"steps", std::move(steps)},
                            {"open_runs", std::move(open_runs)},
                            {"questions", std::move(questions)},
                            {"torn", !scan.torn.empty()},
                            {"problems", state.problems.size()}}
                           .dump(1, ' ', false, Json::error_handler_t::replace));
    return all ? 0 : ExitCode(Verdict::kInconclusive);
  }
  fmt::print("task {}, {} events, {} runs, {} artifacts\n", state.task_id, state.events,
             state.runs.size(), state.artifacts.size());
  if (!scan.torn.empty())
    fmt::print("the last line of the log is torn; the next writer sets it aside\n");
  for (const auto& problem : state.problems)
    fmt::print("problem: {}\n", Printable(problem.message));
  for (const auto& line : board) {
    const bool open = line.verdict == Verdict::kPass;
    fmt::print("{:<4} {:<15} {:<20} {}\n", line.step, open ? "open" : VerdictName(line.verdict),
               Printable(line.reason),
               Printable(options.explain ? std::string_view(line.detail)
                                         : std::string_view(line.detail).substr(0, 100)));
    if (!options.explain) continue;
    if (const Reason* r = FindReason(line.reason)) {
      fmt::print("       {}\n       next: {}\n", r->sentence, r->next);
    }
    for (const workflow::RunRecord& run : state.runs) {
      if (run.step != line.step || !run.kind) continue;
      const auto status = workflow::AssessRun(state, &staleness, run);
      fmt::print("       run {} {} {} {} {}\n", run.id, workflow::EvidenceKindName(*run.kind),
                 VerdictName(status.verdict), status.reason, Printable(status.detail));
    }
    const auto lists = workflow::ListsOf(state, &staleness, line.step);
    for (const auto& name : lists.failed) fmt::print("       failed: {}\n", Printable(name));
    for (const auto& name : lists.human_confirmed)
      fmt::print("       confirmed: {}\n", Printable(name));
  }
  for (const Json& run : open_runs) {
    fmt::print("run {} at {} is {}: {}\n", run["run"].get<std::string>(),
               run["step"].get<std::string>(), run["state"].get<std::string>(),
               Printable(run["why"].get<std::string>()));
  }
  if (!options.explain && !state.questions.empty()) {
    fmt::print("{} open questions, the first: {}{}\n", state.questions.size(),
               Printable(state.questions.begin()->first),
               state.questions.size() == 1 ? "" : "; --explain asks all of them");
  }
  for (const auto& [key, text] : state.questions) {
    if (options.explain) fmt::print("question: {}\n", Printable(text));
  }
  if (options.explain) {
    const auto* authority = workflow::AuthorityInForce(state, UINT64_MAX);
    if (authority == nullptr) {
      fmt::print("no list of reviewers is signed; `tare approve task` begins it\n");
    } else {
      for (const auto& r : authority->config.reviewers) {
        fmt::print("reviewer {} {}{}\n", Printable(r.person), workflow::Fingerprint(r.public_key),
                   r.revoked ? " (revoked)" : "");
      }
    }
    for (const auto& r : state.refusals) {
      fmt::print("refused: event {} {}: {} {}\n", r.seq, Printable(r.what), Printable(r.reason),
                 Printable(r.detail));
    }
  }
  return all ? 0 : ExitCode(Verdict::kInconclusive);
}

}  // namespace
}  // namespace tare

TARE_COMMAND(status, [](CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("status", "the board of steps, one reason for each closed one");
  auto options = std::make_shared<tare::Options>();
  app->add_option("dir", options->dir, "the task directory (default: here)");
  app->add_option("--covered", options->covered,
                  "is this point covered? shape=..;topology=..;dtype=..;model=..;path=..");
  app->add_option("--step", options->step, "with --covered: C0 to C10");
  app->add_option("--kind", options->kind, "with --covered: kind of evidence, E1 to E10");
  app->add_flag("--explain", options->explain,
                "what each reason means, every run, what to do next");
  app->add_flag("--json", options->json, "for machines");
  app->callback([options] { tare::SetExit(tare::Run(*options)); });
});
