#include "workflow/claims/claim.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "base/check.h"
#include "workflow/layout.h"
#include "workflow/record.h"
#include "workflow/task.h"

namespace tare::workflow {
namespace {

constexpr std::array kClaims = {
#define TARE_CLAIM(name, function, rows, sentence) ClaimSpec{name, rows, sentence, function},
#include "workflow/claims/claims.inc"
#undef TARE_CLAIM
};

std::string Text(const Json& json) { return json.dump(1) + "\n"; }

// Every object of the document that is a reference, with its place.
void References(const Json& value, const std::string& place,
                std::vector<std::pair<std::string, const Json*>>* out) {
  if (value.is_object()) {
    if (value.contains("artifact") && value.contains("depends")) {
      out->emplace_back(place, &value);
      return;
    }
    for (const auto& [key, item] : value.items()) References(item, place + "." + key, out);
  } else if (value.is_array()) {
    for (size_t i = 0; i < value.size(); ++i)
      References(value[i], fmt::format("{}[{}]", place, i), out);
  }
}

GateFinding Finding(std::string_view code, std::string detail) {
  return FindingOf("ledger", code, std::move(detail));
}

// A plan's budget is the task's, where the task has one: it cannot grant itself more.
std::vector<GateFinding> CheckBudget(const State& state, const Json& plan) {
  std::vector<GateFinding> out;
  if (state.config() == nullptr) return out;
  for (const auto& [key, part] : {std::pair<const char*, const char*>{"hardware.nodes", "nodes"},
                                  {"hardware.count", "devices"}}) {
    const std::string text(state.config()->config.Text(key));
    if (text.empty()) continue;
    const int64_t have = std::strtoll(text.c_str(), nullptr, 10);
    const int64_t says = plan.at("budget").at(part).get<int64_t>();
    if (says > have) {
      out.push_back(FindingOf(
          "TRACK-09", reason::kPlanOverBudget,
          fmt::format("the plan gives itself {} {}, the task's {} is {}", says, part, key, have)));
    }
  }
  return out;
}

const RunRecord* RunOf(const State& state, const ArtifactRecord& artifact) {
  const Result<ArtifactPath> path = ParseArtifactPath(artifact.path);
  return path.ok() ? state.FindRun(path->run_id) : nullptr;
}

// What of the reference the run does not bear out; empty: nothing.
std::string Contradiction(const State& state, Staleness* staleness, const RunRecord& run,
                          const Json& r) {
  const auto text = [&](const char* key) { return r.value(key, std::string()); };
  const std::string kind =
      run.kind ? std::string(EvidenceKindName(*run.kind)) : std::string("none");
  if (text("kind") != kind) return fmt::format("its run is {}, not {}", kind, text("kind"));
  const std::string verdict =
      run.conclusion ? std::string(VerdictName(run.conclusion->verdict)) : "without conclusion";
  if (text("verdict") != verdict)
    return fmt::format("its run is {}, not {}", verdict, text("verdict"));
  if (const auto missing = state.MissingLinks(run); !missing.empty())
    return fmt::format("its run lacks {}", missing.front());
  // A reference may cut the fraction of the second off.
  if (text("time").substr(0, 19) != run.finished.substr(0, 19))
    return fmt::format("its run ended {}, not {}", run.finished, text("time"));
  const bool fresh = !staleness->Of(run).has_value();
  if (r.value("fresh", false) != fresh)
    return fresh ? "its run is fresh, and is given as stale" : "its run is stale, not fresh";
  for (const auto& [id, digest] : r.at("depends").items()) {
    const auto at = std::find_if(
        run.dependencies.begin(), run.dependencies.end(),
        [&, id = id](const Dependency& d) { return DependencyId(d.type, d.name) == id; });
    if (at == run.dependencies.end()) return fmt::format("its run declares no input {}", id);
    if (Json(at->digest) != digest) return fmt::format("its run had another {}", id);
  }
  return {};
}

// "records", which any claim may have beside its own keys, is read here; the judge sees the rest.
GateJudgement JudgeDocument(const ClaimSpec& spec, const Json& document) {
  if (!document.contains("records")) return spec.judge(document);
  const Json records = {{"schema", document.at("schema")}, {"records", document.at("records")}};
  Judging reading(spec.name, records, fmt::format("tare.claim.{}/v1", spec.name));
  for (const Field& r : reading.root().At("records").Items(1)) ReadReference(r);
  if (!reading.WellFormed()) return reading.Finish();
  Json rest = document;
  rest.erase("records");
  return spec.judge(rest);
}

// The claim as one ended run of step `task`.
Result<std::string> RecordClaim(Env* env, const std::string& dir, const std::string& actor,
                                const std::string& name, const Json& document,
                                const GateJudgement& judgement) {
  Conclusion conclusion;
  conclusion.verdict = judgement.verdict;
  conclusion.reason = judgement.reason;
  TARE_ASSIGN_OR_RETURN(conclusion.scope, Scope::FromJson(judgement.scope.at("covers")));
  TARE_ASSIGN_OR_RETURN(const auto task, OpenWaiting(env, dir, actor));
  RunStart start;
  start.step = "task";
  start.kind = EvidenceKind::kE1;  // a reading of records: it opens no gate
  // A claim of change names both contracts, so that BaselineChangeOf can find it.
  ClaimDepends depends;
  if (name == "baseline-change") {
    for (const char* side : {"old", "new"}) {
      const std::string digest = document.at(side).at("contracts").get<std::string>();
      depends.push_back(fmt::format("{}={}", ChangeSideId(side, digest), digest));
    }
  }
  TARE_ASSIGN_OR_RETURN(start.dependencies,
                        ResolveDependencies(env, task->state(), {}, depends, {"none"}));
  TARE_ASSIGN_OR_RETURN(std::string config,
                        CanonicalJson({{"schema", "tare-run-config-1"},
                                       {"command", {"judge", name}},
                                       {"scripts", Json::array()},
                                       {"task", Json::object()},
                                       {"dependencies", DependenciesToJson(start.dependencies)}}));
  config += '\n';
  start.content_id = Hex(Sha256Of(config));
  TARE_ASSIGN_OR_RETURN(const std::string run, task->StartRun(start));
  TARE_RETURN_IF_ERROR(task->AddBytes(run, "config.json", Role::kConfig, config));
  TARE_RETURN_IF_ERROR(
      task->AddBytes(run, "identity.json", Role::kIdentity, Text(ExecutionIdentity(env, {}, {}))));
  TARE_RETURN_IF_ERROR(
      task->AddBytes(run, fmt::format("claim-{}.json", name), Role::kRaw, Text(document)));
  TARE_RETURN_IF_ERROR(
      task->AddBytes(run, "judgement.json", Role::kMaterial, Text(judgement.ToJson())));
  TARE_ASSIGN_OR_RETURN(const std::string text, CanonicalJson(conclusion.ToJson()));
  TARE_RETURN_IF_ERROR(task->AddBytes(run, "conclusion.json", Role::kConclusion, text + "\n"));
  RunEnd end;
  end.exit_code = 0;
  end.conclusion = conclusion;
  TARE_RETURN_IF_ERROR(task->EndRun(run, end));
  TARE_RETURN_IF_ERROR(task->WriteIndexes());
  return run;
}

}  // namespace

std::string Reference::On(const std::string& dependency) const {
  const auto at = depends.find(dependency);
  return at == depends.end() ? std::string() : at->second;
}

Reference ReadReference(const Field& f) {
  Reference r;
  r.artifact = f.At("artifact").Hash();
  const Field kind = f.At("kind");
  r.kind = kind.Str();
  if (!r.kind.empty() && !ParseEvidenceKind(r.kind))
    kind.Malformed("is no evidence kind E1 to E10");
  const Field verdict = f.At("verdict");
  r.verdict = verdict.Str();
  if (!r.verdict.empty() && !ParseVerdict(r.verdict)) verdict.Malformed("is no verdict");
  r.fresh = f.At("fresh").Bool();
  r.time = f.At("time").Time();
  for (const auto& [id, digest] : f.At("depends").Members()) r.depends[id] = digest.Hash();
  return r;
}

std::optional<Reference> ReadMaybeReference(const Field& f) {
  if (f.IsNull()) return std::nullopt;
  return ReadReference(f);
}

std::span<const ClaimSpec> AllClaims() { return kClaims; }

const ClaimSpec* FindClaim(std::string_view name) {
  const auto* at = std::find_if(kClaims.begin(), kClaims.end(),
                                [&](const ClaimSpec& c) { return c.name == name; });
  return at == kClaims.end() ? nullptr : at;
}

const ClaimSpec* ClaimOfSchema(std::string_view schema) {
  constexpr std::string_view kHead = "tare.claim.", kTail = "/v1";
  if (!schema.starts_with(kHead) || !schema.ends_with(kTail)) return nullptr;
  schema.remove_prefix(kHead.size());
  schema.remove_suffix(std::min(kTail.size(), schema.size()));
  return FindClaim(schema);
}

ScopeBox BoxOf(ClaimScope scope) {
  return {.shape = std::move(scope.shape),
          .topology = {std::move(scope.topology)},
          .dtype = {"as recorded"},
          .model = {std::move(scope.model)},
          .path = {std::move(scope.path)},
          .contracts = {}};
}

bool TimeBefore(const std::string& a, const std::string& b) {
  // The part up to the second orders as text; a missing fraction is .0.
  const auto fraction = [](const std::string& t) {
    return t.size() > 20 && t[19] == '.' ? t.substr(20, t.size() - 21) : std::string("0");
  };
  const std::string head_a = a.substr(0, 19), head_b = b.substr(0, 19);
  if (head_a != head_b) return head_a < head_b;
  std::string fa = fraction(a), fb = fraction(b);
  fa.resize(std::max(fa.size(), fb.size()), '0');
  fb.resize(fa.size(), '0');
  return fa < fb;
}

std::vector<GateFinding> CheckReferences(Env* env, const std::string& dir, const State& state,
                                         Staleness* staleness, const Json& document) {
  std::vector<GateFinding> out;
  std::vector<std::pair<std::string, const Json*>> references;
  References(document, "claim", &references);
  if (references.empty()) {
    out.push_back(Finding(reason::kReferenceUnrecorded,
                          "the claim names no record of this task: what it says was taken from "
                          "nothing that was kept; list it under \"records\""));
  }
  for (const auto& [place, r] : references) {
    const std::string sha256 = r->value("artifact", std::string());
    // The same bytes may be recorded by several runs: one that bears the reference out is enough.
    std::string why = "no recorded artifact has this digest";
    const ArtifactRecord* found = nullptr;
    for (const ArtifactRecord& a : state.artifacts) {
      if (a.sha256 != sha256) continue;
      const RunRecord* run = RunOf(state, a);
      why = run == nullptr ? "it belongs to no run" : Contradiction(state, staleness, *run, *r);
      if (!why.empty()) continue;
      found = &a;
      break;
    }
    if (found == nullptr) {
      out.push_back(Finding(reason::kReferenceUnrecorded,
                            fmt::format("{} ({}): {}", place, sha256.substr(0, 12), why)));
      continue;
    }
    const Result<std::string> bytes = env->ReadFile(JoinPath(dir, found->path));
    if (!bytes.ok()) {
      out.push_back(Finding(reason::kArtifactMissing, fmt::format("{}: {}: {}", place, found->path,
                                                                  bytes.status().message())));
    } else if (Hex(Sha256Of(*bytes)) != sha256) {
      out.push_back(Finding(reason::kArtifactChanged, fmt::format("{}: {}", place, found->path)));
    }
  }
  return out;
}

Result<RunGateReport> JudgeClaimDocument(Env* env, const std::string& actor,
                                         const std::string& task, const Json& document) {
  const ClaimSpec* spec = ClaimOfSchema(document.value("schema", std::string()));
  TARE_CHECK(spec != nullptr);
  RunGateReport report;
  GateJudgement& j = report.judgement;
  j = JudgeDocument(*spec, document);
  const bool readable = j.reason != reason::kMalformedEvidence;
  if (!task.empty() && readable) {
    TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env, task));
    Staleness staleness(view.state);
    // A plan speaks of what has not happened yet: it has no records.
    j.Add(spec->name == "plan" ? CheckBudget(view.state, document)
                               : CheckReferences(env, task, view.state, &staleness, document));
    TARE_ASSIGN_OR_RETURN(report.run_id,
                          RecordClaim(env, task, actor, std::string(spec->name), document, j));
  } else if (readable) {
    j.scope["notes"].push_back("without --task nobody looked whether the named records exist");
  }
  const GateFinding* worst = j.Gravest();
  report.verdict = j.verdict;
  report.reason = j.reason;
  if (worst != nullptr && worst->verdict != Verdict::kPass) {
    report.detail = worst->row + ": " + worst->detail;
    report.next = worst->next;
  }
  return report;
}

}  // namespace tare::workflow
