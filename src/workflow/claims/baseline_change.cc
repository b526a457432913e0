// A deliberate change of both sides' arithmetic: new contracts. The old baseline stays, the new one
// has a rollout of its own, nobody is promised the old bits, quality and performance are measured
// again, and no number of before is given for after.

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "workflow/claims/claim.h"
#include "workflow/layout.h"

namespace tare::workflow {
namespace {

const std::string kContracts = "contract:all";

struct Side {
  std::string contracts;  // digest over the contract IDs
  Reference baseline;     // the evidence that measured it
  Reference rollout;      // the frozen rollout sampled under it
};
Side ReadSide(const Field& f) {
  return {f.At("contracts").Hash(), ReadReference(f.At("baseline")),
          ReadReference(f.At("rollout"))};
}

struct Citation {
  std::string what, about;
  Reference record;
};

std::string Short(const std::string& digest) { return digest.substr(0, 12); }

}  // namespace

GateJudgement JudgeBaselineChange(const Json& document) {
  Judging j("baseline-change", document, "tare.claim.baseline-change/v1");
  const Field root = j.root();
  const Subject subject = ReadSubject(root);
  const std::string why = root.At("why").Str();
  const std::vector<std::string> operators = root.At("operators").Strings(1);
  const std::set<std::string> sides = root.At("sides").StringSet(1);
  const Side before = ReadSide(root.At("old")), after = ReadSide(root.At("new"));
  const std::string statement = root.At("statement").Text();
  const std::vector<std::string> notes = root.At("delivery_notes").Strings();
  const Field alignment = root.At("alignment");
  const std::string aligned_on = alignment.At("rollout").Hash();
  const Reference aligned = ReadReference(alignment.At("record"));
  const Field regressions = root.At("regressions");
  const std::optional<Reference> quality = ReadMaybeReference(regressions.At("quality")),
                                 performance = ReadMaybeReference(regressions.At("performance"));
  std::vector<Citation> citations;
  for (const Field& c : root.At("citations").Items()) {
    citations.push_back(
        {c.At("what").Str(), c.At("about").OneOf({"old", "new"}), ReadReference(c.At("record"))});
  }
  if (!j.WellFormed()) return j.Finish();

  const auto under = [](const Reference& r) { return r.On(kContracts); };
  j.Require("BASE-01", sides == std::set<std::string>{"rollout", "trainer"},
            reason::kSemanticsDiffer,
            fmt::format("only {} was changed: two arithmetics are no new baseline",
                        fmt::join(sides, ", ")),
            "change both sides, or undo the one");
  j.Require("BASE-01", before.contracts != after.contracts, reason::kBaselineLost,
            fmt::format("old and new contracts are both {}", Short(before.contracts)));
  j.Require("BASE-01", after.contracts == subject.contracts, reason::kSubjectDiffers,
            "the new contracts are not those of the subject");
  for (const auto& [what, a, b] : {std::tuple<const char*, const Reference&, const Reference&>{
                                       "baseline", before.baseline, after.baseline},
                                   {"frozen rollout", before.rollout, after.rollout}}) {
    j.Require("BASE-01", a.artifact != b.artifact, reason::kBaselineLost,
              fmt::format("old and new {} are one artifact, {}", what, Short(a.artifact)));
    j.Require("BASE-01", under(a) == before.contracts, reason::kBaselineLost,
              fmt::format("the {} called old was made under {}", what, Short(under(a))));
  }
  j.Require("BASE-01", under(after.baseline) == after.contracts && after.baseline.Passes(),
            reason::kBaselineLost,
            fmt::format("the new baseline is {} under {}", after.baseline.verdict,
                        Short(under(after.baseline))));

  j.Require(
      "BASE-02", under(after.rollout) == after.contracts, reason::kOldRollout,
      fmt::format("the new frozen rollout was sampled under {}", Short(under(after.rollout))));
  j.Require("BASE-02", aligned_on == after.rollout.artifact, reason::kOldRollout,
            aligned_on == before.rollout.artifact
                ? std::string("alignment was shown on the old frozen rollout")
                : fmt::format("alignment was shown on {}, which is neither frozen rollout",
                              Short(aligned_on)));
  j.Require("BASE-02",
            aligned.kind == "E6" && aligned.Passes() && under(aligned) == after.contracts,
            reason::kOldRollout,
            fmt::format("the alignment is {} {} under {}", aligned.kind, aligned.verdict,
                        Short(under(aligned))));

  j.Require("BASE-03", statement == kChangeSentence, reason::kChangeUnstated,
            fmt::format("the record says `{}`", Printable(statement)));
  j.Require("BASE-03", std::count(notes.begin(), notes.end(), kChangeSentence) == 1,
            reason::kChangeUnstated, "the delivery's notes do not carry the sentence once");

  bool whole = true;
  for (const auto& [what, kind, r] :
       {std::tuple<const char*, const char*, const std::optional<Reference>&>{"quality", "E9",
                                                                              quality},
        {"performance", "E10", performance}}) {
    const bool done = r && r->kind == kind && r->Passes() && under(*r) == after.contracts;
    whole &= j.Require("BASE-04", done, reason::kChangeProvisional,
                       !r ? fmt::format("no {} regression", what)
                          : fmt::format("the {} regression is {} {}{} under {}", what, r->kind,
                                        r->verdict, r->fresh ? "" : ", stale,", Short(under(*r))));
  }
  if (!whole) j.Provisional("the change is provisional, and C10 is refused until both have passed");

  for (const Citation& c : citations) {
    const std::string& right = c.about == "new" ? after.contracts : before.contracts;
    j.Require("BASE-05", under(c.record) == right, reason::kOldNumberCited,
              fmt::format("`{}` is given for the {} arithmetic and was measured under {}",
                          Printable(c.what), c.about, Short(under(c.record))));
    j.Require("BASE-05", c.about == "old" || c.record.Passes(), reason::kOldNumberCited,
              fmt::format("`{}` rests on a run that is {}{}", Printable(c.what), c.record.verdict,
                          c.record.fresh ? "" : " and stale"));
  }
  if (citations.empty()) j.Pass("BASE-05", "no number is cited");

  j.Cover({.shape = {"change of arithmetic"},
           .topology = {"any"},
           .dtype = {"f32"},
           .model = {subject.weights},
           .path = {"rollout", "trainer"},
           .contracts = {after.contracts}});
  j.Note(fmt::format("{} operators: {}; {}", operators.size(), fmt::join(operators, ", "), why));
  return j.Finish();
}

bool OfEarlierArithmetic(const State& state, const RunRecord& run) {
  for (const Dependency& d : run.dependencies) {
    if (DependencyId(d.type, d.name) != kContracts) continue;
    const Observation* now = state.Current(kContracts, run.candidate);
    return now != nullptr && now->digest != d.digest;
  }
  return false;
}

std::string ChangeSideId(std::string_view side, std::string_view digest) {
  return fmt::format("contract:{}-{}", side, digest.substr(0, 16));
}

ChangeStatus BaselineChangeOf(const State& state, Staleness* staleness) {
  ChangeStatus out;
  // Contracts under which C5 passed, in the order of the log.
  for (const RunRecord& run : state.runs) {
    if (run.step != "C5" || !run.ended || !run.conclusion ||
        run.conclusion->verdict != Verdict::kPass) {
      continue;
    }
    for (const Dependency& d : run.dependencies) {
      if (DependencyId(d.type, d.name) != kContracts || d.digest == out.after) continue;
      out.before = out.after;
      out.after = d.digest;
    }
  }
  if (out.before.empty()) return out;
  const std::string change = fmt::format("{} to {}", Short(out.before), Short(out.after));
  out.verdict = Verdict::kRefused;
  out.reason = reason::kChangeUnstated;
  out.detail = fmt::format(
      "C5 passed under other contracts than before ({}), and no record of the "
      "change is in the ledger",
      change);
  for (const RunRecord& run : state.runs) {
    if (run.step != "task" || !run.ended || !run.conclusion) continue;
    const bool claim = std::any_of(run.artifacts.begin(), run.artifacts.end(), [&](size_t i) {
      return state.artifacts[i].path.ends_with(fmt::format("/{}", kChangeArtifact));
    });
    const auto names = [&](const char* side, const std::string& digest) {
      const std::string id = ChangeSideId(side, digest);
      return std::any_of(run.dependencies.begin(), run.dependencies.end(),
                         [&](const Dependency& d) {
                           return DependencyId(d.type, d.name) == id && d.digest == digest;
                         });
    };
    if (!claim || !names("old", out.before) || !names("new", out.after)) continue;
    const EvidenceStatus status = AssessRun(state, staleness, run);
    // The later word holds.
    out.verdict = status.verdict == Verdict::kPass ? Verdict::kPass : Verdict::kRefused;
    out.reason = status.verdict == Verdict::kPass ? "" : status.reason;
    out.detail = status.verdict == Verdict::kPass
                     ? ""
                     : fmt::format("the change of arithmetic {} is {}: {}", change,
                                   VerdictName(status.verdict), status.detail);
  }
  return out;
}

}  // namespace tare::workflow
