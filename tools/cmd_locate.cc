// `tare locate A B`: the first operator at which two dumps part.

#include <fmt/format.h>

#include <memory>
#include <string>

#include "base/reasons.h"
#include "compare/bundle.h"
#include "compare/locate.h"
#include "compare/shards.h"
#include "tensor/checkpoint.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string a, b, bundle, weights, embedding = "model.embed_tokens.weight";
  int threads = 0;
  bool json = false;
};

int Run(const Options& o) {
  ThreadPool pool(o.threads);
  compare::DiffOptions diff;
  diff.pool = &pool;
  const Result<compare::OpenedDump> a = compare::OpenDumpOrRanks(Env::Real(), o.a);
  if (!a.ok()) return ReportError(a.status());
  const Result<compare::OpenedDump> b = compare::OpenDumpOrRanks(Env::Real(), o.b);
  if (!b.ok()) return ReportError(b.status());
  for (const auto* side : {&*a, &*b}) {
    if (side->ranks.replica_difference.empty()) continue;
    fmt::print("FAIL: a side differs from itself: {}\n", side->ranks.replica_difference);
    PrintReason(Verdict::kFail, reason::kBitMismatch);
    return ExitCode(Verdict::kFail);
  }
  Tensor table;
  if (!o.weights.empty()) {
    const Result<Checkpoint> checkpoint = Checkpoint::Open(o.weights);
    if (!checkpoint.ok()) return ReportError(checkpoint.status());
    Result<Tensor> t = checkpoint->Get(o.embedding);
    if (!t.ok()) return ReportError(t.status());
    table = *std::move(t);
  }
  const Result<compare::LocateReport> report =
      compare::Locate(*a->dump, *b->dump, diff, o.weights.empty() ? nullptr : &table);
  if (!report.ok()) return ReportError(report.status());
  if (!o.bundle.empty() && report->found) {
    const Status written = compare::WriteBundle(Env::Real(), o.bundle, *a->dump, *b->dump, *report);
    if (!written.ok()) return ReportError(written);
  }
  if (o.json) {
    fmt::print("{}\n",
               compare::LocateJson(*report).dump(1, ' ', false, Json::error_handler_t::replace));
  } else {
    fmt::print("{}", compare::LocateTable(*report));
    if (!o.bundle.empty() && report->found) fmt::print("bundle: {}\n", o.bundle);
  }
  if (!report->reason.empty()) PrintReason(report->verdict, report->reason);
  return ExitCode(report->verdict);
}

}  // namespace
}  // namespace tare

TARE_COMMAND(locate, [](CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("locate", "find the first operator at which two dumps differ");
  auto o = std::make_shared<tare::Options>();
  app->add_option("a", o->a, "a dump, or a directory of the dumps of its ranks")->required();
  app->add_option("b", o->b, "the other side's dump")->required();
  app->add_option("--bundle", o->bundle, "write a replay bundle to this new directory");
  app->add_option("--weights", o->weights,
                  "checkpoint whose embedding table proves that frames are fresh");
  app->add_option("--embedding", o->embedding, "name of the table in it");
  app->add_option("--threads", o->threads, "0: all CPUs of the affinity mask")
      ->check(CLI::NonNegativeNumber);
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] { tare::SetExit(tare::Run(*o)); });
});
