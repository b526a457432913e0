// Gate C3: is inference equal to itself, bit for bit, under everything that must not matter. The
// matrix has three cases: batch alone, prefill against decode alone, and their combination
// with chunks, mixed scheduling and cache state; a cell counts only with the proof that its
// condition occurred. It says nothing about training, and this judge refuses to.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "workflow/gates/judge.h"

namespace tare::workflow {
namespace {

// Axes of the matrix and the row that asks for each. `least`: conditions needed on it.
struct Axis {
  const char* name;
  const char* row;
  const char* kase;
  size_t least;
};
constexpr std::array kAxes = {
    Axis{"batch", "C3-02", "batch", 6},
    Axis{"prefill-decode", "C3-03", "prefill-decode", 1},
    Axis{"chunk", "C3-04", "combined", 6},
    Axis{"mixed", "C3-05", "combined", 1},
    Axis{"preemption", "C3-05", "combined", 1},
    Axis{"reorder", "C3-05", "combined", 1},
    Axis{"cache-cold", "C3-06", "combined", 1},
    Axis{"cache-hit", "C3-06", "combined", 1},
    Axis{"cache-partial", "C3-06", "combined", 1},
    Axis{"cache-evicted", "C3-06", "combined", 1},
    Axis{"cache-dirty", "C3-06", "combined", 1},
    Axis{"process", "C3-09", "combined", 1},
    // Welcome where they were run, asked of nobody.
    Axis{"page", "C3-06", "combined", 0},
    Axis{"priority", "C3-05", "combined", 0},
    Axis{"threads", "C3-09", "combined", 0},
};
// Batch sizes that have to be among the conditions of the batch axis.
constexpr std::array<int64_t, 6> kBatches = {2, 4, 8, 16, 32, 64};

const Axis* FindAxis(const std::string& name) {
  for (const Axis& a : kAxes) {
    if (name == a.name) return &a;
  }
  return nullptr;
}

struct Cell {
  std::string axis, condition, standard, first;
  std::string weights_a, weights_b, tokens_a, tokens_b;
  int64_t batch = 0, compared = 0, mismatches = 0;
  bool needs_proof = false;
  std::string counter;
  int64_t seen = 0, at_least = 0;
  std::string replay;
  bool minimal = false;
  std::string Name() const { return fmt::format("{} / {}", axis, condition); }
};

Cell ReadCell(const Field& f) {
  Cell c;
  c.axis = f.At("axis").Str();
  if (FindAxis(c.axis) == nullptr) f.At("axis").Malformed("is no axis of the matrix");
  c.condition = f.At("condition").Str();
  c.standard = f.At("standard").OneOf({"bitwise", "tolerance"});
  const Field a = f.At("a"), b = f.At("b");
  c.weights_a = a.At("weights_sha256").Hash();
  c.tokens_a = a.At("tokens_sha256").Hash();
  c.weights_b = b.At("weights_sha256").Hash();
  c.tokens_b = b.At("tokens_sha256").Hash();
  c.batch = f.At("batch").Int(1, 1 << 20);
  c.compared = f.At("compared").Int(0, INT64_MAX);
  c.mismatches = f.At("mismatches").Int(0, INT64_MAX);
  c.first = f.At("first").Text();
  if (const std::optional<Field> proof = f.MaybeAt("proof")) {
    c.needs_proof = true;
    c.counter = proof->At("counter").Str();
    c.seen = proof->At("seen").Int(0, INT64_MAX);
    c.at_least = proof->At("at_least").Int(1, INT64_MAX);
  }
  if (const std::optional<Field> replay = f.MaybeAt("replay")) {
    c.replay = replay->At("sha256").Hash();
    c.minimal = replay->At("minimal").Bool();
  }
  return c;
}

struct Kernel {
  std::string name, record;
  int64_t training_tokens = 0;
};

struct File {
  std::string path, declared, loaded, origin;
};

void JudgeCell(Judging* j, const Cell& c, const Subject& subject) {
  const char* row = FindAxis(c.axis)->row;
  if (c.weights_a != c.weights_b || c.weights_a != subject.weights) {
    j->Require("C3-01", false, reason::kWeightHashMismatch,
               fmt::format("{}: the two arms ran on {} and {}", c.Name(), c.weights_a.substr(0, 12),
                           c.weights_b.substr(0, 12)));
    return;
  }
  if (c.tokens_a != c.tokens_b) {
    j->Find(Verdict::kRefused, "C3-01", reason::kTokensDiffer,
            fmt::format("{}: the arms hold other tokens, so their bits answer other questions",
                        c.Name()));
    return;
  }
  j->Pass("C3-01", {});
  j->Require("C3-09", c.compared > 0, reason::kMatrixGap,
             fmt::format("{}: nothing was compared", c.Name()));
  j->Require("C3-09", c.standard == "bitwise", reason::kMatrixGap,
             fmt::format("{} was held to a tolerance; only equal bits pass here", c.Name()));
  j->Require(row, c.mismatches == 0, reason::kBitMismatch,
             fmt::format("{}: {} of {} tokens differ; first: {}", c.Name(), c.mismatches,
                         c.compared, c.first.empty() ? "not recorded" : c.first));
  // Batch size and fresh process prove themselves by what was submitted.
  const bool self_evident = c.axis == "prefill-decode" || c.axis == "process" ||
                            c.axis == "cache-cold" || c.axis == "reorder" ||
                            FindAxis(c.axis)->least == 0 ||
                            (c.axis == "chunk" && c.condition == "full");
  j->Require(row, self_evident || c.needs_proof, reason::kConditionUnmet,
             fmt::format("{}: no counter shows that its condition occurred", c.Name()));
  j->Require(
      row, !c.needs_proof || c.seen >= c.at_least, reason::kConditionUnmet,
      fmt::format("{}: {} is {}, at least {} is needed", c.Name(), c.counter, c.seen, c.at_least));
  if (c.mismatches > 0) {
    j->Require("C3-11", !c.replay.empty() && c.minimal, reason::kReplayMissing,
               fmt::format("{} fails and {}", c.Name(),
                           c.replay.empty() ? "has no replay" : "its replay is not minimal"));
  }
}

}  // namespace

GateJudgement JudgeC3(const Json& evidence) {
  Judging j("C3", evidence);
  const Field root = j.root();
  const Subject subject = ReadSubject(root);
  const std::string use =
      root.At("offered_as").OneOf({"inference-consistency", "train-inference", "delivery"});
  const std::string dtype = root.At("dtype").Str();
  const std::string topology = root.At("topology").Str();
  std::vector<Cell> cells;
  for (const Field& c : root.At("cells").Items()) cells.push_back(ReadCell(c));
  std::vector<Kernel> kernels;
  for (const Field& k : root.At("kernels").Items(1)) {
    kernels.push_back({k.At("kernel").Str(),
                       k.At("record").OneOf({"works", "inference-only", "refuses", "none"}),
                       k.At("training_tokens").Int(0, INT64_MAX)});
  }
  const std::vector<std::string> changed = root.At("changed_files").Strings();
  std::map<std::string, bool> owned;
  for (const Field& o : root.At("ownership").Items()) {
    const bool full = !o.At("repository").Text().empty() && !o.At("dispatched_by").Text().empty() &&
                      !o.At("consumers").Strings().empty();
    owned[o.At("file").Str()] = full;
  }
  const Field provenance = root.At("provenance");
  const std::string commit = provenance.At("commit").Str();
  std::vector<File> files;
  for (const Field& f : provenance.At("files").Items(1)) {
    files.push_back({f.At("path").Str(), f.At("declared_sha256").Hash(),
                     f.At("loaded_sha256").Hash(), f.At("origin").Str()});
  }
  const std::string failing = root.At("failing_replays").OneOf({"none", "listed"});
  if (!j.WellFormed()) return j.Finish();

  j.Require("C3-10", use == "inference-consistency", reason::kInferenceInternal,
            fmt::format("the matrix is offered as {} evidence", use));
  std::set<std::string> names;
  for (const Cell& c : cells) {
    j.Require("C3-09", names.insert(c.Name()).second, reason::kDuplicateName,
              fmt::format("cell {} stands twice", c.Name()));
    JudgeCell(&j, c, subject);
  }
  for (const Axis& axis : kAxes) {
    std::set<std::string> conditions;
    for (const Cell& c : cells) {
      if (c.axis == axis.name) conditions.insert(c.condition);
    }
    j.Require("C3-09", conditions.size() >= axis.least, reason::kMatrixGap,
              fmt::format("axis {} (case {}) has {} of at least {} cells", axis.name, axis.kase,
                          conditions.size(), axis.least));
  }
  for (const int64_t size : kBatches) {
    j.Require("C3-02",
              std::any_of(cells.begin(), cells.end(),
                          [&](const Cell& c) { return c.axis == "batch" && c.batch == size; }),
              reason::kMatrixGap, fmt::format("no cell at batch size {}", size));
  }
  for (const Kernel& k : kernels) {
    j.Require("C3-07",
              k.record == "inference-only" || k.record == "refuses" ||
                  (k.record == "works" && k.training_tokens > 0),
              reason::kTrainingSizeUnknown,
              fmt::format("{} was never run at a training-size token count", k.name));
    if (k.record == "inference-only") {
      j.NotCovered("C3-07", k.name + " in training", "C5 needs another kernel there");
    }
  }
  for (const std::string& file : changed) {
    const auto at = owned.find(file);
    j.Require("C3-12", at != owned.end() && at->second, reason::kOwnershipMissing,
              at == owned.end() ? fmt::format("{} is changed and has no record", file)
                                : fmt::format("the record of {} lacks a part", file));
  }
  if (changed.empty()) j.Pass("C3-12", "no inference file is changed");
  for (const File& f : files) {
    j.Require("C3-13", f.declared == f.loaded, reason::kProvenanceDiffers,
              fmt::format("{} (from {}) is not that of {}", f.path, f.origin, commit));
  }
  const bool any_fail =
      std::any_of(cells.begin(), cells.end(), [](const Cell& c) { return c.mismatches > 0; });
  j.Require("C3-11", any_fail == (failing == "listed"), reason::kReplayMissing,
            any_fail ? "cells fail, and the document says that there is no failing replay"
                     : "no cell fails, and the document says that failing replays are listed");

  // What was run together is one box: a victim under one condition.
  ScopeBox box{.shape = {},
               .topology = {topology},
               .dtype = {dtype},
               .model = {subject.weights},
               .path = {"inference"},
               .contracts = {subject.contracts}};
  for (const Cell& c : cells) box.shape.push_back(c.Name());
  j.Cover(std::move(box));
  j.Note("consistency inside inference only: no trainer ran");
  return j.Finish();
}

}  // namespace tare::workflow
