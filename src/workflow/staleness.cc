#include "workflow/staleness.h"

#include "base/reasons.h"
#include "workflow/layout.h"

namespace tare::workflow {

std::string StaleMark::ToString() const {
  std::string out;
  if (was.empty()) {
    out = "it declares no inputs, so a change could not be seen";
  } else if (now.empty()) {
    out = fmt::format("{} {} is unknown now (was {}), which counts as changed",
                      DependencyTypeName(type), name, was.substr(0, 12));
  } else {
    out = fmt::format("{} {} changed: {} -> {}", DependencyTypeName(type), name, was.substr(0, 12),
                      now.substr(0, 12));
  }
  if (via.size() > 1) {
    out += ", through run";
    for (size_t i = 1; i < via.size(); ++i) out += " " + via[i];
  }
  return out;
}

Staleness::Staleness(const State& state) : state_(state) {
  for (size_t r = 0; r < state.runs.size(); ++r) {
    const RunRecord& run = state.runs[r];
    if (!run.ended) continue;  // what a lost or open run left is nobody's input
    for (const size_t a : run.artifacts) {
      auto path = ParseArtifactPath(state.artifacts[a].path);
      if (path.ok()) producers_[LogicalName(*path)].emplace_back(a, r);
    }
  }
}

std::optional<StaleMark> Staleness::Of(const RunRecord& run) {
  const auto at = known_.find(run.id);
  if (at != known_.end()) return at->second;
  StaleMark unknown;
  unknown.via = {run.id};
  if (open_[run.id]) return unknown;
  open_[run.id] = true;
  std::optional<StaleMark> mark;
  if (run.dependencies.empty()) {
    mark = unknown;
  } else {
    mark = OfDependencies(run.dependencies, run.candidate);
    if (mark) mark->via.insert(mark->via.begin(), run.id);
  }
  open_[run.id] = false;
  known_[run.id] = mark;
  return mark;
}

std::optional<StaleMark> Staleness::OfDependencies(const std::vector<Dependency>& dependencies,
                                                   const std::string& candidate) {
  for (const Dependency& d : dependencies) {
    if (auto mark = Check(d, candidate)) return mark;
  }
  return std::nullopt;
}

std::optional<StaleMark> Staleness::Check(const Dependency& d, const std::string& candidate) {
  StaleMark mark{d.type, d.name, d.digest, "", {}};
  if (d.type == DependencyType::kConfig) {
    const ConfigRecord* config = state_.config();
    // A whole-configuration dependency names no key.
    if (config != nullptr) {
      mark.now = d.name == "authority" ? config->config.AuthorityDigest()
                                       : config->config.KeyDigest(d.name);
    }
  } else if (d.type == DependencyType::kArtifact) {
    const auto at = producers_.find(d.name);
    if (at == producers_.end()) return mark;
    std::optional<StaleMark> upstream;
    for (auto p = at->second.rbegin(); p != at->second.rend(); ++p) {
      const RunRecord& run = state_.runs[p->second];
      if (!run.candidate.empty() && run.candidate != candidate) continue;
      auto stale = Of(run);
      if (!stale) {
        mark.now = state_.artifacts[p->first].sha256;
        upstream.reset();
        break;
      }
      if (!upstream) upstream = std::move(stale);  // the latest producer's reason
    }
    if (upstream) return upstream;
  } else {
    const Observation* current = state_.Current(DependencyId(d.type, d.name), candidate);
    if (current != nullptr) mark.now = current->digest;
  }
  if (mark.now == d.digest) return std::nullopt;
  return mark;
}

EvidenceStatus AssessRun(const State& state, Staleness* staleness, const RunRecord& run) {
  const auto no = [](std::string_view code, std::string detail) {
    const Reason* reason = FindReason(code);
    return EvidenceStatus{reason == nullptr ? Verdict::kInconclusive : reason->verdict,
                          std::string(code), std::move(detail)};
  };
  if (!run.kind) return no(reason::kNoEvidence, "a review is authority, not evidence");
  if (run.lost) return no(reason::kRunLost, "its process went away without a result");
  if (!run.ended) return no(reason::kRunOpen, "it has not ended");
  const std::vector<std::string> missing = state.MissingLinks(run);
  if (!missing.empty()) {
    std::string list;
    for (const std::string& m : missing) list += (list.empty() ? "" : ", ") + m;
    return no(reason::kRunIncomplete, "it lacks " + list);
  }
  const Conclusion& conclusion = *run.conclusion;
  if (conclusion.verdict == Verdict::kPass) {
    const bool normal = run.signal == 0 && run.exit_code == 0;
    const bool elsewhere = run.command.empty() && !run.exit_code && run.signal == 0;
    if (!normal && !(elsewhere && !NeedsNormalExit(*run.kind))) {
      return no(reason::kAbnormalExit,
                run.signal != 0 ? fmt::format("killed by signal {}", run.signal)
                : run.exit_code ? fmt::format("exit status {}", *run.exit_code)
                                : std::string("no exit status is recorded"));
    }
  }
  if (!run.superseded_by.empty()) return no(reason::kSuperseded, "by run " + run.superseded_by);
  if (!run.candidate.empty()) {
    const CandidateRecord* c = state.FindCandidate(run.candidate, run.step);
    if (c != nullptr && c->state == "excluded") {
      return no(reason::kCandidateExcluded, Printable(c->name) + ": " + Printable(c->reason));
    }
  }
  if (auto mark = staleness->Of(run)) return no(reason::kStaleEvidence, mark->ToString());
  return {conclusion.verdict, conclusion.reason, ""};
}

Coverage QueryScope(const State& state, Staleness* staleness, const std::string& step,
                    EvidenceKind kind, const ScopePoint& point) {
  Coverage out;
  out.reason = reason::kOutsideScope;
  for (auto run = state.runs.rbegin(); run != state.runs.rend(); ++run) {
    if (run->step != step || run->kind != kind || !run->conclusion ||
        !run->conclusion->scope.Covers(point)) {
      continue;
    }
    const EvidenceStatus status = AssessRun(state, staleness, *run);
    if (status.verdict == Verdict::kPass || status.verdict == Verdict::kFail) {
      // The latest usable word on this very point.
      return {status.verdict, run->id, status.reason};
    }
    out.reason = status.reason;
  }
  return out;
}

}  // namespace tare::workflow
