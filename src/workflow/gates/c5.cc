// C5: the trainer's two forwards against the rollout. What the document holds is listed in
// docs/formats/gate_evidence_c5_c10.md; every count and mismatch is computed here from its words.

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "workflow/gates/evidence_parts.h"

namespace tare::workflow {
namespace {

// C5-01: each must be one on both sides.
constexpr std::array<std::string_view, 8> kSemantics = {
    "primitives", "quantization", "layout", "mask", "position", "routing", "reduction", "logprob"};
constexpr std::array<std::string_view, 3> kChain = {"checkpoint to master", "master to deployed",
                                                    "deployed to engine"};
const std::vector<std::string> kOrder = {"contract", "rollout",     "same packing",
                                         "repacked", "old_logprob", "actor"};

using Packing = std::vector<std::vector<std::string>>;  // micro-batches of sequences
struct NamedPacking {
  Packing batches;
  int64_t padding = 0;  // rows beyond those of the sequences
};

struct Conversion {
  std::string step, from_format, to_format, scale, rounding, from, to;
};

struct Choice {
  std::string where, what;
  std::vector<int64_t> rollout, own, used;
};

struct Decisions {
  bool recorded = false, replayed = false;
  std::string statement;
  std::map<std::string, int64_t> flips;  // as reported, by kind of decision
  std::vector<Choice> choices;
};

struct Evidence {
  Subject subject;
  std::string kind;
  std::vector<std::string> order;
  std::map<std::string, std::string> contracts;  // operator -> contract ID
  std::map<std::string, std::string> kernels;    // kernel -> operator
  std::string standard;
  LogprobPath agreed;  // dtype, kind, temperature, vocabulary of the contract; no lines
  int64_t scope_valid = 0, scope_masked = 0, eos_token = 0, eos_tokens = 0;
  std::map<std::string, std::pair<std::string, std::string>> semantics;  // rollout, trainer
  std::string state_rollout, state_trainer;
  std::vector<Conversion> chain;
  std::string entry, optimizer_parameters, forward_parameters;
  int64_t copies = 0;
  SideIdentity rollout, trainer;
  std::vector<std::string> rollout_kernels, trainer_kernels;
  std::map<std::string, NamedPacking> packings;
  std::map<std::string, LogprobPath> paths;
  std::map<std::string, std::string> sources;
  std::map<std::string, bool> recorded;
  std::map<std::string, std::vector<LogprobPath>> repeats;
  std::map<std::string, std::map<std::string, LogprobPath>> repacked;  // packing -> path
  Decisions decisions;
  std::vector<std::pair<std::string, std::string>> metrics;
};

Decisions ReadDecisions(const Field& field) {
  Decisions d;
  d.recorded = field.At("recorded").Bool();
  d.replayed = field.At("replayed").Bool();
  d.statement = field.At("statement").Text();
  for (const char* what : {"router", "indexer", "candidates"})
    d.flips[what] = field.At("flips").At(what).Int(0, INT32_MAX);
  for (const Field& item : field.At("choices").Items()) {
    Choice r;
    r.where = item.At("where").Str();
    r.what = item.At("what").OneOf({"router", "indexer", "candidates"});
    r.rollout = item.At("rollout").Ints(-1, INT32_MAX);
    r.own = item.At("trainer").Ints(-1, INT32_MAX);
    r.used = item.At("trainer_used").Ints(-1, INT32_MAX);
    d.choices.push_back(std::move(r));
  }
  return d;
}

Evidence Read(const Field& root) {
  Evidence e;
  e.subject = ReadSubject(root);
  e.kind = root.At("kind").Str();
  e.order = root.At("order").Strings();
  for (const auto& [op, id] : root.At("contracts").Members(1)) e.contracts[op] = id.Hash();
  for (const auto& [kernel, op] : root.At("kernels").Members(1)) e.kernels[kernel] = op.Str();
  const Field contract = root.At("contract");
  e.standard = contract.At("standard").Str();
  e.agreed.dtype = contract.At("dtype").Str();
  e.agreed.kind = contract.At("kind").OneOf({"raw", "processed"});
  e.agreed.temperature = fmt::format("0x{:08x}", contract.At("temperature").Bits32());
  e.agreed.vocabulary = contract.At("vocabulary").Int(1, INT32_MAX);
  const Field scope = contract.At("scope");
  e.scope_valid = scope.At("valid_tokens").Int(0, INT32_MAX);
  e.scope_masked = scope.At("masked_tokens").Int(0, INT32_MAX);
  e.eos_token = scope.At("eos_token").Int(0, INT32_MAX);
  e.eos_tokens = scope.At("eos_tokens").Int(0, INT32_MAX);
  for (const auto& [name, sides] : root.At("semantics").Members()) {
    e.semantics[name] = {sides.At("rollout").Str(), sides.At("trainer").Str()};
  }
  e.state_rollout = root.At("state").At("rollout").Str();
  e.state_trainer = root.At("state").At("trainer").Str();
  for (const Field& item : root.At("chain").Items()) {
    Conversion c;
    c.step = item.At("step").Str();
    c.from_format = item.At("from_format").Str();
    c.to_format = item.At("to_format").Str();
    c.scale = item.At("scale").Str();
    c.rounding = item.At("rounding").OneOf({"exact", "nearest-even"});
    c.from = item.At("from").Hash();
    c.to = item.At("to").Hash();
    e.chain.push_back(std::move(c));
  }
  const Field trainer = root.At("trainer");
  e.entry = trainer.At("entry").Str();
  e.optimizer_parameters = trainer.At("optimizer_parameters").Hash();
  e.forward_parameters = trainer.At("forward_parameters").Hash();
  e.copies = trainer.At("weight_copies").Int(0, INT32_MAX);
  const Field identities = root.At("identities");
  e.rollout = ReadIdentity(identities.At("rollout"), "rollout");
  e.trainer = ReadIdentity(identities.At("trainer"), "trainer");
  e.rollout_kernels = identities.At("rollout").At("kernels").Strings();
  e.trainer_kernels = identities.At("trainer").At("kernels").Strings();
  for (const auto& [name, item] : root.At("packings").Members()) {
    NamedPacking p;
    for (const Field& batch : item.At("micro_batches").Items())
      p.batches.push_back(batch.Strings(1));
    p.padding = item.At("padding_rows").Int(0, INT32_MAX);
    e.packings[name] = std::move(p);
  }
  for (const auto& [name, item] : root.At("paths").Members()) {
    e.paths[name] = ReadLogprobPath(item, name);
    e.sources[name] = item.At("source").OneOf({"forward", "copied"});
    e.recorded[name] = item.At("recorded").Bool();
  }
  for (const auto& [name, list] : root.At("same_packing").Members()) {
    for (const Field& item : list.Items()) e.repeats[name].push_back(ReadLogprobPath(item, name));
  }
  for (const auto& [packing, by_path] : root.At("repacked").Members()) {
    for (const auto& [name, item] : by_path.Members()) {
      e.repacked[packing][name] = ReadLogprobPath(item, name);
    }
  }
  e.decisions = ReadDecisions(root.At("decisions"));
  for (const Field& item : root.At("metrics").Items()) {
    e.metrics.emplace_back(item.At("name").Str(), item.At("value").Str());
  }
  return e;
}

// Order of computation of the sequences, and who stands with whom.
std::vector<std::string> Flat(const Packing& packing) {
  std::vector<std::string> out;
  for (const auto& batch : packing) out.insert(out.end(), batch.begin(), batch.end());
  return out;
}
std::set<std::set<std::string>> Groups(const Packing& packing) {
  std::set<std::set<std::string>> out;
  for (const auto& batch : packing) out.emplace(batch.begin(), batch.end());
  return out;
}

class Judge5 {
 public:
  Judge5(Judging* judging, const Evidence& evidence) : j_(*judging), e_(evidence) {}

  void Run() {
    j_.Require("C5-10", e_.kind == "E6", reason::kWrongEvidenceKind,
               fmt::format("evidence of kind {} was handed in; the dual path is E6", e_.kind));
    Before();
    SamePacking();
    Repacked();
    BothPaths();
    Discrete();
    for (const auto& [name, value] : e_.metrics) {
      j_.Note(fmt::format("{} = {} is diagnostic-only: it is no comparison of bits", name, value));
    }
  }

 private:
  // What must hold before any value is looked at.
  void Before() {
    j_.Require("C5-03", e_.order == kOrder, reason::kOrderOfWork,
               fmt::format("order was {}; {} is wanted", fmt::join(e_.order, ", "),
                           fmt::join(kOrder, ", ")));
    j_.Require("C1-07", e_.standard == "bitwise" && e_.agreed.dtype == "f32",
               reason::kSemanticsDiffer,
               fmt::format("the agreed standard is {} in {}; C5 asks for bitwise in f32",
                           e_.standard, e_.agreed.dtype));
    for (const std::string_view name : kSemantics) {
      const auto it = e_.semantics.find(std::string(name));
      if (!j_.Require("C5-01", it != e_.semantics.end(), reason::kSemanticsDiffer,
                      fmt::format("{}: neither side says what it executes", name))) {
        continue;
      }
      j_.Require("C5-01", it->second.first == it->second.second, reason::kSemanticsDiffer,
                 fmt::format("{}: rollout executes {}, trainer {}", name, it->second.first,
                             it->second.second));
    }
    j_.Require("C5-01", e_.semantics.size() == kSemantics.size(), reason::kSemanticsDiffer,
               fmt::format("{} semantics are listed; {}", e_.semantics.size(), kSemantics.size()));
    j_.Require("C5-11", e_.state_rollout == e_.state_trainer, reason::kInputDiffers,
               fmt::format("state before the first token: rollout {}, trainer {}", e_.state_rollout,
                           e_.state_trainer));
    Chain();
    j_.Require("C5-02", e_.copies == 1 && e_.optimizer_parameters == e_.forward_parameters,
               reason::kSecondCopy,
               fmt::format("{} copies of the weights; the forward reads parameters {}, the "
                           "optimizer updates {}",
                           e_.copies, e_.forward_parameters.substr(0, 12),
                           e_.optimizer_parameters.substr(0, 12)));
    static const std::set<std::string> kEntries = {"tare rl-worker", "tare dual-path", "tare train",
                                                   "verl.trainer.main_ppo"};
    j_.Require(
        "C5-02", kEntries.contains(e_.entry), reason::kSecondCopy,
        fmt::format("{} is no entry point of a trainer ({})", e_.entry, fmt::join(kEntries, ", ")));
    CheckIdentities(&j_, "C5-09", e_.subject, e_.rollout, e_.trainer);
    j_.Require("C5-09", e_.rollout.prefix_caching == e_.trainer.prefix_caching,
               reason::kIdentityDiffers,
               "the two processes were configured with another prefix caching");
    j_.Require("C5-09", RecipeId(e_.contracts) == e_.trainer.contracts, reason::kIdentityDiffers,
               "the contract IDs are not those that the processes had in force");
    std::set<std::string> ran;
    for (const auto* list : {&e_.rollout_kernels, &e_.trainer_kernels}) {
      j_.Require("C5-09", !list->empty() && AllDifferent(*list), reason::kInventoryIncomplete,
                 "a side lists no kernel that it executed, or one twice");
      for (const std::string& kernel : *list) {
        ran.insert(kernel);
        j_.Require("C0-02", e_.kernels.contains(kernel), reason::kInventoryIncomplete,
                   fmt::format("kernel {} was executed and stands in no inventory", kernel));
      }
    }
    // Kernels that only move bits, and those that sample, need no partner and no contract here.
    std::map<std::string, std::set<std::string>> sides;
    for (const auto& [side, list] :
         {std::pair("rollout", &e_.rollout_kernels), std::pair("trainer", &e_.trainer_kernels)}) {
      for (const std::string& kernel : *list) {
        const auto it = e_.kernels.find(kernel);
        if (it != e_.kernels.end()) sides[it->second].insert(side);
      }
    }
    for (const auto& [kernel, op] : e_.kernels) {
      j_.Require("C0-02", ran.contains(kernel), reason::kPathUnexecuted,
                 fmt::format("kernel {} stands in the inventory and was not executed", kernel));
      if (op == "copy" || op == "sampling") continue;
      j_.Require("C5-09", e_.contracts.contains(op), reason::kInventoryIncomplete,
                 fmt::format("kernel {} computes {}, which has no contract", kernel, op));
    }
    for (const auto& [op, id] : e_.contracts) {
      j_.Require("CHEAP-14", sides[op].size() == 2, reason::kPathUnexecuted,
                 fmt::format("{} was executed by {}", op,
                             sides[op].empty() ? "neither side" : *sides[op].begin() + " only"));
    }
  }

  // NUM-17: format, scale and rounding of every conversion, without a gap.
  void Chain() {
    if (!j_.Require("NUM-17", e_.chain.size() == kChain.size(), reason::kInventoryIncomplete,
                    fmt::format("{} conversions are recorded; {}", e_.chain.size(),
                                fmt::join(kChain, ", ")))) {
      return;
    }
    for (size_t i = 0; i < e_.chain.size(); ++i) {
      const Conversion& c = e_.chain[i];
      const bool joins =
          i == 0 || (c.from == e_.chain[i - 1].to && c.from_format == e_.chain[i - 1].to_format);
      j_.Require("NUM-17", c.step == kChain[i] && joins, reason::kInventoryIncomplete,
                 fmt::format("conversion {} is {}, from {} {}; the one before gave {}", i, c.step,
                             c.from_format, c.from.substr(0, 12),
                             i == 0 ? "nothing" : e_.chain[i - 1].to.substr(0, 12)));
      // bf16 fits into f32; nothing else here is exact but a copy.
      const bool exact =
          c.from_format == c.to_format || (c.from_format == "bf16" && c.to_format == "f32");
      j_.Require("NUM-17", c.scale == "none" && c.rounding == (exact ? "exact" : "nearest-even"),
                 reason::kSemanticsDiffer,
                 fmt::format("{}: {} to {} with scale {} and rounding {}", c.step, c.from_format,
                             c.to_format, c.scale, c.rounding));
      j_.Require("NUM-17", c.from_format != c.to_format || c.from == c.to, reason::kInputDiffers,
                 fmt::format("{}: same format, other bytes", c.step));
    }
    j_.Require(
        "C5-11",
        e_.chain.back().to == e_.subject.weights && e_.chain.front().from == e_.subject.weights,
        reason::kWeightHashMismatch,
        "the chain does not begin and end with the weights of the subject");
  }

  const LogprobPath* Path(const std::string& name) const {
    const auto it = e_.paths.find(name);
    return it == e_.paths.end() ? nullptr : &it->second;
  }

  void CheckPacking(const std::string& name, const NamedPacking& packing) {
    const LogprobPath* rollout = Path("rollout");
    if (rollout == nullptr) return;
    std::vector<std::string> want, have = Flat(packing.batches);
    for (const LogprobLine& line : rollout->lines) want.push_back(line.sequence);
    std::sort(want.begin(), want.end());
    std::sort(have.begin(), have.end());
    j_.Require("C5-04", want == have, reason::kTokensDiffer,
               fmt::format("packing {} does not hold each sequence once", name));
  }

  // A run's rows are those of its sequences and its packing's padding.
  static LogprobPath WithoutPadding(LogprobPath path, const NamedPacking& packing) {
    path.rows -= packing.padding;
    return path;
  }

  // C5-03: twice in one process and once in a fresh one.
  void SamePacking() {
    const auto base = e_.packings.find("base");
    if (!j_.Require("C5-03", base != e_.packings.end(), reason::kOrderOfWork,
                    "no packing is named base")) {
      return;
    }
    CheckPacking("base", base->second);
    for (const char* name : {"old_logprob", "actor"}) {
      const LogprobPath* path = Path(name);
      const auto runs = e_.repeats.find(name);
      if (path == nullptr ||
          !j_.Require("C5-03", runs != e_.repeats.end() && runs->second.size() == 2,
                      reason::kOrderOfWork,
                      fmt::format("{}: a repeat in the same process and one in "
                                  "a fresh process are wanted",
                                  name))) {
        continue;
      }
      const char* where[] = {"again in one process", "in a fresh process"};
      for (size_t i = 0; i < 2; ++i)
        Same("C5-03", fmt::format("{} {}", name, where[i]), *path, runs->second[i], base->second);
    }
    j_.Require("C5-03", e_.repeats.size() == 2, reason::kOrderOfWork,
               "repeats of the old_logprob and the actor path are wanted, no others");
  }

  // One side with itself: any difference is that side's own.
  void Same(std::string_view row, const std::string& where, const LogprobPath& a,
            const LogprobPath& b, const NamedPacking& packing) {
    CheckOriginal(&j_, row, where, WithoutPadding(b, packing));
    bool same = a.lines.size() == b.lines.size() && a.kind == b.kind && a.dtype == b.dtype &&
                a.temperature == b.temperature && a.vocabulary == b.vocabulary;
    std::string first = same ? "" : "another shape, kind or dtype";
    for (size_t i = 0; same && i < a.lines.size(); ++i) {
      const LogprobLine &x = a.lines[i], &y = b.lines[i];
      same = x.sequence == y.sequence && x.prompt == y.prompt && x.tokens == y.tokens &&
             x.mask == y.mask && x.bits == y.bits;
      if (!same) first = x.sequence;
    }
    j_.Require(row, same, reason::kSelfInconsistent,
               fmt::format("{}: the trainer does not repeat itself; first at {}", where, first));
  }

  // C5-04: other neighbours, order, micro-batches and padding, the same bits.
  void Repacked() {
    const auto base = e_.packings.find("base");
    if (base == e_.packings.end()) return;
    bool order = false, neighbours = false, padding = false, padded = base->second.padding > 0;
    for (const auto& [name, packing] : e_.packings) {
      if (name == "base") continue;
      CheckPacking(name, packing);
      padded = padded || packing.padding > 0;
      const bool moved = Flat(packing.batches) != Flat(base->second.batches);
      const bool mates = Groups(packing.batches) != Groups(base->second.batches);
      const bool pads = packing.padding != base->second.padding;
      j_.Require("C5-04", moved || mates || pads, reason::kOrderOfWork,
                 fmt::format("packing {} is the base packing again", name));
      order = order || moved;
      neighbours = neighbours || mates;
      padding = padding || pads;
      const auto runs = e_.repacked.find(name);
      if (!j_.Require("C5-04", runs != e_.repacked.end() && runs->second.size() == 2,
                      reason::kPathMissing,
                      fmt::format("packing {}: both paths are wanted", name))) {
        continue;
      }
      for (const char* path_name : {"old_logprob", "actor"}) {
        const LogprobPath* path = Path(path_name);
        const auto run = runs->second.find(path_name);
        if (path == nullptr) continue;
        if (!j_.Require("C5-04", run != runs->second.end(), reason::kPathMissing,
                        fmt::format("packing {}: no {}", name, path_name))) {
          continue;
        }
        Same("C5-04", fmt::format("{} in packing {}", path_name, name), *path, run->second,
             packing);
      }
    }
    j_.Require("C5-04", e_.repacked.size() + 1 == e_.packings.size(), reason::kOrderOfWork,
               "each repacked run needs its packing, each packing its run");
    j_.Require("C5-04", order && neighbours, reason::kOrderOfWork,
               "order and neighbours (micro-batches) must each change in some packing");
    if (!padded) {
      j_.NotCovered("C5-04", "padding: the layout is ragged and has none", "");
    } else {
      j_.Require("C5-04", padding, reason::kOrderOfWork, "padding must change in some packing");
    }
  }

  // C5-05 to C5-08.
  void BothPaths() {
    const LogprobPath* rollout = Path("rollout");
    if (!j_.Require("C5-05", rollout != nullptr, reason::kPathMissing,
                    e_.metrics.empty() ? "no logprobs of the rollout"
                                       : "metrics only, no logprobs of the rollout")) {
      return;
    }
    CheckOriginal(&j_, "C5-07", "rollout", *rollout);
    for (const auto& [name, path] : e_.paths) {
      j_.Require("C5-12", name == "rollout" || name == "old_logprob" || name == "actor",
                 reason::kPathMissing,
                 fmt::format("{} is no path of the dual-path contract", name));
      j_.Require("C5-05", e_.sources.at(name) == "forward", reason::kPathUnexecuted,
                 fmt::format("{}: its values were copied, not computed", name));
      j_.Require("C5-06", e_.recorded.at(name) == (name == "actor"), reason::kPathUnexecuted,
                 fmt::format("{}: gradients {}", name,
                             e_.recorded.at(name) ? "were recorded" : "were not recorded"));
      j_.Require(
          "C5-07",
          path.dtype == e_.agreed.dtype && path.kind == e_.agreed.kind &&
              path.temperature == e_.agreed.temperature && path.vocabulary == e_.agreed.vocabulary,
          reason::kSemanticsDiffer,
          fmt::format("{}: {} {} at temperature {} over {}; agreed are {} {} {} {}", name,
                      path.kind, path.dtype, path.temperature, path.vocabulary, e_.agreed.kind,
                      e_.agreed.dtype, e_.agreed.temperature, e_.agreed.vocabulary));
    }
    Scope(*rollout);
    const LogprobPath *old = Path("old_logprob"), *actor = Path("actor");
    j_.Require("C5-05", old != nullptr, reason::kPathMissing,
               "the no-grad recomputation of old logprobs was not compared");
    j_.Require("C5-06", actor != nullptr, reason::kPathMissing,
               "the grad-enabled actor forward was not compared");
    const auto base = e_.packings.find("base");
    const NamedPacking none;
    const NamedPacking& packing = base == e_.packings.end() ? none : base->second;
    if (old != nullptr) Compare("rollout against old_logprob", *rollout, *old, packing);
    if (actor != nullptr) Compare("rollout against actor", *rollout, *actor, packing);
    if (old != nullptr && actor != nullptr) {
      CompareLogprobs(&j_, "C5-07", "C5-08", "old_logprob against actor", *old, *actor);
    }
  }

  void Compare(const std::string& where, const LogprobPath& rollout, const LogprobPath& trainer,
               const NamedPacking& packing) {
    CheckOriginal(&j_, "C5-07", trainer.name, WithoutPadding(trainer, packing));
    const LogprobCounts c = CompareLogprobs(&j_, "C5-07", "C5-08", where, rollout, trainer);
    if (c.compared == 0) return;
    j_.Pass("C5-08",
            fmt::format("{}: {} valid tokens, {} differ", where, c.compared, c.mismatches));
    ScopeBox box;
    box.shape = {fmt::format("sequences={},tokens={}", rollout.lines.size(), c.compared)};
    box.topology = {e_.trainer.topology};
    box.dtype = {rollout.dtype};
    box.model = {e_.subject.weights};
    box.path = {trainer.name};
    for (const auto& [op, id] : e_.contracts) box.contracts.push_back(op + "=" + id);
    j_.Cover(std::move(box));
  }

  void Scope(const LogprobPath& rollout) {
    const int64_t valid = ValidTokens(rollout);
    int64_t tokens = 0, eos = 0;
    std::vector<std::string> names;
    for (const LogprobLine& line : rollout.lines) {
      names.push_back(line.sequence);
      tokens += static_cast<int64_t>(line.tokens.size());
      for (size_t t = 0; t < line.tokens.size(); ++t)
        eos += line.tokens[t] == e_.eos_token && line.mask[t] == 1;
    }
    j_.Require("C5-08", AllDifferent(names), reason::kDuplicateName,
               "two sequences of the rollout have one name");
    j_.Require("C5-08", valid > 0, reason::kNoValidTokens,
               fmt::format("{} tokens, none of them valid", tokens));
    j_.Require("C5-08", valid == e_.scope_valid && tokens - valid == e_.scope_masked,
               reason::kCountMismatch,
               fmt::format("{} valid and {} masked tokens; the agreed scope holds {} and {}", valid,
                           tokens - valid, e_.scope_valid, e_.scope_masked));
    j_.Require("C1-06", eos == e_.eos_tokens, reason::kCountMismatch,
               fmt::format("{} valid tokens are the end of sequence {}; the agreed scope holds {}",
                           eos, e_.eos_token, e_.eos_tokens));
  }

  // DISC-01 to DISC-16: decisions before values.
  void Discrete() {
    const Decisions& d = e_.decisions;
    int64_t reported = 0;
    for (const auto& [what, flips] : d.flips) reported += flips;
    if (!d.recorded) {
      j_.Require("DISC-01", d.choices.empty() && !d.replayed && reported == 0,
                 reason::kReplayUnstated, "decisions are replayed or listed, but not recorded");
      j_.NotCovered("DISC-01", "router, indexer and candidate sets were not recorded",
                    "record them on both sides");
      return;
    }
    j_.Require("DISC-01", !d.choices.empty(), reason::kNothingCompared,
               "decisions are said to be recorded and none is listed");
    std::map<std::string, int64_t> flips;
    std::vector<std::string> names;
    for (const Choice& c : d.choices) {
      names.push_back(c.where);
      OneChoice(c);
      flips[c.what] += c.rollout != c.own;
    }
    j_.Require("DISC-01", AllDifferent(names), reason::kDuplicateName,
               "one decision is listed twice");
    for (const auto& [what, count] : d.flips) Flips(what, count, flips[what]);
    const bool stated = d.statement.find("masks set differences") != std::string::npos;
    j_.Require("DISC-16", d.replayed ? stated : d.statement.empty(), reason::kReplayUnstated,
               d.replayed ? "the statement that replay masks set differences is missing"
                          : "a statement about replay stands where nothing was replayed");
  }

  void OneChoice(const Choice& c) {
    const std::string text = fmt::format("{} {}: rollout [{}], trainer [{}]", c.what, c.where,
                                         fmt::join(c.rollout, " "), fmt::join(c.own, " "));
    for (std::vector<int64_t> side : {c.rollout, c.own}) {
      std::sort(side.begin(), side.end());
      j_.Require("DISC-04",
                 std::adjacent_find(side.begin(), side.end()) == side.end() && !side.empty(),
                 reason::kDuplicateChoice, text);
    }
    if (e_.decisions.replayed) {
      j_.Require(
          "DISC-10", c.used == c.rollout, reason::kReplayUnstated,
          fmt::format("{}: used [{}], which is not the rollout's", text, fmt::join(c.used, " ")));
      return;
    }
    j_.Require("DISC-10", c.used == c.own, reason::kReplayUnstated,
               fmt::format("{}: used [{}] without declared replay", text, fmt::join(c.used, " ")));
    std::vector<int64_t> a = c.rollout, b = c.own;
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    j_.Require("DISC-01", a == b, reason::kSetDiffers, text);
    j_.Require("DISC-02", a != b || c.rollout == c.own, reason::kOrderDiffers, text);
  }

  // replay is accepted for the values only together with the flips counted from what each
  // side chose by itself; about the decision itself it says nothing.
  void Flips(const std::string& what, int64_t reported, int64_t counted) {
    const std::string text = fmt::format(
        "{}: {} flips are reported, {} decisions differ before "
        "the replay",
        what, reported, counted);
    if (reported == counted) {
      if (counted > 0 && e_.decisions.replayed) {
        j_.NotCovered("DISC-10",
                      fmt::format("consistency of the {}: {} flips under replay", what, counted),
                      "compare with replay off");
      }
      return;
    }
    if (what == "candidates" || !e_.decisions.replayed) {
      j_.Require("DISC-16", false, reason::kReplayUnstated, text);
      return;
    }
    j_.Require("DISC-10", false, reason::kSetDiffers, text);
    j_.Find(Verdict::kDiagnosticOnly, "DISC-10", reason::kForcedDecisions,
            "the values after it were computed with the rollout's choice");
  }

  Judging& j_;
  const Evidence& e_;
};

}  // namespace

GateJudgement JudgeC5(const Json& evidence) {
  Judging judging("C5", evidence);
  const Evidence e = Read(judging.root());
  if (judging.WellFormed()) Judge5(&judging, e).Run();
  return judging.Finish();
}

}  // namespace tare::workflow
