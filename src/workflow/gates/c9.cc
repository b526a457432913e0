// C9: recipe review and the gate before the full model. A person confirms; this judge only says
// whether what is confirmed is what would run. That the confirmation is real is the ledger's
// matter (JudgeTask compares it with the recorded sign-off).

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>

#include "workflow/gates/recipe_diff.h"
#include "workflow/gates/table.h"

namespace tare::workflow {
namespace {

constexpr int64_t kMax = int64_t{1} << 40;
const std::vector<std::string> kAxes = {"concurrency", "layers", "length", "parallelism"};
const std::vector<std::string> kSix = {"batch",     "data",        "length",
                                       "optimizer", "parallelism", "precision"};

using Scale = std::map<std::string, int64_t>;
struct EntryRow {
  std::string row, state, evidence, owner, time;
};
struct Stage {
  std::string axis, verdict, evidence;
  Scale from, to;
};
struct Counter {
  int64_t before = 0, after = 0, delta = 0;
};
struct Failure {
  std::string what, shrunk, attempt;
  bool cause_found = false;
  int64_t seen = 0, runs = 0, seen_after = 0, runs_after = 0, full_runs_after = 0;
};
struct Evidence {
  Subject subject;
  std::string kind;
  Recipe agreement, formal, reference, two_step;
  std::string launch_script, smoke_script, image, code_version;
  std::string reference_name;
  std::vector<RecipeDifference> differences;
  std::vector<std::string> open_questions;
  std::string smoke_image, smoke_recipe, smoke_code, smoke_verdict, smoke_receipt;
  std::map<std::string, std::vector<std::string>> six;
  bool confirmed = false;
  std::string person, author, confirmed_recipe;
  std::vector<EntryRow> entry;
  std::string c5_verdict, c5_artifact, c5_image;
  std::string two_step_receipt;
  Scale proxy, target;
  std::vector<Stage> stages;
  std::map<std::string, Counter> counters;
  std::map<std::string, std::pair<std::string, std::string>> restore;
  bool restored = false;
  std::vector<Failure> failures;
};

Scale ReadScale(const Field& field) {
  Scale s;
  for (const std::string& axis : kAxes) s[axis] = field.At(axis).Int(1, kMax);
  return s;
}

std::string Lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

Evidence Read(const Field& root) {
  Evidence e;
  e.subject = ReadSubject(root);
  e.kind = root.At("kind").Str();
  e.agreement = ReadAgreement(root.At("agreement"));
  const Field inputs = root.At("inputs");
  e.launch_script = inputs.At("launch_script").Hash();
  e.image = inputs.At("image").Digest();
  e.code_version = inputs.At("code_version").Commit();
  e.formal = ReadRecipe(inputs.At("recipe"));
  const Field reference = root.At("reference");
  e.reference_name = reference.At("name").Str();
  e.reference = ReadRecipe(reference.At("recipe"));
  for (const Field& item : root.At("differences").Items()) {
    e.differences.push_back({item.At("key").Str(),
                             item.At("change").OneOf({"added", "removed", "changed"}),
                             item.At("class").OneOf({"path", "workload", "update", "numeric"}),
                             item.At("reference").Text(), item.At("ours").Text()});
  }
  e.open_questions = root.At("open_questions").Strings(1);
  const Field smoke = root.At("smoke");
  e.smoke_script = smoke.At("launch_script").Hash();
  e.smoke_image = smoke.At("image").Digest();
  e.smoke_recipe = smoke.At("recipe").Hash();
  e.smoke_code = smoke.At("code_version").Commit();
  e.smoke_verdict = smoke.At("verdict").Str();
  e.smoke_receipt = smoke.At("receipt").Hash();
  for (const auto& [part, keys] : root.At("six").Members()) e.six[part] = keys.Strings(1);
  const Field confirmation = root.At("confirmation");
  e.confirmed = !confirmation.IsNull();
  if (e.confirmed) {
    e.person = confirmation.At("person").Str();
    e.author = confirmation.At("author").Str();
    e.confirmed_recipe = confirmation.At("recipe").Hash();
  }
  for (const Field& item : root.At("entry_table").Items()) {
    EntryRow r;
    r.row = item.At("row").Str();
    r.state = item.At("state").Text();
    const Field evidence = item.At("evidence");
    if (!evidence.IsNull()) r.evidence = evidence.Hash();
    r.owner = item.At("owner").Str();
    r.time = item.At("time").Time();
    e.entry.push_back(std::move(r));
  }
  const Field c5 = root.At("c5");
  e.c5_verdict = c5.At("verdict").Str();
  const Field artifact = c5.At("artifact");
  if (!artifact.IsNull()) e.c5_artifact = artifact.Hash();
  e.c5_image = c5.At("image").Digest();
  const Field two = root.At("two_step");
  e.two_step = ReadRecipe(two.At("recipe"));
  e.two_step_receipt = two.At("receipt").Hash();
  const Field escalation = root.At("escalation");
  e.proxy = ReadScale(escalation.At("proxy"));
  e.target = ReadScale(escalation.At("target"));
  for (const Field& item : escalation.At("stages").Items()) {
    Stage s;
    s.axis = item.At("axis").Str();
    s.from = ReadScale(item.At("from"));
    s.to = ReadScale(item.At("to"));
    s.verdict = item.At("verdict").Str();
    s.evidence = item.At("evidence").Hash();
    e.stages.push_back(std::move(s));
  }
  for (const auto& [name, item] : root.At("counters").Members()) {
    e.counters[name] = {item.At("before").Int(0, kMax), item.At("after").Int(0, kMax),
                        item.At("delta").Int(0, kMax)};
  }
  const Field restore = root.At("restore");
  e.restored = !restore.IsNull();
  if (e.restored) {
    for (const auto& [name, sides] : restore.Members()) {
      e.restore[name] = {sides.At("unbroken").Hash(), sides.At("restored").Hash()};
    }
  }
  for (const Field& item : root.At("failures").Items()) {
    Failure f;
    f.what = item.At("what").Str();
    f.seen = item.At("seen").Int(1, kMax);
    f.runs = item.At("runs").Int(1, kMax);
    f.cause_found = item.At("cause_found").Bool();
    f.seen_after = item.At("seen_after").Int(0, kMax);
    f.runs_after = item.At("runs_after").Int(0, kMax);
    f.full_runs_after = item.At("full_runs_after").Int(0, kMax);
    const Field shrunk = item.At("shrunk");
    if (!shrunk.IsNull()) f.shrunk = shrunk.Hash();
    f.attempt = item.At("attempt").Text();
    e.failures.push_back(std::move(f));
  }
  return e;
}

class Judge9 {
 public:
  Judge9(Judging* judging, const Evidence& evidence) : j_(*judging), e_(evidence) {}

  void Run() {
    j_.Require("C9-12", e_.kind == "E8", reason::kWrongEvidenceKind,
               fmt::format("evidence of kind {}; the entry gate rests on E8", e_.kind));
    Inputs();
    Table();
    Recipes();
    Escalation();
    Features();
    Restore();
    Failures();
    Person();
    ScopeBox box;
    box.shape = {fmt::format("layers={},length={},concurrency={}", e_.target.at("layers"),
                             e_.target.at("length"), e_.target.at("concurrency"))};
    box.topology = {fmt::format("parallelism={}", e_.target.at("parallelism"))};
    box.dtype = {"f32"};
    box.model = {e_.subject.weights};
    box.path = {"entry"};
    box.contracts = {e_.subject.contracts};
    j_.Cover(std::move(box));
  }

 private:
  // C9-01 to C9-03.
  void Inputs() {
    j_.Require("C9-01", e_.launch_script == e_.smoke_script, reason::kConfigDiffers,
               "the launch script is not the one that ran the smoke");
    j_.Require("C9-03",
               e_.smoke_verdict == "pass" && e_.smoke_image == e_.image &&
                   e_.smoke_recipe == RecipeId(e_.two_step) && e_.smoke_code == e_.code_version,
               reason::kSmokeMissing,
               fmt::format("the smoke says {} on image {}, recipe {}, code {}", e_.smoke_verdict,
                           e_.smoke_image.substr(0, 19), e_.smoke_recipe.substr(0, 12),
                           e_.smoke_code.substr(0, 12)));
    j_.Require("C9-01", e_.image == e_.subject.image, reason::kSubjectDiffers,
               "the image is not that of the subject");
    const std::vector<RecipeDifference> want = DiffRecipes(e_.reference, e_.formal);
    std::string which;
    for (size_t i = 0; i < std::max(want.size(), e_.differences.size()) && which.empty(); ++i) {
      const bool both = i < want.size() && i < e_.differences.size();
      if (!both || !(want[i] == e_.differences[i]))
        which = i < want.size() ? want[i].key : e_.differences[i].key;
    }
    j_.Require("C9-02", which.empty(), reason::kDifferenceUnlisted,
               fmt::format("against {}: {} differences are listed, the configurations give {}; "
                           "first at {}",
                           e_.reference_name, e_.differences.size(), want.size(), which));
    j_.Require("C9-02", !e_.differences.empty(), reason::kDifferenceUnlisted,
               fmt::format("nothing differs from {}: is it the recipe itself?", e_.reference_name));
    j_.Require("C9-12", e_.open_questions == std::vector<std::string>{"none"},
               reason::kOpenQuestion, fmt::format("open: {}", fmt::join(e_.open_questions, "; ")));
  }

  // C9-05, C9-09.
  void Table() {
    const GateSpec* gate = TheWorkflow().Find("C9");
    std::vector<std::string> want = gate->needs, have;
    for (const EntryRow& r : e_.entry) {
      have.push_back(r.row);
      j_.Require("C9-05", r.state == "pass" && !r.evidence.empty(), reason::kEntryRowOpen,
                 fmt::format("{}: state `{}`, evidence {}", r.row, r.state,
                             r.evidence.empty() ? "none" : r.evidence.substr(0, 12)));
      if (r.row == "C5") {
        j_.Require("C9-09", r.evidence == e_.c5_artifact, reason::kGateNotPassed,
                   "the entry table and the C5 record name different artifacts");
      }
      if (r.row == "C8") {
        j_.Require("C9-03", r.evidence == e_.smoke_receipt && r.evidence == e_.two_step_receipt,
                   reason::kSmokeMissing,
                   "smoke, two-step result and entry table name different receipts");
      }
    }
    std::sort(want.begin(), want.end());
    std::sort(have.begin(), have.end());
    j_.Require("C9-05", want == have, reason::kEntryRowOpen,
               fmt::format("rows {}; {} are wanted", fmt::join(have, " "), fmt::join(want, " ")));
    j_.Require("C9-09", !e_.c5_artifact.empty(), reason::kGateNotPassed,
               "C5 has no artifact: nothing larger is run");
    j_.Require("C9-09", e_.c5_verdict == "pass", reason::kGateNotPassed,
               fmt::format("C5 is {}: nothing larger is run", e_.c5_verdict));
    // T-25: an image built again is another image, whatever its tag.
    j_.Require("C9-09", e_.c5_image == e_.image, reason::kGateNotPassed,
               fmt::format("C5 was shown on image {}, this is {}: its evidence is stale",
                           e_.c5_image.substr(0, 19), e_.image.substr(0, 19)));
  }

  // C9-10: only the number of steps may be smaller.
  void Recipes() {
    for (const RecipeDifference& d : DiffRecipes(e_.formal, e_.two_step)) {
      j_.Require("C9-10", d.key == "steps" && d.change == "changed", reason::kConfigDiffers,
                 fmt::format("two-step acceptance: {} is {}, the formal recipe has {}", d.key,
                             d.ours, d.reference));
    }
    const auto steps = [](const Recipe& r) { return Agreed(r, "steps", 1).value_or(0); };
    j_.Require("C9-10", steps(e_.two_step) == 2 && steps(e_.formal) > 2, reason::kConfigDiffers,
               fmt::format("two-step acceptance of {} steps, formal recipe of {}",
                           steps(e_.two_step), steps(e_.formal)));
    std::vector<std::string> parts;
    for (const auto& [part, keys] : e_.six) {
      parts.push_back(part);
      for (const std::string& key : keys) {
        j_.Require("C9-04", e_.formal.contains(key), reason::kInventoryIncomplete,
                   fmt::format("{}: the recipe has no key {}", part, key));
      }
    }
    // A key that the review does not cover must be one that moves nothing.
    std::map<std::string, int> covered;
    for (const auto& [part, keys] : e_.six) {
      for (const std::string& key : keys) ++covered[key];
    }
    for (const auto& [key, value] : e_.formal) {
      if (RecipeKeyClass(key) == "path") continue;
      j_.Require("C9-04", covered[key] == 1, reason::kInventoryIncomplete,
                 fmt::format("{} stands in {} parts of the review", key, covered[key]));
    }
    j_.Require("C9-04", parts == kSix, reason::kInventoryIncomplete,
               fmt::format("the review covers {}; {} are wanted", fmt::join(parts, ", "),
                           fmt::join(kSix, ", ")));
  }

  // C9-06.
  void Escalation() {
    Scale at = e_.proxy;
    for (size_t i = 0; i < e_.stages.size(); ++i) {
      const Stage& s = e_.stages[i];
      std::vector<std::string> moved;
      for (const std::string& axis : kAxes) {
        if (s.from.at(axis) != s.to.at(axis)) moved.push_back(axis);
      }
      j_.Require(
          "C9-06", moved == std::vector<std::string>{s.axis}, reason::kTwoAxes,
          fmt::format("stage {} names {} and changes {}", i + 1, s.axis,
                      moved.empty() ? "nothing" : fmt::format("{}", fmt::join(moved, ", "))));
      j_.Require("C9-06", s.from == at, reason::kTwoAxes,
                 fmt::format("stage {} does not start where the one before ended", i + 1));
      j_.Require("C9-06", s.verdict == "pass", reason::kGateNotPassed,
                 fmt::format("stage {} ({}) is {}", i + 1, s.axis, s.verdict));
      at = s.to;
    }
    j_.Require("C9-06", at == e_.target, reason::kTwoAxes,
               "the stages do not end at the target scale");
  }

  // C9-07.
  void Features() {
    std::vector<std::string> want = {"mixed_steps", "updates"}, have;
    const auto on = [&](const char* key) {
      const auto it = e_.formal.find(key);
      return it != e_.formal.end() && it->second == "true";
    };
    if (on("prefix_caching")) want.emplace_back("cache_hits");
    if (on("graph")) want.emplace_back("graph_replays");
    if (!on("graph")) j_.NotCovered("C9-07", "graph replay: the recipe runs without a graph", "");
    for (const auto& [name, c] : e_.counters) {
      have.push_back(name);
      j_.Require(
          "C9-07", c.after >= c.before && c.after - c.before == c.delta,
          reason::kReceiptContradicted,
          fmt::format("{}: {} before, {} after, difference {}", name, c.before, c.after, c.delta));
      j_.Require("C9-07", c.delta > 0, reason::kFeatureUnexecuted,
                 fmt::format("{}: never happened at the target scale", name));
    }
    std::sort(want.begin(), want.end());
    j_.Require("C9-07", want == have, reason::kFeatureUnexecuted,
               fmt::format("counters {}; the recipe wants {}", fmt::join(have, ", "),
                           fmt::join(want, ", ")));
  }

  // C9-08.
  void Restore() {
    const auto it = e_.formal.find("checkpoint_restore");
    const bool in_scope = it != e_.formal.end() && it->second == "true";
    j_.Require("C9-08", in_scope == e_.restored, reason::kRestoreUnchecked,
               fmt::format("checkpoint restore is {} scope and was {}", in_scope ? "in" : "out of",
                           e_.restored ? "compared" : "not compared"));
    if (!in_scope) {
      j_.NotCovered("C9-08", "checkpoint restore is out of scope", "");
      return;
    }
    const std::set<std::string> kParts = {"data position", "first moments", "logprobs after a step",
                                          "masters",       "rng",           "second moments",
                                          "step count"};
    std::set<std::string> parts;
    for (const auto& [name, sides] : e_.restore) {
      parts.insert(name);
      j_.Require("C9-08", sides.first == sides.second, reason::kRestoreDiffers,
                 fmt::format("{} after the first restore is not that of the unbroken run", name));
    }
    j_.Require(
        "C9-08", parts == kParts, reason::kRestoreUnchecked,
        fmt::format("compared {}; {} are wanted", fmt::join(parts, ", "), fmt::join(kParts, ", ")));
  }

  // C9-11, CHEAP-12.
  void Failures() {
    for (const Failure& f : e_.failures) {
      j_.Require("C9-11", f.full_runs_after == 0 || !f.shrunk.empty() || f.attempt.size() >= 10,
                 reason::kShrinkFirst,
                 fmt::format("{}: {} full runs followed and nothing was shrunk", f.what,
                             f.full_runs_after));
      if (f.cause_found && f.seen_after == 0) continue;
      if (f.seen_after > 0) {
        j_.Require(
            "CHEAP-12", false, reason::kGateNotPassed,
            fmt::format("{}: still seen in {} of {} runs", f.what, f.seen_after, f.runs_after));
        continue;
      }
      // Had nothing changed, at least one more sighting would be expected with this probability.
      const double rate = static_cast<double>(f.seen) / static_cast<double>(f.runs);
      const double power = 1 - std::pow(1 - std::min(rate, 1.0), static_cast<double>(f.runs_after));
      j_.Require("CHEAP-12", false, reason::kNotReproduced,
                 fmt::format("{}: seen in {} of {} runs, then in 0 of {}; detection power {:.3f}",
                             f.what, f.seen, f.runs, f.runs_after, power));
    }
  }

  // C9-04, STOP-11.
  void Person() {
    if (!j_.Require("STOP-11", e_.confirmed, reason::kNoSignoff,
                    "no person has confirmed this version of the recipe")) {
      return;
    }
    j_.Require("STOP-11", Lower(e_.person) != Lower(e_.author), reason::kSelfApproval,
               fmt::format("{} wrote the recipe and confirmed it", e_.person));
    j_.Require("C9-04", e_.confirmed_recipe == RecipeId(e_.formal), reason::kSignoffVoid,
               "the confirmation is of another version of the recipe");
  }

  Judging& j_;
  const Evidence& e_;
};

}  // namespace

GateJudgement JudgeC9(const Json& evidence) {
  Judging judging("C9", evidence);
  const Evidence e = Read(judging.root());
  if (judging.WellFormed()) Judge9(&judging, e).Run();
  return judging.Finish();
}

}  // namespace tare::workflow
