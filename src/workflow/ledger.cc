#include "workflow/ledger.h"

#include <algorithm>
#include <array>
#include <map>

#include "workflow/layout.h"
#include "workflow/signoff.h"

namespace tare::workflow {
namespace {

constexpr std::array<LedgerRule, 10> kRules = {{
    {"L-CODE", DependencyType::kCode, "source that the run executed has changed"},
    {"L-CONTRACT", DependencyType::kContract, "an operator's numerical contract has changed"},
    {"L-CONFIG", DependencyType::kConfig, "a configuration value with meaning has changed"},
    {"L-IMAGE", DependencyType::kImage, "the image has another digest, whatever its tag"},
    {"L-WEIGHTS", DependencyType::kWeights, "the weights have other bytes"},
    {"L-TOKENS", DependencyType::kTokens, "the tokens are others"},
    {"L-HARDWARE", DependencyType::kHardware, "the device or driver is another"},
    {"L-TOOL", DependencyType::kTool, "the measuring program is another"},
    {"L-THRESHOLD", DependencyType::kThreshold, "the criterion was changed"},
    {"L-UPSTREAM", DependencyType::kArtifact, "evidence that it was made from is lost or differs"},
}};

std::string_view RuleFor(DependencyType type) {
  for (const LedgerRule& rule : kRules) {
    if (rule.type == type) return rule.id;
  }
  return "L-UNKNOWN";
}

std::string NameOf(const RunRecord& run) {
  return run.candidate.empty() ? "run " + run.id : run.candidate;
}

}  // namespace

std::span<const LedgerRule> AllLedgerRules() { return kRules; }

Json LedgerChange::ToJson() const {
  Json out = {{"kept", kept}, {"lost", Json::array()}, {"withdrawn", Json::array()}};
  for (const LostEvidence& l : lost) {
    out["lost"].push_back({{"run", l.run_id},
                           {"rule", l.rule},
                           {"input", DependencyId(l.dependency.type, l.dependency.name)},
                           {"was", l.dependency.digest},
                           {"now", l.now}});
  }
  for (const WithdrawnInference& w : withdrawn) {
    out["withdrawn"].push_back(
        {{"id", w.id}, {"text", w.text}, {"run", w.run_id}, {"rule", w.rule}});
  }
  return out;
}

LedgerChange CompareCandidates(const State& state, const std::string& from,
                               const std::vector<Dependency>& to) {
  std::map<std::string, std::string> now;
  for (const Dependency& d : to) now[DependencyId(d.type, d.name)] = d.digest;
  LedgerChange change;
  // Artifacts of lost runs, as (logical name, digest).
  std::vector<std::pair<std::string, std::pair<std::string, std::string>>> lost_artifacts;
  for (const RunRecord& run : state.runs) {
    if (run.candidate != from || !run.conclusion || run.conclusion->verdict != Verdict::kPass ||
        !state.MissingLinks(run).empty() || !run.superseded_by.empty()) {
      continue;
    }
    const LostEvidence* why = nullptr;
    LostEvidence lost;
    for (const Dependency& d : run.dependencies) {
      std::string current;
      std::string rule(RuleFor(d.type));
      if (d.type == DependencyType::kConfig) {
        if (state.config() != nullptr) current = state.config()->config.KeyDigest(d.name);
      } else if (d.type == DependencyType::kArtifact) {
        // Lost with the run that made it; runs come in order, so that one was judged before.
        current = d.digest;
        for (const auto& [lost_run, logical] : lost_artifacts) {
          if (logical == std::make_pair(d.name, d.digest)) current.clear();
        }
      } else {
        const auto at = now.find(DependencyId(d.type, d.name));
        if (at != now.end()) {
          current = at->second;
        } else {
          rule = "L-UNKNOWN";
        }
      }
      if (current != d.digest) {
        lost = {run.id, rule, d, current};
        why = &lost;
        break;
      }
    }
    if (run.dependencies.empty()) {
      lost = {run.id, "L-UNKNOWN", {}, ""};
      why = &lost;
    }
    if (why == nullptr) {
      change.kept.push_back(run.id);
      continue;
    }
    for (const size_t i : run.artifacts) {
      auto path = ParseArtifactPath(state.artifacts[i].path);
      if (path.ok()) {
        lost_artifacts.push_back({run.id, {LogicalName(*path), state.artifacts[i].sha256}});
      }
    }
    for (const Inference& i : run.conclusion->inferences) {
      change.withdrawn.push_back({i.id, i.text, run.id, lost.rule});
    }
    change.lost.push_back(std::move(lost));
  }
  return change;
}

StepLists ListsOf(const State& state, Staleness* staleness, const std::string& step) {
  struct Entry {
    bool passed = false;
    std::string failed;      // first reason
    std::string unverified;  // latest reason
  };
  std::vector<std::string> order;
  std::map<std::string, Entry> entries;
  const auto entry = [&](const std::string& name) -> Entry& {
    if (entries.count(name) == 0) order.push_back(name);
    return entries[name];
  };
  std::map<std::string, std::string> name_of_run;
  for (const CandidateRecord& c : state.candidates) {
    if (c.step != step) continue;
    Entry& e = entry(c.name);
    if (c.state == "excluded") {
      if (e.failed.empty()) e.failed = "excluded: " + Printable(c.reason);
    } else if (e.unverified.empty()) {
      e.unverified = "proposed, no run yet";
    }
  }
  for (const RunRecord& run : state.runs) {
    if (run.step != step || !run.kind) continue;
    name_of_run[run.id] = NameOf(run);
    Entry& e = entry(NameOf(run));
    const EvidenceStatus status = AssessRun(state, staleness, run);
    // What a run concluded stays a failure, also when it is stale or superseded by now.
    const bool failed = run.conclusion && (run.conclusion->verdict == Verdict::kFail ||
                                           run.conclusion->verdict == Verdict::kRefused);
    const bool crashed = run.signal != 0 || (run.exit_code && *run.exit_code != 0);
    if (status.verdict == Verdict::kPass) {
      e.passed = true;
    } else if ((failed || crashed) && e.failed.empty()) {
      e.failed =
          fmt::format("{} in run {}", failed ? run.conclusion->reason : status.reason, run.id);
    }
    if (status.verdict != Verdict::kPass)
      e.unverified = fmt::format("{} in run {}", status.reason, run.id);
  }
  StepLists out;
  std::vector<std::string> confirmed;
  const SignOffStatus signoff = StatusOfSignOff(state, staleness, step);
  if (signoff.verdict == Verdict::kPass && signoff.request != nullptr) {
    for (const std::string& id : signoff.request->runs) {
      const auto at = name_of_run.find(id);
      if (at == name_of_run.end() || !entries[at->second].passed) continue;
      if (std::find(confirmed.begin(), confirmed.end(), at->second) == confirmed.end()) {
        confirmed.push_back(at->second);
        out.human_confirmed.push_back(at->second + ", by " + signoff.person);
      }
    }
  }
  for (const std::string& name : order) {
    const Entry& e = entries[name];
    const bool is_confirmed =
        std::find(confirmed.begin(), confirmed.end(), name) != confirmed.end();
    if (e.passed && !is_confirmed) out.candidates.push_back(name);
    if (!e.failed.empty()) out.failed.push_back(name + ": " + e.failed);
    if (!e.passed && !e.unverified.empty()) out.unverified.push_back(name + ": " + e.unverified);
  }
  return out;
}

}  // namespace tare::workflow
