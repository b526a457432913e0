// From the log and its artifacts to what a report says.

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "base/json.h"
#include "base/reasons.h"
#include "base/sha256.h"
#include "workflow/claims/claim.h"
#include "workflow/gates/bench_result.h"
#include "workflow/gates/table.h"
#include "workflow/layout.h"
#include "workflow/ledger.h"
#include "workflow/report/report.h"
#include "workflow/signoff.h"

namespace tare::workflow {
namespace {

constexpr uint64_t kLargestRead = uint64_t{16} << 20;
constexpr size_t kWorstTensors = 8;

std::string Text(const Json& object, const char* key) {
  const auto at = object.find(key);
  if (at == object.end() || at->is_null()) return {};
  return at->is_string() ? at->get<std::string>() : at->dump();
}
int64_t Whole(const Json& object, const char* key) {
  const auto at = object.find(key);
  return at != object.end() && at->is_number_integer() ? at->get<int64_t>() : 0;
}
std::optional<double> Real(const Json& object, const char* key) {
  const auto at = object.find(key);
  if (at == object.end() || !at->is_number()) return std::nullopt;
  const double value = at->get<double>();
  return std::isfinite(value) ? std::optional(value) : std::nullopt;
}
const Json& Part(const Json& object, const char* key) {
  static const Json none = Json::object();
  const auto at = object.find(key);
  return at == object.end() ? none : *at;
}

class Collector {
 public:
  Collector(Env* env, const TaskView& view, TaskReport* out)
      : env_(env), view_(view), state_(view.state), staleness_(view.state), out_(out) {}

  void Run() {
    Head();
    out_->board = Board(state_, &staleness_);
    Acceptances();
    Evidence();
    for (const RunRecord& run : state_.runs) Artifacts(run);
    Throughput();
    Stops();
    NotCovered();
  }

 private:
  void Head() {
    TaskReport& r = *out_;
    r.task_id = state_.task_id;
    r.created = state_.created;
    r.latest_time = state_.latest_time;
    r.events = state_.events;
    if (state_.config() != nullptr) {
      r.name = state_.config()->config.String("task.name");
      r.inference_only = state_.config()->config.String("task.scope") == "inference-only";
    }
  }

  Source From(const RunRecord& run) const {
    const ArtifactRecord* conclusion = state_.ArtifactOf(run, Role::kConclusion);
    return {run.id, conclusion == nullptr ? "" : conclusion->path};
  }

  // Joins the latest word of `kind` (at `step`, or anywhere) to an acceptance.
  void Join(Acceptance* acceptance, EvidenceKind kind, std::string_view step) {
    const RunRecord* latest = nullptr;
    EvidenceStatus status;
    for (const RunRecord& run : state_.runs) {
      if (run.kind != kind || (!step.empty() && run.step != step)) continue;
      const EvidenceStatus now = AssessRun(state_, &staleness_, run);
      // As on the board: a run that never came to a word does not undo a pass before it.
      const bool speaks = now.verdict == Verdict::kPass || run.conclusion;
      if (latest == nullptr || speaks || status.verdict != Verdict::kPass) {
        latest = &run;
        status = now;
      }
    }
    const std::string where = step.empty() ? std::string(EvidenceKindName(kind))
                                           : fmt::format("{} at {}", EvidenceKindName(kind), step);
    Verdict verdict = Verdict::kNotCovered;
    std::string code(reason::kNoEvidence), detail = where + ": no run";
    if (latest != nullptr) {
      acceptance->sources.push_back(From(*latest));
      verdict = status.verdict;
      code = status.reason;
      detail = where + ": " + (status.detail.empty() ? "run " + latest->id : status.detail);
    }
    // A step that the board holds closed lends nothing to an acceptance.
    for (const BoardLine& line : out_->board) {
      if (line.step != step || verdict != Verdict::kPass || line.verdict == Verdict::kPass)
        continue;
      verdict = line.verdict;
      code = line.reason;
      detail = fmt::format("{} is closed: {}", step, line.detail);
    }
    const bool first = acceptance->detail.empty();
    if (first || (acceptance->verdict == Verdict::kPass && verdict != Verdict::kPass)) {
      acceptance->verdict = verdict;
      acceptance->reason = verdict == Verdict::kPass ? "" : code;
      acceptance->detail = detail;
    }
  }

  void Acceptances() {
    Acceptance forward{
        .name = "Forward consistency",
        .asks = "inference invariance (E5 at C3) and both training paths (E6 at C5)"};
    Join(&forward, EvidenceKind::kE5, "C3");
    Join(&forward, EvidenceKind::kE6, "C5");
    Acceptance backward{.name = "Backward conformance",
                        .asks = "independent gradient validation (E7 at C7)"};
    Join(&backward, EvidenceKind::kE7, "C7");
    Acceptance quality{.name = "Training quality", .asks = "a quality evaluation (E9)"};
    Join(&quality, EvidenceKind::kE9, "");
    Acceptance performance{.name = "Performance", .asks = "the paired measurement (E10 at C10)"};
    Join(&performance, EvidenceKind::kE10, "C10");
    out_->acceptances = {forward, backward, quality, performance};
  }

  void Evidence() {
    for (const EvidenceKind kind : AllEvidenceKinds()) {
      for (const RunRecord& run : state_.runs) {
        if (run.kind != kind) continue;
        const EvidenceStatus status = AssessRun(state_, &staleness_, run);
        out_->evidence.push_back({kind, run.step, status.verdict, status.reason, status.detail,
                                  run.finished, From(run)});
        if (status.verdict == Verdict::kPass) {
          for (const ScopeBox& box : run.conclusion->scope.boxes()) {
            out_->scope.push_back({kind, run.step, box, From(run)});
          }
        } else {
          out_->failed.emplace_back(
              fmt::format("{} {} {}: {} {} {}", run.step, EvidenceKindName(kind),
                          run.candidate.empty() ? "no candidate" : "candidate " + run.candidate,
                          VerdictName(status.verdict), status.reason, status.detail),
              From(run));
        }
      }
    }
    for (const CandidateRecord& c : state_.candidates) {
      if (c.state != "excluded") continue;
      out_->failed.emplace_back(
          fmt::format("{} candidate {} excluded: {} (event {})", c.step, c.name, c.reason, c.seq),
          Source{});
    }
  }

  // The bytes of an artifact, only if they are those that the log names.
  std::optional<std::string> Read(const ArtifactRecord& artifact) {
    if (artifact.bytes > kLargestRead) {
      out_->skipped.push_back(fmt::format("{}: {} bytes, more than a report reads ({})",
                                          artifact.path, artifact.bytes, kLargestRead));
      return std::nullopt;
    }
    const std::string path = JoinPath(view_.dir, artifact.path);
    Result<std::string> bytes = std::string();
    if (const Status plain = CheckPlainFile(env_, path); plain.ok()) {
      bytes = env_->ReadFile(path);
    } else {
      bytes = plain;
    }
    if (!bytes.ok() || Hex(Sha256Of(*bytes)) != artifact.sha256) {
      out_->skipped.push_back(
          fmt::format("{}: {}", artifact.path,
                      bytes.ok() ? "its bytes are not those of the log" : "it cannot be read"));
      return std::nullopt;
    }
    return *std::move(bytes);
  }

  void Artifacts(const RunRecord& run) {
    // Numbers of contracts that are not in force any more do not carry over (BASE-05).
    if (OfEarlierArithmetic(state_, run)) {
      ++earlier_;
      return;
    }
    for (const size_t index : run.artifacts) {
      const ArtifactRecord& artifact = state_.artifacts[index];
      if (artifact.role != Role::kRaw && artifact.role != Role::kMaterial) continue;
      if (!artifact.path.ends_with(".json")) continue;
      const auto bytes = Read(artifact);
      if (!bytes) continue;
      const auto json = ParseJson(*bytes);
      if (!json.ok()) {
        out_->skipped.push_back(fmt::format("{}: {}", artifact.path, json.status().message()));
        continue;
      }
      if (!json->is_object()) continue;
      const Source source{run.id, artifact.path};
      const std::string schema = Text(*json, "schema");
      if (schema == "tare.diff/1") Diff(*json, source);
      if (schema == "tare.verdict/1") Paths(*json, source);
      if (schema == "tare.receipt/1") Loop(*json, source);
      if (schema == "tare.gate_judgement/1") Judgement(*json, source);
      if (json->contains("output_throughput") && json->contains("max_concurrency")) {
        Bench(*bytes, run, source);
      }
    }
  }

  void Diff(const Json& diff, const Source& source) {
    const Json& totals = Part(diff, "totals");
    out_->mismatches.push_back({fmt::format("{} against {}, all", Text(diff, "a"), Text(diff, "b")),
                                Whole(totals, "compared"), Whole(totals, "mismatches"),
                                Text(diff, "why"), Text(diff, "verdict"), Text(diff, "reason"),
                                source});
    std::vector<MismatchLine> worst;
    for (const Json& t : Part(diff, "tensors")) {
      if (!t.is_object() || Text(t, "verdict") == "pass") continue;
      const Json& counts = Part(t, "counts");
      const Json& first = Part(t, "first_mismatch");
      std::string where = Text(t, "first_at");
      if (first.contains("a")) {
        where +=
            fmt::format("{}{} / {}", where.empty() ? "" : ": ", Text(first, "a"), Text(first, "b"));
      }
      worst.push_back({Text(t, "name"), Whole(counts, "compared"), Whole(counts, "mismatches"),
                       where, Text(t, "verdict"), Text(t, "reason"), source});
    }
    std::stable_sort(worst.begin(), worst.end(),
                     [](const auto& x, const auto& y) { return x.mismatches > y.mismatches; });
    if (worst.size() > kWorstTensors) worst.resize(kWorstTensors);
    out_->mismatches.insert(out_->mismatches.end(), worst.begin(), worst.end());

    Plot plot{"Logprob difference by position",
              "position in the sequence",
              "largest |a - b|",
              {},
              {source}};
    PlotSeries series{fmt::format("{} against {}", Text(diff, "a"), Text(diff, "b")), {}};
    for (const Json& bucket : Part(diff, "by_position")) {
      const auto largest = Real(bucket, "max_abs");
      if (largest && Whole(bucket, "compared") > 0) {
        series.points.emplace_back(static_cast<double>(Whole(bucket, "begin")), *largest);
      }
    }
    plot.series.push_back(std::move(series));
    Keep(std::move(plot));
  }

  void Paths(const Json& verdict, const Source& source) {
    for (const Json& c : Part(verdict, "comparisons")) {
      if (!c.is_object()) continue;
      const int64_t mismatches = Whole(c, "mismatches");
      out_->mismatches.push_back(
          {fmt::format("theta{}: {} against {}", Text(c, "version"), Text(c, "a"), Text(c, "b")),
           Whole(c, "compared"), mismatches, Text(c, "first"),
           Whole(c, "compared") == 0 ? "inconclusive"
           : mismatches == 0         ? "pass"
                                     : "fail",
           mismatches == 0 ? "" : std::string(reason::kBitMismatch), source});
    }
  }

  void Loop(const Json& receipt, const Source& source) {
    Plot reward{"Mean reward by version", "version of the weights", "mean reward", {}, {source}};
    Plot norm{"Gradient norm by update", "update", "global norm", {}, {source}};
    Plot step{"Time by version", "version of the weights", "seconds", {}, {source}};
    PlotSeries rewards{"mean reward", {}}, norms{"gradient norm", {}}, rollout{"rollout", {}},
        update{"update", {}};
    const auto seconds = [](const Json& part) -> std::optional<double> {
      const auto begin = Real(part, "started_ns"), end = Real(part, "ended_ns");
      return begin && end && *end >= *begin ? std::optional((*end - *begin) * 1e-9) : std::nullopt;
    };
    double x = 0;
    for (const Json& round : Part(receipt, "rounds")) {
      if (const auto mean = Real(Part(round, "reward"), "mean"))
        rewards.points.emplace_back(x, *mean);
      if (const auto s = seconds(Part(round, "rollout"))) rollout.points.emplace_back(x, *s);
      x += 1;
    }
    x = 0;
    for (const Json& u : Part(receipt, "updates")) {
      if (const auto n = Real(u, "gradient_norm")) norms.points.emplace_back(x, *n);
      if (const auto s = seconds(u)) update.points.emplace_back(x, *s);
      x += 1;
    }
    reward.series = {std::move(rewards)};
    norm.series = {std::move(norms)};
    step.series = {std::move(rollout), std::move(update)};
    for (Plot* p : {&reward, &norm, &step}) Keep(std::move(*p));
  }

  void Judgement(const Json& json, const Source& source) {
    GateFindings found{
        Text(json, "gate"), Text(json, "verdict"), Text(json, "reason"), {}, 0, source};
    for (const Json& f : Part(json, "findings")) {
      if (!f.is_object()) continue;
      if (Text(f, "verdict") == "pass") {
        ++found.passed;
        continue;
      }
      found.findings.emplace_back(
          Text(f, "row"),
          fmt::format("{} {}: {}", Text(f, "verdict"), Text(f, "reason"), Text(f, "detail")));
    }
    for (const Json& n : Part(Part(json, "scope"), "not_covered")) {
      out_->not_covered.push_back(
          fmt::format("{} {}: {}", found.gate, Text(n, "row"), Text(n, "what")));
    }
    const auto same = std::find_if(out_->judgements.begin(), out_->judgements.end(),
                                   [&](const GateFindings& g) { return g.gate == found.gate; });
    if (same == out_->judgements.end()) {
      out_->judgements.push_back(std::move(found));
    } else {
      *same = std::move(found);  // the later word
    }
  }

  void Bench(std::string_view bytes, const RunRecord& run, const Source& source) {
    const auto result = ParseBenchResult(bytes);
    if (!result.ok()) {
      out_->skipped.push_back(fmt::format("{}: {}", source.artifact, result.status().message()));
      return;
    }
    const std::string name =
        run.candidate.empty() ? run.step + " run " + run.id.substr(0, 13) : run.candidate;
    throughput_[name].emplace_back(static_cast<double>(result->max_concurrency),
                                   result->output_throughput);
    throughput_sources_.push_back(source);
  }

  void Throughput() {
    Plot plot{"Throughput over concurrency",
              "concurrent requests",
              "output tokens a second",
              {},
              throughput_sources_};
    for (auto& [name, points] : throughput_) {
      std::sort(points.begin(), points.end());
      plot.series.push_back({name, points});
    }
    Keep(std::move(plot));
  }

  void Keep(Plot plot) {
    std::erase_if(plot.series, [](const PlotSeries& s) { return s.points.empty(); });
    if (!plot.series.empty()) out_->plots.push_back(std::move(plot));
  }

  void Stops() {
    for (const Stop& stop : TheWorkflow().stops) {
      const SignOffStatus status = StatusOfSignOff(state_, &staleness_, stop.id);
      HumanStop line{stop.id,       stop.title,    stop.text, status.verdict,
                     status.reason, status.detail, {}};
      if (status.verdict == Verdict::kPass) line.detail = "approved by " + status.person;
      for (const ArtifactRecord& a : state_.artifacts) {
        if (a.role != Role::kReview) continue;
        const auto path = ParseArtifactPath(a.path);
        if (path.ok() && path->step == stop.id) line.materials.push_back({path->run_id, a.path});
      }
      out_->stops.push_back(std::move(line));
    }
  }

  void NotCovered() {
    if (out_->inference_only) {
      out_->not_covered.push_back(
          "training loop not accepted: the task is inference only (GEN-23)");
    }
    for (const Acceptance& a : out_->acceptances) {
      if (a.verdict != Verdict::kPass) {
        out_->not_covered.push_back(
            fmt::format("{}: {} {}", a.name, VerdictName(a.verdict), a.detail));
      }
    }
    std::map<EvidenceKind, bool> seen;
    for (const EvidenceLine& e : out_->evidence) seen[e.kind] = true;
    for (const EvidenceKind kind : AllEvidenceKinds()) {
      if (!seen.contains(kind)) {
        out_->not_covered.push_back(
            fmt::format("no run of kind {} ({})", EvidenceKindName(kind), EvidenceKindText(kind)));
      }
    }
    for (const BoardLine& line : out_->board) {
      if (line.verdict != Verdict::kPass) {
        out_->not_covered.push_back(
            fmt::format("{} is closed: {} {}", line.step, line.reason, line.detail));
      }
    }
    if (earlier_ > 0) {
      out_->not_covered.push_back(fmt::format(
          "{} runs were made under earlier contracts: their numbers are not shown for the present "
          "arithmetic",
          earlier_));
    }
    if (!BaselineChangeOf(state_, &staleness_).before.empty())
      out_->not_covered.push_back(std::string(kChangeSentence));
    out_->not_covered.push_back(
        "every shape, topology, dtype, model and code path that no line of the scope names");
  }

  Env* env_;
  const TaskView& view_;
  const State& state_;
  Staleness staleness_;
  TaskReport* out_;
  std::map<std::string, std::vector<std::pair<double, double>>> throughput_;
  std::vector<Source> throughput_sources_;
  int64_t earlier_ = 0;  // runs of earlier arithmetic
};

}  // namespace

Result<TaskReport> CollectReport(Env* env, const TaskView& view) {
  TARE_RETURN_IF_ERROR(view.log.scan.broken.Annotate("events.jsonl"));
  TaskReport report;
  report.head = view.log.scan.head;
  Collector(env, view, &report).Run();
  return report;
}

}  // namespace tare::workflow
