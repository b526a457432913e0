#pragma once

// The judgement of a whole task. The ledger says that files are what was recorded; each gate's
// judge says what its document shows; this file asks whether the documents belong together and to
// the ledger they lie in. A re-sealed forgery passes the first question, and most forged fields
// fail the second; the third is for those that a document alone cannot contradict: references to
// other gates, to people and to what was agreed before.
//
// Not promised: a consistent forgery of every document, its references and the ledger, signed
// checkpoints aside, is another task.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/env.h"
#include "workflow/gates/judge.h"
#include "workflow/task_config.h"

namespace tare::workflow {

// Names of artifacts that a task is judged by.
inline constexpr std::string_view kEvidenceName = "evidence.json";     // role raw, one per run
inline constexpr std::string_view kToleranceName = "tolerances.json";  // C7, before the evidence

// What the ledger says around the documents.
struct LedgerFacts {
  struct Recorded {
    std::string sha256, owner, time;  // of the document; who recorded it; when its run ended
    std::string verdict, reason;      // as concluded
    Json scope;                       // of the conclusion, boxes
  };
  std::map<std::string, Recorded> evidence;         // by gate
  std::set<std::string> artifacts;                  // SHA-256 of every recorded artifact
  std::map<std::string, std::string> confirmed_by;  // step -> person of a standing sign-off
  std::string requester;
  std::optional<Json> tolerances;  // {"tolerances": [...], "evaluation": {...} or null}
  std::optional<TaskConfig> user;  // the configuration in force (GEN-04)
  // A deliberate change of both sides' arithmetic (BASE-01 to BASE-05): why C10 is refused, empty
  // for none or a whole one, and the sentence that the delivery's notes must then carry.
  std::string change_reason, change_detail, change_sentence;
};

// The four acceptances, which no other replaces and which never become one (GEN-07).
struct Acceptances {
  Verdict forward = Verdict::kNotCovered, backward = Verdict::kNotCovered,
          quality = Verdict::kNotCovered, performance = Verdict::kNotCovered;
  std::string forward_text, backward_text, quality_text, performance_text;
  Json ToJson() const;  // {"forward": {"verdict","text"}, ...}; there is no total
};

struct TaskJudgement {
  Verdict verdict = Verdict::kInconclusive;  // gravest of all findings; not an acceptance
  std::string reason;
  std::vector<GateFinding> findings;  // of the ledger and across gates; `row` begins with the gate
  std::map<std::string, GateJudgement> gates;
  Acceptances acceptances;
  Json ToJson() const;  // schema "tare.task_judgement/1"
};

// Pure. Gates without a document are not covered: they lower no verdict here, and open no later
// gate.
TaskJudgement JudgeDocuments(const std::map<std::string, Json>& documents,
                             const LedgerFacts& facts);

// From gate judgements alone.
Acceptances AcceptancesOf(const std::map<std::string, GateJudgement>& gates,
                          const std::map<std::string, Json>& documents);

// Verifies the task (workflow/verify.h), takes of every gate the document of its latest ended run
// that has one, and judges them. Errors only when there is no task to read.
Result<TaskJudgement> JudgeTask(Env* env, const std::string& dir);

}  // namespace tare::workflow
