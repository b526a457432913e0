#pragma once

// `tare run C<N>`: acts for a gate. A collector runs `tare` commands as recorded runs of the gate's
// step, reads what they wrote, and puts the gate's evidence document together; the judge then says
// what it shows, and document, judgement and conclusion are recorded as one more run of the step.
//
// A collector decides nothing: what a command did not show is left out, and the judge refuses the
// gap. This room includes no operator and no device: all that it knows of the machine it reads from
// the files of other processes.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/json.h"
#include "base/sha256.h"
#include "base/status.h"
#include "workflow/gates/judge.h"
#include "workflow/record.h"
#include "workflow/staleness.h"
#include "workflow/task.h"

namespace tare::workflow {

struct RunGateOptions {
  std::string gate;                // "C3"
  std::string task;                // task directory
  std::string model;               // checkpoint folder; empty: weights.path of task.toml
  std::string program;             // the tare executable
  std::string workload = "short";  // of C1: "short" or "formal"
  bool quiet = true;               // do not pass on what the commands print
  // Planted faults, "name@side,...": handed to every command of the gate that takes them, so that a
  // gate can be seen to fail.
  std::string faults;
  std::string text;       // of C7: a text file for the three finetuning arms; empty: none
  std::string reference;  // of C9: a recipe to compare with, JSON; empty: the loop's own defaults
  int64_t formal_steps = 100;  // of C9 and C10: updates of the formal recipe
};

// One command that ran.
struct Ran {
  std::string run_id;
  int64_t exit_code = 0;
  Json json;        // its stdout; null when that was no JSON
  std::string out;  // folder of the files it left, inside the task
  std::vector<std::string> artifacts;
};

class Collecting {
 public:
  Collecting(Env* env, const RunGateOptions& options, std::string actor)
      : env_(env), options_(options), actor_(std::move(actor)) {}

  Env* env() const { return env_; }
  const RunGateOptions& options() const { return options_; }
  const std::string& model() const { return options_.model; }

  // Runs `tare ARGS`; `{out}` in a word is the run's own folder, whose files become artifacts. The
  // run is of kind `kind` and has no conclusion, so it opens nothing. An error when the command was
  // killed or ended with a status that is no verdict; a verdict that is no pass is not one.
  Result<Ran> Tare(EvidenceKind kind, const std::vector<std::string>& args);
  // Appends `--fault` with the planted faults of `side` ("rollout", "trainer", "both"), if any.
  void AddFaults(std::string_view side, std::vector<std::string>* args) const;
  // Records a document as a run of the gate's step without conclusion: materials for a reviewer,
  // tolerances before the results.
  Status Keep(EvidenceKind kind, const std::string& name, Role role, const Json& document);

  // What every gate's document says of its subject, and the facts beside it: one `tare inventory
  // --subject` run per collection, kept. Keys: model, weights, recipe, image, contracts; and
  // `executable_sha256`, `commit`, `hidden`, `dtype`, `layers`, `source` (path of the checkpoint),
  // `layer_shapes` and `geometry` as in the evidence of C2.
  Result<Json> Facts();
  Result<Json> SubjectOf();  // the part that goes under "subject"

  // The newest recorded evidence document of another gate of this task: kNotFound when there is
  // none. The evidence run will depend on it.
  Result<Json> EvidenceOf(const std::string& gate);

  // Keys of task.toml that the evidence depends on, beside the weights and what it was made from.
  void DependOnKeys(std::vector<std::string> keys) { keys_ = std::move(keys); }
  const std::vector<std::string>& keys() const { return keys_; }
  const std::vector<std::string>& depends() const { return depends_; }
  const std::string& actor() const { return actor_; }
  std::string Now() const;  // RFC 3339 UTC, seconds

 private:
  Env* env_;
  RunGateOptions options_;
  std::string actor_;
  std::vector<std::string> keys_, depends_;
  Json facts_;
};

// The evidence document of a gate, complete but for what could not be shown.
using GateCollector = Result<Json> (*)(Collecting* c);
// nullptr for a gate that Tare does not act for.
GateCollector FindCollector(std::string_view gate);
// What a reviewer reads before C9: recorded while the sign-off is missing.
Status PrepareC9(Collecting* c);

#define TARE_GATE_COLLECTOR(gate, function) Result<Json> function(Collecting* c);
#include "workflow/gates/collectors.inc"
#undef TARE_GATE_COLLECTOR

struct RunGateReport {
  GateJudgement judgement;
  std::string run_id;  // of the evidence; empty when nothing was recorded
  // What stands now: the judgement, or why the step is not open although it passed (a person has
  // not signed, a question is open).
  Verdict verdict = Verdict::kInconclusive;
  std::string reason, detail, next;
};

// May the gate be run now: its task, scope, prerequisites and, where a person decides before it,
// the sign-off. kPass, or why not (recorded as a refusal by RunGate).
EvidenceStatus MayRun(const State& state, Staleness* staleness, const std::string& gate);

// Collects, judges, records. Status errors: no task, no collector (kUnsupported), a command failed.
Result<RunGateReport> RunGate(Env* env, const std::string& actor, const RunGateOptions& options);

// Judges a given document and, with a task, records it as evidence made elsewhere. `exit_code`: of
// what made it, where known; E8 and E10 pass only with one.
Result<RunGateReport> JudgeDocument(Env* env, const std::string& actor, const std::string& task,
                                    const std::string& path, std::optional<int64_t> exit_code);

}  // namespace tare::workflow
