#pragma once

// Claims: what people and tools say beside the gates ("this defect is closed", "this preset holds
// here", "the arithmetic was changed on purpose"), as documents that name the records they rest on.
// A claim's judge is a pure function, built like a gate's (workflow/gates/judge.h): it opens no
// file and believes no word, it asks what the document shows. docs/formats/claims.md has each form.
//
// Schema: "tare.claim.<name>/v1". A reference to a record is always of one form, so that the ledger
// can be asked about all of them at once, whatever the claim is:
//
//   {"artifact": SHA-256, "kind": "E8", "verdict": "pass", "fresh": true, "time": "...Z",
//    "depends": {"contract:all": SHA-256, ...}}

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "workflow/gates/collect.h"
#include "workflow/gates/judge.h"
#include "workflow/staleness.h"

namespace tare::workflow {

struct Reference {
  std::string artifact;                        // SHA-256 of a recorded artifact
  std::string kind;                            // evidence kind of its run, "E4"
  std::string verdict;                         // of its run's conclusion
  bool fresh = false;                          // nothing that its run depends on has changed since
  std::string time;                            // when its run ended
  std::map<std::string, std::string> depends;  // typed inputs of its run that the claim speaks of
  bool Passes() const { return verdict == "pass" && fresh; }
  // The digest of an input, "" when the reference does not speak of it.
  std::string On(const std::string& dependency) const;
};
Reference ReadReference(const Field& field);
// The same where a null stands for "there is none".
std::optional<Reference> ReadMaybeReference(const Field& field);

struct ClaimSpec {
  std::string_view name;      // "defect-closed"
  std::string_view rows;      // requirement rows that it answers to
  std::string_view sentence;  // what is claimed
  GateJudge judge;
};
std::span<const ClaimSpec> AllClaims();
const ClaimSpec* FindClaim(std::string_view name);  // nullptr: no such claim
// "tare.claim.<name>/v1"; nullptr for any other schema.
const ClaimSpec* ClaimOfSchema(std::string_view schema);

// What a claim covers; what it does not narrow is as the records say.
struct ClaimScope {
  std::vector<std::string> shape;
  std::string topology = "as recorded", model = "as recorded", path = "claim";
};
ScopeBox BoxOf(ClaimScope scope);

// RFC 3339 UTC times of either precision: is `a` before `b`?
bool TimeBefore(const std::string& a, const std::string& b);

// Every reference of the document against the ledger: the artifact is recorded, its bytes are
// there, and its run has the kind, verdict, freshness, end and inputs that the reference says.
std::vector<GateFinding> CheckReferences(Env* env, const std::string& dir, const State& state,
                                         Staleness* staleness, const Json& document);

// Judges a claim; with a task, holds its references to the ledger and records it there as a run of
// step `task` with raw artifact `claim-<name>.json`. A claim that passes without a task has named
// records that nobody looked at, and says so in its scope.
Result<RunGateReport> JudgeClaimDocument(Env* env, const std::string& actor,
                                         const std::string& task, const Json& document);

// Declared dependencies of a recorded claim beyond its references' artifacts: "contract:all=<hex>".
using ClaimDepends = std::vector<std::string>;

// ---- A deliberate change of both sides' arithmetic (BASE-01 to BASE-05)

// The sentence that the record and the delivery's notes carry (BASE-03).
inline constexpr std::string_view kChangeSentence =
    "The arithmetic of both sides was changed on purpose: outputs of the old contracts are not "
    "promised to stay bitwise unchanged.";
inline constexpr std::string_view kChangeArtifact = "claim-baseline-change.json";

// The input by which a recorded claim names one of its two contracts. The digest is part of the
// name, so that the record of another change does not make this one stale. `side`: "old" or "new".
std::string ChangeSideId(std::string_view side, std::string_view digest);

struct ChangeStatus {
  // kPass: contracts never changed under recorded passes of C5, or the last change is recorded and
  // whole. Else why C10 is refused.
  Verdict verdict = Verdict::kPass;
  std::string reason, detail;
  std::string before, after;  // digests over the contract IDs; empty: no change
};
// From the ledger alone: C5 passed under other contracts than before.
ChangeStatus BaselineChangeOf(const State& state, Staleness* staleness);
// The run was made under contracts that are not in force any more.
bool OfEarlierArithmetic(const State& state, const RunRecord& run);

#define TARE_CLAIM(name, function, rows, sentence) GateJudgement function(const Json& document);
#include "workflow/claims/claims.inc"
#undef TARE_CLAIM

}  // namespace tare::workflow
