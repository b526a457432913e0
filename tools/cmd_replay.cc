// `tare replay BUNDLE`: runs the commands recorded in a bundle over the bundle's own tokens and
// asks whether the recorded bits come back on each side.

#include <fmt/format.h>

#include <memory>
#include <string>

#include "base/reasons.h"
#include "compare/bundle.h"
#include "tools/command.h"
#include "tools/replay_run.h"

namespace tare {
namespace {

struct Options {
  std::string bundle;
  bool json = false;
};

Result<compare::ReplayResult> ReplaySide(const compare::Bundle& bundle, const std::string& side) {
  compare::ReplayResult none;
  none.reason = reason::kMissingCapture;
  if (compare::ReplayCommand(bundle, side).empty()) {
    none.detail = "no command was recorded (identity.replay of the dump's manifest)";
    return none;
  }
  const Result<compare::ReplayBatch> batch = compare::ReplayInput(Env::Real(), bundle, side);
  if (!batch.ok() && batch.status().code() == Code::kNotFound) {
    none.detail = "no input was kept: the dump does not name the tokens from position 0";
    return none;
  }
  TARE_RETURN_IF_ERROR(batch.status());
  TARE_ASSIGN_OR_RETURN(const auto dir, ScratchDir::Create());
  TARE_ASSIGN_OR_RETURN(const Dump fresh,
                        RunRecorded(bundle, side, *batch, dir->path(), /*loud=*/true));
  return compare::CheckReplay(bundle, side, fresh);
}

int Run(const Options& o) {
  const Result<compare::Bundle> bundle = compare::OpenBundle(Env::Real(), o.bundle);
  if (!bundle.ok()) return ReportBundleError(bundle.status());
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
