#pragma once

// Staleness: evidence holds while everything it was made from is what it was (GEN-12, GEN-21,
// Dependencies are typed and transitive through artifacts. A mark names the input with old
// and new digest; evidence becomes fresh again when the digests match again, and a re-made artifact
// with equal bytes makes nothing after it stale (early cutoff). Nothing known counts as changed.

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "workflow/state.h"

namespace tare::workflow {

struct StaleMark {
  DependencyType type = DependencyType::kCode;
  std::string name;
  std::string was;               // digest when the evidence was made; empty: it declared no inputs
  std::string now;               // digest known now; empty when unknown
  std::vector<std::string> via;  // run IDs from the evidence down to the input that changed
  // "code src/x.cu changed: 1234abcd -> 5678ef01, through run ..."
  std::string ToString() const;
};

class Staleness {
 public:
  explicit Staleness(const State& state);

  // The first stale input of a run, or nothing when it is fresh.
  std::optional<StaleMark> Of(const RunRecord& run);
  // The same for inputs that belong to no run: a review bundle's.
  std::optional<StaleMark> OfDependencies(const std::vector<Dependency>& dependencies,
                                          const std::string& candidate);

 private:
  std::optional<StaleMark> Check(const Dependency& dependency, const std::string& candidate);

  const State& state_;
  std::unordered_map<std::string, std::optional<StaleMark>> known_;
  std::unordered_map<std::string, bool> open_;  // runs on the stack: a cycle is unknown
  // Logical artifact name -> artifacts that carry it, in log order, with their runs.
  std::unordered_map<std::string, std::vector<std::pair<size_t, size_t>>> producers_;
};

// May this run be used as evidence now? kPass only if complete, ended normally, concluded pass and
// fresh, and its candidate not excluded; else the verdict, reason code and detail that say why not.
struct EvidenceStatus {
  Verdict verdict = Verdict::kInconclusive;
  std::string reason;
  std::string detail;
};
EvidenceStatus AssessRun(const State& state, Staleness* staleness, const RunRecord& run);

// Evidence of one kind, which no other kind can stand in for: only Evidence<K>::From makes one, and
// only from a run of kind K that AssessRun passes.
template <EvidenceKind K>
class Evidence {
 public:
  static Result<Evidence> From(const State& state, Staleness* staleness, const RunRecord& run) {
    if (run.kind != K) {
      return Error(Code::kPrecondition, "run {} is {}, not {}", run.id,
                   run.kind ? EvidenceKindName(*run.kind) : "no evidence", EvidenceKindName(K));
    }
    const EvidenceStatus status = AssessRun(state, staleness, run);
    if (status.verdict != Verdict::kPass) {
      return Error(Code::kPrecondition, "run {}: {} ({})", run.id, status.reason, status.detail);
    }
    return Evidence(&run);
  }
  const RunRecord& run() const { return *run_; }
  const Scope& scope() const { return run_->conclusion->scope; }

 private:
  explicit Evidence(const RunRecord* run) : run_(run) {}
  const RunRecord* run_;
};

// Is this point covered by evidence of this kind at this step? kPass with the run that covers it,
// or kNotCovered; a failing run that covers the point gives kFail. Never a pass outside a scope.
struct Coverage {
  Verdict verdict = Verdict::kNotCovered;
  std::string run_id;
  std::string reason;
};
Coverage QueryScope(const State& state, Staleness* staleness, const std::string& step,
                    EvidenceKind kind, const ScopePoint& point);

}  // namespace tare::workflow
