#include "workflow/gates/task_judge.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/reasons.h"
#include "workflow/claims/claim.h"
#include "workflow/gates/contract_check.h"
#include "workflow/gates/table.h"
#include "workflow/layout.h"
#include "workflow/signoff.h"
#include "workflow/staleness.h"
#include "workflow/task.h"
#include "workflow/verify.h"

namespace tare::workflow {
namespace {

// A member of a member, or null; documents were found well-formed before.
const Json& Look(const Json& doc, std::string_view pointer) {
  static const Json null;
  const Json::json_pointer at{std::string(pointer)};
  return doc.contains(at) ? doc.at(at) : null;
}
std::string Text(const Json& value) {
  return value.is_string() ? value.get<std::string>() : std::string();
}
// Members in any order: two documents say the same whoever wrote them.
bool Same(const Json& a, const Json& b) { return nlohmann::json(a) == nlohmann::json(b); }

class TaskJudge {
 public:
  TaskJudge(const std::map<std::string, Json>& documents, const LedgerFacts& facts)
      : docs_(documents), facts_(facts) {}

  TaskJudgement Run() {
    for (const auto& [gate, doc] : docs_) {
      const GateJudge judge = FindJudge(gate);
      if (judge == nullptr) {
        Find(gate, reason::kNotImplemented, "no judge knows this gate");
        continue;
      }
      GateJudgement judged = judge(doc);
      if (facts_.user) judged.Add(ContractFindings(*facts_.user, doc));
      // A document cannot hold the signature that is made over it: where only the person was
      // missing and the ledger holds a standing sign-off of the step, the stop is passed.
      const bool waited = judged.WaitsForPersonAlone();
      if (waited && facts_.confirmed_by.contains(gate)) {
        std::erase_if(judged.findings,
                      [](const GateFinding& f) { return f.verdict == Verdict::kWaitingHuman; });
        judged.verdict = Verdict::kPass;
        judged.reason.clear();
      }
      Recorded(gate, judged, waited);
      out_.gates.emplace(gate, std::move(judged));
    }
    for (const std::string_view id : kGateIds) Needs(std::string(id));
    Together();
    if (Usable("C7")) Tolerances(docs_.at("C7"));
    if (Usable("C9")) EntryGate(docs_.at("C9"));
    if (Usable("C10")) Delivery(docs_.at("C10"));
    if (Usable("C10")) Change(docs_.at("C10"));
    out_.acceptances = AcceptancesOf(out_.gates, docs_);
    Conclude();
    return std::move(out_);
  }

 private:
  void Find(const std::string& row, std::string_view code, std::string detail) {
    const Reason* known = FindReason(code);
    out_.findings.push_back(
        {known->verdict, std::string(code), row, std::move(detail), std::string(known->next)});
  }
  void Require(bool holds, const std::string& row, std::string_view code, std::string detail) {
    if (!holds) Find(row, code, std::move(detail));
  }
  // The document could be read; what it says may still be no pass.
  bool Usable(const std::string& gate) const {
    const auto it = out_.gates.find(gate);
    return it != out_.gates.end() && it->second.reason != reason::kMalformedEvidence;
  }

  // The conclusion in the ledger is the judge's. Of a document that waits for a person the
  // machine's part may be concluded as a pass: the ledger holds the stop.
  void Recorded(const std::string& gate, const GateJudgement& judged, bool waited) {
    const auto it = facts_.evidence.find(gate);
    if (it == facts_.evidence.end()) return;
    const LedgerFacts::Recorded& r = it->second;
    if (waited && r.verdict == VerdictName(Verdict::kPass)) return;
    Require(r.verdict == VerdictName(judged.verdict) && r.reason == judged.reason, gate,
            reason::kVerdictContradicted,
            fmt::format("{}: the ledger says {} {}, the evidence shows {} {}", gate, r.verdict,
                        r.reason, VerdictName(judged.verdict), judged.reason));
    Require(judged.verdict != Verdict::kPass || Same(r.scope, judged.scope.at("covers")), gate,
            reason::kVerdictContradicted,
            fmt::format("{}: the recorded scope is not what the evidence covers", gate));
  }

  // A gate is not open before those it needs (GEN-20, TRACK-05); a missing one is only not covered,
  // as the ledger may hold a part of the workflow.
  void Needs(const std::string& gate) {
    const auto it = out_.gates.find(gate);
    if (it == out_.gates.end() || it->second.verdict != Verdict::kPass) return;
    for (const std::string& need : TheWorkflow().Find(gate)->needs) {
      const auto before = out_.gates.find(need);
      if (before == out_.gates.end()) continue;
      Require(before->second.verdict == Verdict::kPass, gate, reason::kPrerequisiteOpen,
              fmt::format("{} rests on {}, which is {}", gate, need,
                          VerdictName(before->second.verdict)));
    }
  }

  // One subject, one agreement, for all.
  void Together() {
    std::string subject_of, agreement_of;
    Json subject, agreement;
    for (const std::string_view id : kGateIds) {
      const auto it = docs_.find(std::string(id));
      if (it == docs_.end()) continue;
      const Json& s = Look(it->second, "/subject");
      if (!s.is_null()) {
        if (subject_of.empty()) {
          subject_of = it->first;
          subject = s;
        }
        Require(Same(s, subject), it->first, reason::kSubjectDiffers,
                fmt::format("{} is about another subject than {}", it->first, subject_of));
      }
      const Json& a = Look(it->second, "/agreement");
      if (!a.is_null()) {
        if (agreement_of.empty()) {
          agreement_of = it->first;
          agreement = a;
        }
        Require(Same(a, agreement), it->first, reason::kSubjectDiffers,
                fmt::format("{} rests on another agreement than {}", it->first, agreement_of));
      }
    }
  }

  // C7-04: what was fixed before is in a run of its own, recorded earlier.
  void Tolerances(const Json& doc) {
    if (!facts_.tolerances) {
      Find("C7", reason::kToleranceAfterResult,
           fmt::format("no {} was recorded before the gradients", kToleranceName));
      return;
    }
    const Json& control = Look(doc, "/sft/control");
    const Json& evaluation = Look(doc, "/sft/control/evaluation");
    Json used = {{"tolerances", Look(doc, "/tolerances")}, {"evaluation", nullptr}};
    if (!control.is_null()) {
      used["evaluation"] = {{"declared", Look(evaluation, "/declared")},
                            {"margin_ppm", Look(evaluation, "/margin_ppm")}};
    }
    Require(Same(used, *facts_.tolerances), "C7", reason::kToleranceAfterResult,
            fmt::format("the tolerances are not those of the earlier {}", kToleranceName));
  }

  const LedgerFacts::Recorded* Of(const std::string& gate) const {
    const auto it = facts_.evidence.find(gate);
    return it == facts_.evidence.end() ? nullptr : &it->second;
  }
  void Refers(const std::string& row, const std::string& gate, const std::string& sha256,
              std::string_view what) {
    const LedgerFacts::Recorded* r = Of(gate);
    const bool right = r != nullptr ? r->sha256 == sha256 : facts_.artifacts.contains(sha256);
    Require(right, row, reason::kEntryRowOpen,
            fmt::format("{} names {} for {}, which the ledger does not hold as such", what,
                        sha256.substr(0, 12), gate));
  }

  // C9-05: the table is the log's; the person is the one who signed.
  void EntryGate(const Json& doc) {
    for (const Json& row : Look(doc, "/entry_table")) {
      const std::string gate = Text(Look(row, "/row"));
      Refers("C9", gate, Text(Look(row, "/evidence")), "the entry table");
      const LedgerFacts::Recorded* r = Of(gate);
      Require(r == nullptr ||
                  (r->owner == Text(Look(row, "/owner")) && r->time == Text(Look(row, "/time"))),
              "C9", reason::kEntryRowOpen,
              fmt::format("the entry table says {} at {} for {}", Text(Look(row, "/owner")),
                          Text(Look(row, "/time")), gate));
    }
    for (const Json& stage : Look(doc, "/escalation/stages")) {
      Require(facts_.artifacts.contains(Text(Look(stage, "/evidence"))), "C9",
              reason::kEntryRowOpen,
              fmt::format("stage {} has no recorded evidence", Text(Look(stage, "/axis"))));
    }
    const auto c8 = docs_.find("C8");
    Require(
        c8 == docs_.end() || Same(Look(doc, "/two_step/recipe"), Look(c8->second, "/loop/recipe")),
        "C9", reason::kConfigDiffers, "the two-step acceptance is not what C8 ran");
    const Json& confirmation = Look(doc, "/confirmation");
    if (confirmation.is_null()) return;
    const auto person = facts_.confirmed_by.find("C9");
    Require(person != facts_.confirmed_by.end() &&
                person->second == Text(Look(confirmation, "/person")),
            "C9", reason::kNoSignoff,
            fmt::format("{} is said to have confirmed; the ledger holds {}",
                        Text(Look(confirmation, "/person")),
                        person == facts_.confirmed_by.end() ? "no sign-off" : person->second));
    Require(facts_.requester == Text(Look(confirmation, "/author")), "C9", reason::kNoSignoff,
            fmt::format("{} is said to have asked; the ledger says {}",
                        Text(Look(confirmation, "/author")), facts_.requester));
  }

  void Receipts(const Json& receipts) {
    for (const auto& [index, gate] :
         {std::pair<size_t, const char*>(0, "C5"), std::pair<size_t, const char*>(1, "C8")}) {
      Refers("C10", gate, receipts.size() > index ? Text(receipts[index]) : "", "the manifest");
    }
  }

  void Delivery(const Json& doc) {
    Refers("C10", "C9", Text(Look(doc, "/inputs/entry_gate/evidence")), "the delivery");
    const Json& receipts = Look(doc, "/manifest/receipts");
    // No manifest is not covered, which C10's judge says; one that is there is held to the ledger.
    if (!Look(doc, "/manifest").is_null()) Receipts(receipts);
    for (const Json& r : Look(doc, "/regressions")) {
      for (const auto& [gate, hash] : Look(r, "/ran").items())
        Refers("C10", gate, Text(hash), "a regression");
    }
    const auto person = facts_.confirmed_by.find("C1");
    Require(
        person != facts_.confirmed_by.end() &&
            person->second == Text(Look(doc, "/inputs/baseline/confirmed_by")),
        "C10", reason::kBaselineUnconfirmed,
        fmt::format("{} is said to have confirmed the baseline; the ledger holds {}",
                    Text(Look(doc, "/inputs/baseline/confirmed_by")),
                    person == facts_.confirmed_by.end() ? "no sign-off of C1" : person->second));
    const auto c7 = docs_.find("C7");
    const bool covered = c7 != docs_.end() && Text(Look(c7->second, "/quality")) == "covered";
    Require(covered == (Text(Look(doc, "/acceptance/quality evaluation")) == "pass"), "C10",
            reason::kVerdictContradicted,
            fmt::format("quality is given as {}, C7 {} it",
                        Text(Look(doc, "/acceptance/quality evaluation")),
                        covered ? "covers" : "does not cover"));
    // The loop on the delivery image is a loop of its own, not C8's receipt again.
    const auto c8 = docs_.find("C8");
    if (c8 != docs_.end()) {
      Require(Same(Look(doc, "/loop/recipe"), Look(c8->second, "/loop/recipe")), "C10",
              reason::kConfigDiffers, "the delivery's loop ran another recipe than C8");
    }
  }

  // BASE: an unrecorded or provisional change of arithmetic refuses the delivery; a whole one is
  // told to whoever receives it.
  void Change(const Json& doc) {
    if (!facts_.change_reason.empty()) {
      Find("C10", facts_.change_reason, facts_.change_detail);
      // Provisional is not covered by itself; here it is asked to be delivered.
      out_.findings.back().verdict = Verdict::kRefused;
      return;
    }
    if (facts_.change_sentence.empty() || Look(doc, "/manifest").is_null()) return;
    bool told = false;
    for (const Json& note : Look(doc, "/manifest/notes"))
      told |= Text(note) == facts_.change_sentence;
    Require(told, "C10", reason::kChangeUnstated,
            "the arithmetic was changed, and the delivery's notes do not say so");
  }

  void Conclude() {
    const GateFinding* worst = nullptr;
    const auto look = [&](const std::vector<GateFinding>& findings) {
      for (const GateFinding& f : findings) {
        if (worst == nullptr || Gravity(f.verdict) > Gravity(worst->verdict)) worst = &f;
      }
    };
    look(out_.findings);
    for (const auto& [gate, judged] : out_.gates) look(judged.findings);
    if (worst == nullptr) {
      out_.verdict = Verdict::kInconclusive;
      out_.reason = reason::kNoEvidence;
      return;
    }
    out_.verdict = worst->verdict;
    out_.reason = worst->reason;
  }

  const std::map<std::string, Json>& docs_;
  const LedgerFacts& facts_;
  TaskJudgement out_;
};

Json Acceptance(Verdict verdict, const std::string& text) {
  return {{"verdict", VerdictName(verdict)}, {"text", text}};
}

}  // namespace

Json Acceptances::ToJson() const {
  return {{"forward", Acceptance(forward, forward_text)},
          {"backward", Acceptance(backward, backward_text)},
          {"quality", Acceptance(quality, quality_text)},
          {"performance", Acceptance(performance, performance_text)}};
}

Json TaskJudgement::ToJson() const {
  Json json = {{"schema", "tare.task_judgement/1"},
               {"verdict", VerdictName(verdict)},
               {"reason", reason},
               {"acceptances", acceptances.ToJson()},
               {"findings", Json::array()},
               {"gates", Json::array()}};
  for (const GateFinding& f : findings) {
    json["findings"].push_back({{"row", f.row},
                                {"verdict", VerdictName(f.verdict)},
                                {"reason", f.reason},
                                {"detail", f.detail},
                                {"next", f.next}});
  }
  for (const std::string_view id : kGateIds) {
    const auto it = gates.find(std::string(id));
    if (it != gates.end()) json["gates"].push_back(it->second.ToJson());
  }
  return json;
}

Acceptances AcceptancesOf(const std::map<std::string, GateJudgement>& gates,
                          const std::map<std::string, Json>& documents) {
  Acceptances a;
  // The gravest of the named gates; not covered while one of them has nothing.
  const auto of = [&](std::initializer_list<const char*> names, std::string* text) {
    Verdict verdict = Verdict::kPass;
    for (const char* name : names) {
      const auto it = gates.find(name);
      const Verdict v = it == gates.end() ? Verdict::kNotCovered : it->second.verdict;
      *text += fmt::format("{}{} {}", text->empty() ? "" : ", ", name, VerdictName(v));
      if (Gravity(v) > Gravity(verdict)) verdict = v;
    }
    return verdict;
  };
  a.forward = of({"C5", "C8"}, &a.forward_text);
  a.backward = of({"C6", "C7"}, &a.backward_text);
  a.performance = of({"C10"}, &a.performance_text);
  const auto c7 = gates.find("C7");
  const auto doc = documents.find("C7");
  const bool covered = doc != documents.end() && doc->second.is_object() &&
                       doc->second.value("quality", Json()) == "covered";
  if (c7 == gates.end() || !covered) {
    a.quality_text = "no finetuning control ran";
  } else {
    a.quality = c7->second.verdict;
    a.quality_text = fmt::format("C7's finetuning control {}", VerdictName(a.quality));
  }
  return a;
}

TaskJudgement JudgeDocuments(const std::map<std::string, Json>& documents,
                             const LedgerFacts& facts) {
  return TaskJudge(documents, facts).Run();
}

Result<TaskJudgement> JudgeTask(Env* env, const std::string& dir) {
  VerifyOptions options;
  options.threads = 1;
  TARE_ASSIGN_OR_RETURN(const VerifyReport report, VerifyTask(env, dir, options));
  const auto ledger = [&](std::string_view code, const std::string& detail) {
    const Reason* known = FindReason(code);
    return GateFinding{known == nullptr ? Verdict::kFail : known->verdict, std::string(code),
                       "ledger", detail, known == nullptr ? "" : std::string(known->next)};
  };
  TaskJudgement out;
  if (report.verdict != Verdict::kPass) {
    // Nothing in a ledger that does not hold is looked at.
    for (const Finding& f : report.findings)
      out.findings.push_back(ledger(f.reason, f.where + ": " + f.message));
    out.verdict = report.verdict;
    out.reason =
        report.findings.empty() ? std::string(reason::kLogBroken) : report.findings.front().reason;
    return out;
  }
  TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(env, dir));
  const State& state = view.state;
  Staleness staleness(state);
  std::map<std::string, Json> documents;
  std::vector<GateFinding> findings;
  LedgerFacts facts;
  if (state.config() != nullptr) {
    const SignOffStatus c1 = StatusOfSignOff(state, &staleness, "C1");
    const SignOffStatus c9 = StatusOfSignOff(state, &staleness, "C9");
    for (const auto& [step, status] : {std::pair("C1", &c1), std::pair("C9", &c9)}) {
      if (status->verdict != Verdict::kPass) continue;
      facts.confirmed_by[step] = status->person;
      if (status->request != nullptr) facts.requester = status->request->requester;
    }
  }
  for (const ArtifactRecord& a : state.artifacts) facts.artifacts.insert(a.sha256);
  if (state.config() != nullptr) facts.user = state.config()->config;
  const ChangeStatus change = BaselineChangeOf(state, &staleness);
  facts.change_reason = change.reason;
  facts.change_detail = change.detail;
  if (!change.before.empty()) facts.change_sentence = kChangeSentence;
  std::map<std::string, const RunRecord*> latest;
  for (const RunRecord& run : state.runs) {
    if (!run.ended) continue;
    for (const size_t index : run.artifacts) {
      const ArtifactRecord& a = state.artifacts[index];
      const Result<ArtifactPath> path = ParseArtifactPath(a.path);
      if (!path.ok() || a.role != Role::kRaw) continue;
      if (path->name == kEvidenceName) latest[run.step] = &run;
      // Only one that stood before the gradients counts, so the first evidence ends it.
      if (path->name == kToleranceName && run.step == "C7" && !latest.contains("C7")) {
        TARE_ASSIGN_OR_RETURN(const std::string bytes, env->ReadFile(dir + "/" + a.path));
        const Result<Json> json = ParseJson(bytes);
        if (json.ok()) facts.tolerances = *json;
      }
    }
  }
  for (const auto& [gate, run] : latest) {
    const EvidenceStatus status = AssessRun(state, &staleness, *run);
    for (const size_t index : run->artifacts) {
      const ArtifactRecord& a = state.artifacts[index];
      const Result<ArtifactPath> path = ParseArtifactPath(a.path);
      if (!path.ok() || path->name != kEvidenceName) continue;
      TARE_ASSIGN_OR_RETURN(const std::string bytes, env->ReadFile(dir + "/" + a.path));
      const Result<Json> json = ParseJson(bytes);
      if (!json.ok()) {
        findings.push_back(
            ledger(reason::kMalformedEvidence, a.path + ": " + json.status().message()));
        continue;
      }
      documents[gate] = *json;
      LedgerFacts::Recorded r{a.sha256, run->actor, run->finished, "", "", Json::array()};
      if (run->conclusion) {
        r.verdict = VerdictName(run->conclusion->verdict);
        r.reason = run->conclusion->reason;
        r.scope = run->conclusion->scope.ToJson();
      }
      facts.evidence[gate] = std::move(r);
      // A pass that is stale or incomplete is none, whatever its document shows.
      if (run->conclusion && run->conclusion->verdict == Verdict::kPass &&
          status.verdict != Verdict::kPass) {
        findings.push_back(ledger(status.reason, gate + ": " + status.detail));
      }
    }
  }
  out = JudgeDocuments(documents, facts);
  for (GateFinding& f : findings) {
    if (Gravity(f.verdict) > Gravity(out.verdict)) {
      out.verdict = f.verdict;
      out.reason = f.reason;
    }
    out.findings.push_back(std::move(f));
  }
  return out;
}

}  // namespace tare::workflow
