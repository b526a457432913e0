#pragma once

// The two tracks of a task. The baseline track (C1) and the consistency track (C2 to C8) run side
// by side; each has a state of its own, read from its own runs, reviews and sign-offs, so that
// nothing the one records can move the other. What they share is a contract: model, precision,
// hardware and image (TRACK-06). After its freeze the baseline is not tuned any further until a
// reviewer rejects it or an input of it changes (TRACK-03, STOP-02).

#include <map>
#include <string>
#include <vector>

#include "base/env.h"
#include "workflow/staleness.h"
#include "workflow/state.h"

namespace tare::workflow {

struct BaselineTrack {
  // "untuned", "tuning" (C1 ran and its judge passed nothing yet), "waiting-human" (frozen),
  // "confirmed", "reopened" (a reviewer rejected it), "stale" (an input changed).
  std::string state = "untuned";
  std::string candidate;  // run of the frozen evidence; empty while there is none
  std::string table;      // SHA-256 of that evidence: tuning table, configuration and materials
  std::string audit;      // who decided what, or what the audit waits for
  Json ToJson() const;
};
struct ConsistencyTrack {
  std::map<std::string, std::string> gates;  // C2 to C8: verdict of the latest word
  std::string next;                          // the first gate that is not open; empty: none
  Json ToJson() const;
};
BaselineTrack BaselineOf(const State& state, Staleness* staleness);
ConsistencyTrack ConsistencyOf(const State& state, Staleness* staleness);

// May the baseline be tuned now? kPass, or kRefused `tuning-frozen`.
EvidenceStatus MayTune(const State& state, Staleness* staleness);

// What both tracks must share, as text by part: "model", "precision", "hardware", "image".
using TrackContract = std::map<std::string, std::string>;
// As it was in force when the run started: its weights, and the configuration of that moment.
TrackContract ContractOf(const State& state, const RunRecord& run);
std::string ContractHash(const TrackContract& contract);
// kPass when both are one contract; else kRefused `track-contract-differs` naming the parts.
EvidenceStatus CompareTracks(const TrackContract& baseline, const TrackContract& consistency);
// The frozen baseline against the latest passed dual path (C5). kNotCovered while either is
// missing: nothing was compared.
EvidenceStatus TracksShareContract(const State& state);

// Hand-over (STOP-10): a task that waits for a person as a package that someone else takes up.
// `package` (new) gets `task/`, a verified copy, and `handover.json`: which stop waits and for
// what, the checkpoint of the log, and the leases that its holder should give back. Stops and kills
// nothing. kPrecondition when no stop waits, a run is open, or the task does not verify.
struct Handover {
  std::vector<std::string> waiting;  // "C1: ..."
  std::string checkpoint;            // three lines
  uint64_t files = 0;
};
Result<Handover> WriteHandover(Env* env, const std::string& task, const std::string& package,
                               const std::string& actor, const std::vector<std::string>& leases);
// Makes `task` (new) from a package, whose log must be the one that its checkpoint names.
Result<Handover> ResumeHandover(Env* env, const std::string& package, const std::string& task,
                                const std::string& actor);

}  // namespace tare::workflow
