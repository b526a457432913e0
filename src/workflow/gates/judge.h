#pragma once

// What judges of the gates C0 to C10 are built on. A judge is a pure function from one evidence
// document (docs/formats/gate_evidence.md) to a judgement: it opens no file, asks no clock and
// starts nothing, so whatever it needs to know must be in the document. What it does not promise:
// that the document is true. The ledger ties a document to the run that made it; a judge only says
// what the document shows.
//
// A judge has two halves:
//
//   GateJudgement JudgeC5(const Json& evidence) {
//     Judging j("C5", evidence);
//     const Paths paths = ReadPaths(j.root().At("paths"));    // first read all of it ...
//     if (!j.WellFormed()) return j.Finish();
//     j.Require("C5-08", paths.valid > 0, reason::kNoValidTokens, "..");   // ... then judge it
//     j.Cover(box);
//     return j.Finish();
//   }
//
// Reading is strict by construction: WellFormed() refuses a document with any key or list that
// nobody read, so a judge cannot overlook what it was shown and an unknown key is an error with its
// path.

#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/reasons.h"
#include "base/verdict.h"
#include "workflow/scope.h"

namespace tare::workflow {

// How grave: pass < diagnostic-only < not-covered < waiting-human < inconclusive < refused < fail.
int Gravity(Verdict verdict);

// One obligation looked at. A pass has findings too, so that "nothing was checked" is visible.
struct GateFinding {
  Verdict verdict = Verdict::kPass;
  std::string reason;  // code of base/reasons.inc; empty for a pass
  std::string row;     // requirement, "C5-07"
  std::string detail;  // what was wrong and where; for a pass what was seen
  std::string next;    // the next cheapest action; empty for a pass
};

struct GateJudgement {
  std::string gate;
  Verdict verdict = Verdict::kInconclusive;
  std::string reason;  // of the gravest finding, the first of them; empty for a pass
  std::vector<GateFinding> findings;
  // {"covers": boxes as in workflow/scope.h, "not_covered": [{"row", "what", "next"}],
  //  "provisional": why a pass is not final, or absent, "notes": [..]}.
  Json scope;

  const GateFinding* Gravest() const;  // the finding that gave the verdict; nullptr for none
  // A person's decision is all that is missing, so that a standing sign-off of the step passes it.
  // Not so where the document names a confirmation of something else: that one must be made anew.
  bool WaitsForPersonAlone() const;
  // Findings from beyond the document (the ledger, the user's contract). A graver one decides, and
  // what could have been covered is then not.
  void Add(std::vector<GateFinding> more);
  Json ToJson() const;  // schema "tare.gate_judgement/1"
};

// With the usual verdict and next action of its reason.
GateFinding FindingOf(std::string_view row, std::string_view reason, std::string detail);

class Judging;

// A place in the evidence document. Readers return the value, or note a finding
// `malformed-evidence` that names the path and return a harmless value (the lower bound, "", an
// empty list) so that the rest of the document is read too.
class Field {
 public:
  const std::string& path() const { return path_; }

  Field At(std::string_view key) const;                      // member that must be there
  std::optional<Field> MaybeAt(std::string_view key) const;  // member that may be absent, not null
  // Elements of a list of at least `min` and at most `max` entries.
  std::vector<Field> Items(size_t min = 0, size_t max = size_t{1} << 20) const;
  // Members of an object whose keys are data (names of modules, axes). At least `min`.
  std::vector<std::pair<std::string, Field>> Members(size_t min = 0) const;

  bool IsNull() const;  // a null that is there
  bool Bool() const;
  int64_t Int(int64_t min, int64_t max) const;
  double Real(double min, double max) const;  // finite; whole numbers too
  std::string Str() const;                    // not empty, UTF-8, at most 4,096 bytes
  std::string Text() const;                   // may be empty
  std::string OneOf(std::initializer_list<std::string_view> values) const;
  std::string Hash() const;    // SHA-256, 64 lower-case hex digits
  std::string Digest() const;  // "sha256:" and 64 lower-case hex digits, as of an image
  std::string Commit() const;  // 40 or 64 lower-case hex digits
  std::string Time() const;    // RFC 3339 UTC ("2026-11-29T10:00:00Z", fractions allowed)
  uint32_t Bits32() const;     // "0x" and 8 lower-case hex digits
  std::vector<std::string> Strings(size_t min = 0) const;
  std::vector<int64_t> Ints(int64_t min, int64_t max, size_t min_size = 0) const;
  std::set<std::string> StringSet(size_t min = 0) const;  // a name twice is malformed
  // The value as it is, all of it read: a resolved configuration whose keys are not ours.
  const Json& Any() const;

  // Notes that this place is malformed: "evidence.paths[1].dtype: WHAT".
  void Malformed(std::string_view what) const;

 private:
  friend class Judging;
  Field(Judging* judging, const Json* value, std::string path)
      : judging_(judging), value_(value), path_(std::move(path)) {}
  const Json* Need(bool right, std::string_view what) const;  // value_, or nullptr and a finding
  std::string Hex(std::string_view prefix, std::initializer_list<size_t> digits,
                  std::string_view what) const;

  Judging* judging_;
  const Json* value_;  // nullptr: the place is missing, which was noted already
  std::string path_;
};

// What the evidence of all gates of one task is about. Every document has it under "subject"; the
// gates of one task have the same.
struct Subject {
  std::string model;      // a name, for people
  std::string weights;    // weight hash of theta0 as deployed
  std::string recipe;     // SHA-256 of the resolved recipe
  std::string image;      // "sha256:..." of what both sides run from
  std::string contracts;  // SHA-256 over the contract IDs in force
  friend bool operator==(const Subject&, const Subject&) = default;
};
Subject ReadSubject(const Field& root);

// Collects the findings of one judgement.
class Judging {
 public:
  // Checks `evidence` to be an object with "schema": "tare.gate.<gate>/v1". Keeps a reference to
  // it.
  Judging(std::string_view gate, const Json& evidence);
  // The same for a document of another schema (workflow/claims/claim.h); `name` stands for the
  // gate.
  Judging(std::string_view name, const Json& evidence, std::string_view schema);
  Judging(const Judging&) = delete;
  Judging& operator=(const Judging&) = delete;

  Field root();
  // True when everything read so far was as it must be and nothing of the document is unread.
  // Call once, after reading and before judging.
  bool WellFormed();

  // One obligation. Holds: counted as a pass of `row`. Else a finding with the usual verdict of
  // `reason` and, where `next` is empty, its usual next action. Returns `holds`.
  bool Require(std::string_view row, bool holds, std::string_view reason, std::string detail,
               std::string next = {});
  // A finding whose verdict differs from the usual one of its reason.
  void Find(Verdict verdict, std::string_view row, std::string_view reason, std::string detail,
            std::string next = {});
  void Pass(std::string_view row, std::string_view detail);
  // Something that the gate does not have to show, and did not: part of the scope, not of the
  // verdict. A thing that must be shown is a Require with a `not-covered` reason.
  void NotCovered(std::string_view row, std::string what, std::string next);
  // What a pass covers. A pass without a box becomes `inconclusive nothing-compared`.
  void Cover(ScopeBox box);
  void Provisional(std::string_view why);  // a pass that later events turn stale (A-35, TRACK-08)
  void Note(std::string text);

  // The gravest finding gives the verdict. Nothing checked is inconclusive, never a pass.
  GateJudgement Finish();

 private:
  friend class Field;
  void Malformed(const std::string& path, std::string_view what);
  void MarkAll(const Json& value);
  void FindUnread(const Json& value, const std::string& path);

  std::string gate_;
  const Json& evidence_;
  bool malformed_ = false;
  bool checked_ = false;
  // Members read, by object; lists read.
  std::map<const Json*, std::set<std::string, std::less<>>> read_members_;
  std::set<const Json*> read_lists_;
  std::vector<GateFinding> findings_;
  std::map<std::string, std::pair<size_t, std::string>, std::less<>> passes_;  // row -> count, text
  std::vector<std::string> pass_order_;
  Scope covers_;
  Json not_covered_ = Json::array();
  Json notes_ = Json::array();
  std::string provisional_;
};

using GateJudge = GateJudgement (*)(const Json& evidence);
// nullptr for a gate that has none.
GateJudge FindJudge(std::string_view gate);

#define TARE_GATE_JUDGE(gate, function) GateJudgement function(const Json& evidence);
#include "workflow/gates/judges.inc"
#undef TARE_GATE_JUDGE

}  // namespace tare::workflow
