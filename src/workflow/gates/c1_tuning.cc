#include <fmt/format.h>

#include <algorithm>

#include "workflow/gates/c1.h"

namespace tare::workflow {
namespace {

constexpr int64_t kFormalInput = 8192, kFormalOutput = 1024;
constexpr int64_t kMinRounds = 3;

// Every audit item of STOP-03, -04, -06 and -07, with its row.
struct Item {
  const char* key;
  const char* row;
};
constexpr Item kItems[] = {
    {"model_version", "STOP-03"},
    {"hardware", "STOP-03"},
    {"nodes", "STOP-03"},
    {"image_build_time", "STOP-03"},
    {"code_versions", "STOP-03"},
    {"dependency_versions", "STOP-03"},
    {"launch_command", "STOP-03"},
    {"bench_command", "STOP-03"},
    {"precisions", "STOP-04"},
    {"runner", "STOP-04"},
    {"parallelism", "STOP-04"},
    {"scheduling", "STOP-04"},
    {"graph_and_cache", "STOP-04"},
    {"live_backends", "STOP-04"},
    {"patches_statement", "STOP-05"},
    {"configs_tried", "STOP-06"},
    {"valid_tokens", "STOP-06"},
    {"warmup", "STOP-06"},
    {"repeats", "STOP-06"},
    {"variation", "STOP-06"},
    {"failed_items", "STOP-06"},
    {"uncovered_scope", "STOP-06"},
    {"proposed_config", "STOP-07"},
    {"statistical_basis", "STOP-07"},
    {"criteria", "STOP-07"},
    {"open_questions", "STOP-07"},
};

// The product of the planned axes and concurrencies, as "axis=value,...;c=4".
std::vector<std::string> PlannedCells(const Tuning& t) {
  std::vector<std::string> cells = {""};
  for (const auto& [axis, values] : t.axes) {
    std::vector<std::string> next;
    for (const std::string& head : cells) {
      for (const std::string& v : values) next.push_back(fmt::format("{}{}={},", head, axis, v));
    }
    cells = std::move(next);
  }
  std::vector<std::string> out;
  for (const std::string& cell : cells) {
    for (const int64_t c : t.concurrencies) out.push_back(fmt::format("{}c={}", cell, c));
  }
  return out;
}

std::string NameOf(const TuningCell& cell) {
  std::string name;
  for (const auto& [axis, value] : cell.axes) name += fmt::format("{}={},", axis, value);
  return name + fmt::format("c={}", cell.concurrency);
}

void JudgeRound(Judging* j, const Tuning& t, const TuningCell& cell, const TuningRound& r,
                int64_t context_length) {
  const auto lengths = [&](const char* what, const std::vector<int64_t>& got, int64_t want) {
    const auto wrong = std::find_if(got.begin(), got.end(), [&](int64_t n) { return n != want; });
    // The sentence is made whether it is needed or not: there may be no wrong one to name.
    j->Require("C1-10", !got.empty() && wrong == got.end(), reason::kWrongLength,
               wrong == got.end()
                   ? fmt::format("cell {}: no request has a counted {} length", cell.id, what)
                   : fmt::format("cell {}: a request has {} {} tokens, {} were planned", cell.id,
                                 *wrong, what, want));
  };
  lengths("input", r.input_tokens, t.input_tokens);
  lengths("output", r.output_tokens, t.output_tokens);
  j->Require("C1-10", r.ignore_eos, reason::kWrongLength,
             fmt::format("cell {}: end-of-sequence was not ignored", cell.id));
  j->Require("C1-01", r.max_model_len >= context_length, reason::kContextBelowTarget,
             fmt::format("cell {}: maximum model length {}, the target is {}", cell.id,
                         r.max_model_len, context_length));
  j->Require("C1-13", r.backend_source == "process", reason::kBackendNotLive,
             fmt::format("cell {}: the backend `{}` was taken from the {}", cell.id, r.backend,
                         r.backend_source));
}

}  // namespace

TextMap ReadTextMap(const Field& f) {
  TextMap out;
  for (const auto& [key, value] : f.Members()) out[key] = value.Text();
  return out;
}

Tuning ReadTuning(const Field& f) {
  Tuning t;
  const Field w = f.At("workload");
  t.workload = w.At("declared").OneOf({"formal", "short"});
  t.input_tokens = w.At("input_tokens").Int(1, int64_t{1} << 30);
  t.output_tokens = w.At("output_tokens").Int(1, int64_t{1} << 30);
  t.concurrencies = w.At("concurrencies").Ints(1, 1 << 20, 1);
  t.rounds = f.At("rounds_planned").Int(1, 1000);
  for (const auto& [axis, values] : f.At("axes").Members()) t.axes[axis] = values.Strings(1);
  for (const Field& c : f.At("cells").Items(1)) {
    TuningCell cell;
    cell.id = c.At("id").Str();
    for (const auto& [axis, value] : c.At("axes").Members()) cell.axes[axis] = value.Str();
    cell.concurrency = c.At("concurrency").Int(1, 1 << 20);
    cell.status = c.At("status").OneOf({"measured", "failed"});
    cell.failure = c.At("failure").Text();
    for (const Field& r : c.At("rounds").Items()) {
      cell.rounds.push_back({.throughput = r.At("output_throughput").Real(0, 1e12),
                             .backend = r.At("backend").Str(),
                             .backend_source = r.At("backend_source").OneOf({"process", "flag"}),
                             .input_tokens = r.At("input_tokens").Ints(0, int64_t{1} << 30),
                             .output_tokens = r.At("output_tokens").Ints(0, int64_t{1} << 30),
                             .max_model_len = r.At("max_model_len").Int(0, int64_t{1} << 40),
                             .ignore_eos = r.At("ignore_eos").Bool()});
    }
    t.cells.push_back(std::move(cell));
  }
  t.failed_in_log = f.At("failed_in_log").Strings();
  t.last_gain_percent = f.At("last_step").At("gain_percent").Real(-1e6, 1e6);
  t.spread_percent = f.At("last_step").At("spread_percent").Real(0, 1e6);
  return t;
}

Baseline ReadBaseline(const Field& f) {
  Baseline b;
  b.config = ReadTextMap(f.At("config"));
  b.recipe = ReadTextMap(f.At("recipe"));
  const Field s = f.At("switch");
  b.switch_name = s.At("name").Str();
  b.switch_value = s.At("value").Text();
  b.config_sha256 = f.At("config_sha256").Hash();
  const Field frozen = f.At("frozen");
  b.frozen_sha256 = frozen.At("config_sha256").Hash();
  b.frozen_time = frozen.At("time").Time();
  b.patched_symbols = f.At("patched_symbols_executed").Strings();
  b.handicaps = f.At("consistency_settings").Strings();
  const Field bits = f.At("patch_compare");
  b.patched_bits = bits.At("patched_sha256").Hash();
  b.unpatched_bits = bits.At("unpatched_sha256").Hash();
  return b;
}

std::vector<std::string> ReadMaterials(const Field& f, std::string* image, bool* failed_none) {
  std::vector<std::string> empty;
  *image = f.At("image").Text();
  for (const Item& item : kItems) {
    const std::optional<Field> at = f.MaybeAt(item.key);
    const std::string text = at ? at->Text() : std::string();
    if (text.find_first_not_of(" \t\n") == std::string::npos) {
      empty.push_back(fmt::format("{} {}", item.row, item.key));
    }
    if (std::string_view(item.key) == "failed_items") *failed_none = text == "none";
  }
  return empty;
}

void JudgeTuning(Judging* j, const Tuning& t, int64_t context_length) {
  j->Require("C1-13", t.rounds >= kMinRounds, reason::kTooFewRounds,
             fmt::format("{} rounds were planned; at least {} are needed", t.rounds, kMinRounds));
  std::map<std::string, const TuningCell*> by_name;
  std::set<std::string> ids;
  for (const TuningCell& cell : t.cells) {
    j->Require("C1-11", ids.insert(cell.id).second && by_name.emplace(NameOf(cell), &cell).second,
               reason::kDuplicateName, fmt::format("two cells are {} / {}", cell.id, NameOf(cell)));
  }
  for (const std::string& name : PlannedCells(t)) {
    const auto at = by_name.find(name);
    if (!j->Require("C1-11", at != by_name.end(), reason::kCellMissing,
                    fmt::format("no result and no failure for {}", name))) {
      continue;
    }
    const TuningCell& cell = *at->second;
    if (cell.status == "failed") {
      j->Require("C1-11", !cell.failure.empty(), reason::kCellMissing,
                 fmt::format("cell {} failed without a reason", cell.id));
      continue;
    }
    j->Require("C1-13", static_cast<int64_t>(cell.rounds.size()) >= t.rounds, reason::kTooFewRounds,
               fmt::format("cell {} has {} of {} rounds", cell.id, cell.rounds.size(), t.rounds));
    for (const TuningRound& r : cell.rounds) JudgeRound(j, t, cell, r, context_length);
  }
  // What no row plans cannot be explained away either: it would be the best of an unknown search.
  const std::vector<std::string> planned = PlannedCells(t);
  for (const auto& [name, cell] : by_name) {
    j->Require("C1-11", std::find(planned.begin(), planned.end(), name) != planned.end(),
               reason::kAnswerContradicted,
               fmt::format("cell {} ({}) is outside the plan", cell->id, name),
               "add its axis value or concurrency to the plan");
  }
  for (const std::string& id : t.failed_in_log) {
    const auto at = std::find_if(t.cells.begin(), t.cells.end(),
                                 [&](const TuningCell& c) { return c.id == id; });
    j->Require("GEN-18", at != t.cells.end() && at->status == "failed", reason::kFailedRowsDropped,
               fmt::format("the log holds {} as failed, the table does not", id));
  }
  if (t.workload == "formal") {
    j->Require(
        "C1-10", t.input_tokens == kFormalInput && t.output_tokens == kFormalOutput,
        reason::kWrongLength,
        fmt::format("declared formal with {} in and {} out", t.input_tokens, t.output_tokens));
    for (const int64_t c : {1, 2, 4, 8, 16, 32, 64}) {
      j->Require(
          "C1-10",
          std::find(t.concurrencies.begin(), t.concurrencies.end(), c) != t.concurrencies.end(),
          reason::kPointMissing, fmt::format("no point at concurrency {}", c));
    }
  } else {
    j->NotCovered("C1-10",
                  fmt::format("{} in / {} out at concurrency 1 to 64: a declared short workload of "
                              "{} in / {} out ran at {}",
                              kFormalInput, kFormalOutput, t.input_tokens, t.output_tokens,
                              fmt::join(t.concurrencies, ", ")),
                  "measure the formal workload on the target hardware");
  }
  j->Require("STOP-01", t.last_gain_percent <= t.spread_percent, reason::kStillImproving,
             fmt::format("the last step gained {} %, the spread is {} %", t.last_gain_percent,
                         t.spread_percent));
}

void JudgeBaseline(Judging* j, const Baseline& b) {
  std::vector<std::string> differ;
  std::set<std::string> keys;
  for (const auto& [key, value] : b.config) keys.insert(key);
  for (const auto& [key, value] : b.recipe) keys.insert(key);
  for (const std::string& key : keys) {
    if (key == b.switch_name) continue;
    const auto a = b.config.find(key), r = b.recipe.find(key);
    if (a == b.config.end() || r == b.recipe.end() || a->second != r->second) {
      differ.push_back(fmt::format("{} ({} against the recipe's {})", key,
                                   a == b.config.end() ? "absent" : a->second,
                                   r == b.recipe.end() ? "absent" : r->second));
    }
  }
  j->Require("C1-12", !b.recipe.empty() && differ.empty(), reason::kServingOnlyOptimum,
             b.recipe.empty() ? "the recipe has no keys"
                              : fmt::format("keys that differ: {}", fmt::join(differ, ", ")));
  j->Require("C1-12", b.switch_value == "0" || b.switch_value == "unset",
             reason::kServingOnlyOptimum,
             fmt::format("{} is `{}` in the baseline; 0 is the baseline's arm", b.switch_name,
                         Printable(b.switch_value)));
  j->Require("TRACK-02", b.handicaps.empty(), reason::kConsistencyHandicap,
             fmt::format("settings made for consistency and not in the user's recipe: {}",
                         fmt::join(b.handicaps, ", ")));
  j->Require("TRACK-07", b.patched_symbols.empty(), reason::kConsistencyHandicap,
             fmt::format("alignment code executed in the baseline: {}",
                         fmt::join(b.patched_symbols, ", ")));
  j->Require("STOP-05", b.patched_bits == b.unpatched_bits, reason::kConsistencyHandicap,
             "the switched-off arm has other bits with the alignment patches than without",
             "find what the patches change when they are off");
  j->Require("C1-14", b.config_sha256 == b.frozen_sha256, reason::kFrozenChanged,
             fmt::format("frozen {}, now {}", b.frozen_sha256.substr(0, 12),
                         b.config_sha256.substr(0, 12)));
}

}  // namespace tare::workflow
