// `tare diff A B`: two sets of tensors, dumps or logprobs, bit by bit.

#include <fmt/format.h>

#include <charconv>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "compare/dump_diff.h"
#include "compare/open.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string a, b;
  std::vector<std::string> only, ignore, tiers;
  std::string mask;
  int top = 20;
  int threads = 0;
  bool json = false;
  bool all = false;
  bool digests = false;
  bool upcast = false;
  bool round = false;
  bool paired_only = false;
  bool verify = false;
};

bool ParseNumber(std::string_view text, double* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size() && *value >= 0;
}

// NAME:ulp=2 or NAME:abs=1e-3,rel=1e-2.
Result<compare::Tier> ParseTier(const std::string& text) {
  const auto wrong = [&] {
    return InvalidArgument(
        "--tier {}: expected NAME:BOUND[,BOUND], a bound being ulp=N, abs=X or rel=X",
        Printable(text));
  };
  const size_t colon = text.find(':');
  if (colon == 0 || colon == std::string::npos) return wrong();
  compare::Tier tier;
  tier.name = text.substr(0, colon);
  std::string_view rest = std::string_view(text).substr(colon + 1);
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    const std::string_view bound = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const size_t equals = bound.find('=');
    double value = 0;
    if (equals == std::string_view::npos || !ParseNumber(bound.substr(equals + 1), &value))
      return wrong();
    const std::string_view key = bound.substr(0, equals);
    if (key == "ulp" && value == static_cast<double>(static_cast<uint64_t>(value))) {
      tier.max_ulp = static_cast<uint64_t>(value);
    } else if (key == "abs") {
      tier.abs = value;
    } else if (key == "rel") {
      tier.rel = value;
    } else {
      return wrong();
    }
  }
  if (!tier.max_ulp && !tier.abs && !tier.rel) return wrong();
  return tier;
}

int Run(const Options& options) {
  compare::DiffOptions diff;
  ThreadPool pool(options.threads);
  diff.only = options.only;
  diff.ignore = options.ignore;
  diff.mask = options.mask;
  diff.digests = options.digests;
  diff.upcast = options.upcast;
  diff.round = options.round;
  diff.paired_only = options.paired_only;
  diff.verify = options.verify;
  diff.pool = &pool;
  for (const std::string& text : options.tiers) {
    Result<compare::Tier> tier = ParseTier(text);
    if (!tier.ok()) return ReportError(tier.status());
    diff.tiers.push_back(*std::move(tier));
  }
  const Result<compare::Input> a = compare::OpenInput(Env::Real(), options.a);
  if (!a.ok()) return ReportError(a.status());
  const Result<compare::Input> b = compare::OpenInput(Env::Real(), options.b);
  if (!b.ok()) return ReportError(b.status());
  Result<compare::Report> report = compare::DiffInputs(*a, *b, diff);
  if (!report.ok()) return ReportError(report.status());
  if (options.json) {
    compare::WriteJson(
        *report, [](std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); });
  } else {
    std::fputs(compare::Table(*report, {.top = options.top, .equal_rows = options.all}).c_str(),
               stdout);
  }
  if (!report->reason.empty()) PrintReason(report->verdict, report->reason);
  return ExitCode(report->verdict);
}

}  // namespace
}  // namespace tare

TARE_COMMAND(diff, [](CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("diff", "compare two sets of tensors, dumps or logprobs bit by bit");
  auto o = std::make_shared<tare::Options>();
  app->add_option(
         "a", o->a,
         "dump (or a directory of the dumps of its ranks), .safetensors, Hugging Face directory, "
         ".gguf, or .jsonl of logprobs")
      ->required();
  app->add_option("b", o->b, "the other side, of the same kind")->required();
  app->add_option("--only", o->only,
                  "shell pattern of names to compare (repeatable); becomes scope");
  app->add_option("--ignore", o->ignore,
                  "shell pattern of names to leave out (repeatable); becomes scope");
  app->add_option("--mask", o->mask, "name of a tensor of 0 and 1 on both sides: what counts");
  app->add_option("--tier", o->tiers,
                  "NAME:ulp=N or NAME:abs=X,rel=X: counted beside the verdict (repeatable)");
  app->add_option("--top", o->top, "rows of the table, worst first; 0 shows all")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--threads", o->threads, "0: all CPUs of the affinity mask")
      ->check(CLI::NonNegativeNumber);
  app->add_flag("--all", o->all, "show equal tensors, too");
  app->add_flag("--digests", o->digests, "compute the digest of every tensor in the same pass");
  app->add_flag("--upcast", o->upcast, "diagnose differing dtypes: the narrower converted exactly");
  app->add_flag("--round", o->round,
                "diagnose differing dtypes: the wider rounded to the narrower");
  app->add_flag("--paired-only", o->paired_only,
                "tokens without a partner become scope instead of a failure");
  app->add_flag("--verify", o->verify,
                "dumps: check every payload against its digest, and compare payloads");
  app->add_flag("--json", o->json, "the complete result for machines");
  app->callback([o] { tare::SetExit(tare::Run(*o)); });
});
