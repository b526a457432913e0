#pragma once

// Sign-off: a person's confirmation, which no flag, variable or time-out replaces (GEN-22,
// STOP-11). Tare prepares a review bundle and its digest, prints the statement that names person,
// decision, step, bundle and time, and checks a signature over it that was made elsewhere, by a key
// that Tare never sees. docs/formats/signoff.md.
//
// Who may sign stands in task.toml, and that list itself must be signed (step `task`) by one of its
// members, and by a member of the list before it when it is changed. Not proven by this: that the
// first list names the right people. An outsider compares the fingerprints that `verify` prints.

#include <optional>
#include <string>
#include <vector>

#include "workflow/staleness.h"
#include "workflow/task.h"
#include "workflow/verify.h"

namespace tare::workflow {

struct Statement {
  std::string task_id;
  std::string step;
  std::string bundle_sha256;
  std::string person;
  std::string decision;  // "approve" or "reject"
  std::string time;      // RFC 3339 UTC with nine decimals
};
// Canonical JSON and a newline: exactly these bytes are signed.
Result<std::string> EncodeStatement(const Statement& statement);
Result<Statement> ParseStatement(std::string_view bytes);

// Writes the review bundle of a step as an artifact and asks for its review. `extra` are
// dependencies beyond those of the evidence under review, `notes` open points for the reviewer.
Result<ReviewRequest> PrepareReview(Task* task, const std::string& step,
                                    const std::vector<Dependency>& extra,
                                    const std::vector<std::string>& notes);

// Where and how a signature is offered.
struct AcceptContext {
  bool person_at_terminal = false;
  std::string agent_socket;              // SSH_AUTH_SOCK, empty when none
  std::vector<std::string> force_words;  // force flags and variables that were given; any refuses
};
struct AcceptResult {
  Verdict verdict = Verdict::kRefused;
  std::string reason;
  std::string detail;
};
// Checks person, key, step, digest and signature; records sign-off or refusal. A Status error means
// that it could not be done at all.
Result<AcceptResult> AcceptSignOff(Task* task, std::string_view statement,
                                   std::string_view signature, const AcceptContext& context);

// What a review's bundle says against the log: the event that put it up and the records that it
// lists. Gives the head of the log that it was made from, which only the log's lines can show.
struct BundleHead {
  uint64_t events = 0;
  std::string sha256;
};
Result<BundleHead> CheckBundle(const State& state, const ReviewRequest& request,
                               std::string_view bundle);

// The list of reviewers that is signed and in force just before event `seq`, or nullptr.
const ConfigRecord* AuthorityInForce(const State& state, uint64_t seq);

// What a recorded sign-off rests on, checked again from the files: signature, key, person, step,
// digest. Used by verify; trusts nothing that acceptance found.
Status RecheckSignOff(const State& state, const SignOffRecord& signoff, std::string_view statement,
                      std::string_view signature);
// The same for every sign-off of a task that was just read: one whose files do not bear it out is
// marked (SignOffRecord::void_because) and counts for nothing from then on.
void MarkSignOffs(Env* env, const std::string& dir, State* state);

struct SignOffStatus {
  Verdict verdict = Verdict::kWaitingHuman;  // kPass when a valid approval stands
  std::string reason;
  std::string detail;
  std::string person;
  const ReviewRequest* request = nullptr;
};
// Whether the step stands approved now: the latest sign-off approves the latest request, nothing it
// covers has changed, and its key has not been revoked since, not even for a while.
SignOffStatus StatusOfSignOff(const State& state, Staleness* staleness, const std::string& step);

// Files of the task directory that hold a private key, by path. Looks into plain files of at most
// 64 KiB among `tree` (ListTree of `dir`).
struct KeyFile {
  std::string path;
  PrivateKeyScan scan;
};
std::vector<KeyFile> KeyFilesAmong(Env* env, const std::string& dir,
                                   const std::vector<TreeEntry>& tree);
// The first of them whose key is `key`'s private half or cannot be told, or nullptr.
const std::string* KeyFileOf(const std::vector<KeyFile>& files, const PublicKey& key);

}  // namespace tare::workflow
