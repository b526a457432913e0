#pragma once

// Candidates, and what carries over between them (DOC-11): after a change of code, image, backend
// or weights, which evidence is kept, which is lost under which rule, which inferences fall with
// it. Also the four lists of a step's index (GEN-17).

#include <string>
#include <vector>

#include "workflow/staleness.h"

namespace tare::workflow {

// Why evidence does not carry over. Rule IDs are stable: "L-CODE", "L-IMAGE", ..., "L-UNKNOWN".
struct LedgerRule {
  std::string_view id;
  DependencyType type;
  std::string_view text;
};
std::span<const LedgerRule> AllLedgerRules();

struct LostEvidence {
  std::string run_id;
  std::string rule;       // LedgerRule::id, or "L-UNKNOWN" when the new candidate does not say
  Dependency dependency;  // as it was
  std::string now;        // empty when unknown
};
struct WithdrawnInference {
  std::string id;
  std::string text;
  std::string run_id;  // the lost evidence that it rested on
  std::string rule;
};
struct LedgerChange {
  std::vector<std::string> kept;  // run IDs
  std::vector<LostEvidence> lost;
  std::vector<WithdrawnInference> withdrawn;
  Json ToJson() const;
};
// What of the passed evidence of candidate `from` holds for one with these inputs. A dependency
// that `to` does not name is unknown and counts as changed.
LedgerChange CompareCandidates(const State& state, const std::string& from,
                               const std::vector<Dependency>& to);

// The four lists of a step. A name stands in several when several are true; a failed one stays.
struct StepLists {
  std::vector<std::string> candidates;       // passed and fresh, not confirmed
  std::vector<std::string> failed;           // failed or excluded, with the reason
  std::vector<std::string> unverified;       // nothing usable yet, with the reason
  std::vector<std::string> human_confirmed;  // under a valid sign-off of the step
};
StepLists ListsOf(const State& state, Staleness* staleness, const std::string& step);

}  // namespace tare::workflow
