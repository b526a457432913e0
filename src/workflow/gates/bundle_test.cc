// BUNDLE: a whole honest task in a real ledger, and forgeries of it. Each changes one field of one
// evidence document of C5 to C10. Sealed again (digests, sidecars, chain and sign-offs made anew,
// the conclusion still a pass) the ledger holds, so what is claimed must contradict itself or its
// neighbours; not sealed again, the digest gives it away. None may end in a pass.

#include <gtest/gtest.h>

#include <regex>
#include <span>

#include "workflow/gates/task_judge.h"
#include "workflow/gates/testing_evidence_c0_c4.h"
#include "workflow/gates/testing_mutate.h"
#include "workflow/testing_task.h"
#include "workflow/verify.h"

namespace tare::workflow {
namespace {

// Fields whose change is harmless by design, by gate and place ("*": any index or name). A change
// of kind `value` only: taking one away is refused everywhere.
struct Harmless {
  const char* place;
  const char* why;
};
constexpr Harmless kHarmless[] = {
    {"C5/decisions/choices/*/where", "a name of the place, for people"},
    {"C5/paths/rollout/sequences/0/bits/1", "the masked token: its logprob is in no comparison"},
    {"C8/loop/versions/*/paths/*/sequences/0/bits/1", "the masked token, as in C5"},
    {"C10/loop/versions/*/paths/*/sequences/0/bits/1", "the masked token, as in C5"},
    {"C6/modules/*/rationale", "free text"},
    {"C7/layers/*/*/where", "a name of the case, for people"},
    {"C7/layers/operator/*/quantities/*/name", "a name of the gradient, for people"},
    {"C7/layers/module/*/quantities/*/name", "a name of the gradient, for people"},
    {"C7/layers/*/*/quantities/*/worst/index",
     "a place; the two words that stand there are judged"},
    {"C7/step/*/*/worst/index", "a place; the two words that stand there are judged"},
    {"C7/code/*/*", "names of object files; that none is shared and the planted ulp decide"},
    {"C7/perturbation/production_*", "two digests that must differ, and still do"},
    {"C8/loop/updates/0/moments_before", "the open end of the chain of moments"},
    {"C8/loop/updates/1/moments_after", "the open end of the chain of moments"},
    {"C10/loop/updates/0/moments_before", "the open end of the chain of moments"},
    {"C10/loop/updates/1/moments_after", "the open end of the chain of moments"},
    {"C8/loop/versions/*/questions/*/advantages/*",
     "its last bit: the epsilon of the normalisation is not recorded"},
    {"C10/loop/versions/*/questions/*/advantages/*",
     "its last bit: the epsilon of the normalisation is not recorded"},
    {"C9/reference/name", "a name of the reference recipe, for people"},
    {"C10/kernels/1/source", "the path of a kernel that was there before, inside a pinned commit"},
};

// The same for taking away an entry of a list of several.
constexpr Harmless kHarmlessRemovals[] = {
    {"C7/code/production/*", "one name of several object files"},
    {"C7/sft/required_by/0", "the control ran, so nothing is asked that was not done"},
    {"C10/kernels/1/arms/0", "that a kernel runs in BI=0 too asks nothing of it"},
};

bool IsHarmless(const std::string& place, std::span<const Harmless> list = kHarmless) {
  for (const Harmless& h : list) {
    std::string pattern = h.place;
    for (size_t at = 0; (at = pattern.find('*', at)) != std::string::npos; at += 5)
      pattern.replace(at, 1, "[^/]*");
    if (std::regex_match(place, std::regex(pattern))) return true;
  }
  return false;
}

struct Leaf {
  std::string pointer;  // JSON pointer inside the document
  std::string shape;    // the same with indices as "*"
};
void Leaves(const Json& value, const std::string& pointer, const std::string& shape,
            std::vector<Leaf>* out) {
  if (value.is_object() && !value.empty()) {
    for (const auto& [key, item] : value.items()) {
      std::string escaped = key;
      for (size_t at = 0; (at = escaped.find('/', at)) != std::string::npos; at += 2)
        escaped.replace(at, 1, "~1");
      Leaves(item, pointer + "/" + escaped, shape + "/" + escaped, out);
    }
  } else if (value.is_array() && !value.empty()) {
    for (size_t i = 0; i < value.size(); ++i)
      Leaves(value[i], fmt::format("{}/{}", pointer, i), shape + "/*", out);
  } else {
    out->push_back({pointer, shape});
  }
}

// Another value of the same kind, so that the form alone gives nothing away.
void Corrupt(Json* value) {
  if (value->is_boolean()) {
    *value = !value->get<bool>();
  } else if (value->is_number_float()) {
    *value = value->get<double>() + 0.25;
  } else if (value->is_number()) {
    *value = value->get<int64_t>() + 1;
  } else if (value->is_null()) {
    *value = H("instead of null");
  } else if (value->is_string()) {
    std::string text = value->get<std::string>();
    static const std::regex kHexEnd("(sha256:|0x)?[0-9a-f]{8,}");
    if (std::regex_match(text, kHexEnd)) {
      text.back() = text.back() == '0' ? '1' : '0';
    } else if (std::regex_match(text, std::regex("[0-9]+"))) {
      text = std::to_string(std::stoll(text) + 1);
    } else if (text.ends_with("Z") && text.find('T') != std::string::npos) {
      text[text.size() - 2] = text[text.size() - 2] == '0' ? '1' : '0';
    } else {
      text += "x";
    }
    *value = text;
  } else {
    *value = Json::array({"x"});  // an empty list or object
  }
}

void Remove(Json* doc, const std::string& pointer) {
  const Json::json_pointer at(pointer);
  Json& parent = (*doc)[at.parent_pointer()];
  if (parent.is_array()) {
    parent.erase(std::stoul(at.back()));
  } else {
    parent.erase(at.back());
  }
}

// The documents of C0 to C4 with this task's subject.
Json Earlier(const std::string& gate) {
  std::string text = HonestEvidence(gate).dump();
  const Json theirs = HonestEvidence("C0").at("subject"), ours = HonestSubject();
  for (const auto& [key, value] : theirs.items()) {
    const std::string from = value.get<std::string>(), to = ours.at(key).get<std::string>();
    if (key == "model") continue;
    for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
      text.replace(at, from.size(), to);
  }
  Json doc = *ParseJson(text);
  doc["subject"] = ours;
  return doc;
}

Conclusion PassWith(const GateJudgement& judged) {
  Conclusion c;
  c.verdict = Verdict::kPass;
  auto scope = Scope::FromJson(judged.scope.at("covers"));
  EXPECT_TRUE(scope.ok()) << judged.gate << ": " << scope.status().ToString();
  if (scope.ok()) c.scope = *scope;
  return c;
}

// Changes the document of one gate just before it is recorded.
using Change = std::function<void(const std::string& gate, Json* doc)>;

class Builder {
 public:
  Builder(TestEnv* env, const std::string& dir, const Change& change)
      : env_(env), dir_(dir), change_(change) {}

  void Build() {
    std::string toml = TestToml();
    task_ = InitTask(env_, dir_, toml);
    Approve(task_.get(), "task", "bob", kBob, true);
    for (const char* gate : {"C0", "C1", "C2", "C3", "C4"}) Record(gate, Earlier(gate));
    Approve(task_.get(), "C1", "carol", kCarol, false);
    Record("C5", HonestC5());
    Record("C6", HonestC6());
    const Json c7 = HonestC7();
    const Json evaluation = c7.at("sft").at("control").at("evaluation");
    Raw("C7", EvidenceKind::kE7, std::string(kToleranceName),
        Json{{"tolerances", c7.at("tolerances")},
             {"evaluation",
              {{"declared", evaluation.at("declared")},
               {"margin_ppm", evaluation.at("margin_ppm")}}}}
            .dump());
    Record("C7", c7);
    Record("C8", HonestC8());
    for (int i = 1; i <= 2; ++i) {
      const std::string text = fmt::format("{{\"stage\":{},\"mismatches\":0}}\n", i);
      Raw("C9", EvidenceKind::kE8, fmt::format("stage-{}.json", i), text);
      refs_[fmt::format("stage {}", i)].sha256 = H(text);
    }
    Approve(task_.get(), "C9", "bob", kBob, true);
    Record("C9", HonestC9(refs_));
    Record("C10", HonestC10(refs_));
    EXPECT_TRUE(task_->WriteIndexes().ok());
    task_.reset();
  }

 private:
  void Raw(const std::string& step, EvidenceKind kind, const std::string& name,
           const std::string& bytes) {
    RunSpec spec;
    spec.step = step;
    spec.kind = kind;
    spec.raw = {{name, bytes}};
    spec.conclusion.reset();
    AddRun(task_.get(), spec);
  }

  void Record(const std::string& gate, Json doc) {
    const GateJudgement honest = FindJudge(gate)(doc);
    EXPECT_EQ(honest.verdict, Verdict::kPass) << honest.ToJson().dump(1);
    change_(gate, &doc);
    const GateJudgement judged = FindJudge(gate)(doc);
    RunSpec spec;
    spec.step = gate;
    spec.kind = gate == "C10" || gate == "C8" || gate == "C9" ? EvidenceKind::kE8
                : gate == "C5"                                ? EvidenceKind::kE6
                : gate == "C6" || gate == "C7"                ? EvidenceKind::kE7
                                                              : EvidenceKind::kE5;
    const std::string text = doc.dump() + "\n";
    spec.raw = {{std::string(kEvidenceName), text}};
    spec.conclusion = PassWith(judged.verdict == Verdict::kPass ? judged : honest);
    AddRun(task_.get(), spec);
    const RunRecord& run = task_->state().runs.back();
    refs_[gate] = {H(text), run.actor, run.finished};
  }

  TestEnv* env_;
  std::string dir_;
  const Change& change_;
  std::unique_ptr<Task> task_;
  HonestRefs refs_;
};

std::string Explain(const TaskJudgement& judged) {
  std::string out;
  const auto add = [&](const GateFinding& f) {
    if (f.verdict != Verdict::kPass) out += fmt::format("{} {}: {}\n", f.row, f.reason, f.detail);
  };
  for (const GateFinding& f : judged.findings) add(f);
  for (const auto& [gate, j] : judged.gates) {
    for (const GateFinding& f : j.findings) add(f);
  }
  return out;
}

// Everything that JudgeTask reads of the honest task, for judging without a disk.
struct Honest {
  std::map<std::string, Json> docs;
  LedgerFacts facts;
};
const Honest& TheHonestTask() {
  static const Honest* honest = [] {
    auto* out = new Honest;
    HonestRefs refs;
    const auto add = [&](const std::string& gate, Json doc) {
      const GateJudgement judged = FindJudge(gate)(doc);
      out->facts.evidence[gate] = {H(doc.dump()),          "ann",
                                   "2026-01-02T03:04:05Z", std::string(VerdictName(judged.verdict)),
                                   judged.reason,          judged.scope.at("covers")};
      refs[gate] = {H(doc.dump())};
      out->facts.artifacts.insert(H(doc.dump()));
      out->docs[gate] = std::move(doc);
    };
    for (const char* gate : {"C1", "C3", "C4"}) add(gate, Earlier(gate));
    add("C5", HonestC5());
    add("C6", HonestC6());
    add("C7", HonestC7());
    add("C8", HonestC8());
    for (int i = 1; i <= 2; ++i)
      out->facts.artifacts.insert(RefOf(refs, fmt::format("stage {}", i)).sha256);
    add("C9", HonestC9(refs));
    add("C10", HonestC10(refs));
    out->facts.confirmed_by = {{"C1", "carol"}, {"C9", "bob"}};
    out->facts.requester = "ann";
    const Json c7 = out->docs.at("C7"), evaluation = c7.at("sft").at("control").at("evaluation");
    out->facts.tolerances = Json{
        {"tolerances", c7.at("tolerances")},
        {"evaluation",
         {{"declared", evaluation.at("declared")}, {"margin_ppm", evaluation.at("margin_ppm")}}}};
    return out;
  }();
  return *honest;
}

// The verdict on the honest task with one document changed, sealed again. The conclusion is the one
// that a forger would write: what the judge says of the document, and a pass where it only waits
// for a person, since the ledger holds the sign-offs.
Verdict Forged(const std::string& gate, const Json& doc, std::string* why) {
  const GateJudgement alone = FindJudge(gate)(doc);
  if (alone.verdict != Verdict::kPass && alone.verdict != Verdict::kWaitingHuman) {
    *why = alone.reason;
    return alone.verdict;
  }
  Honest forged = TheHonestTask();
  forged.docs[gate] = doc;
  forged.facts.evidence[gate].scope = alone.scope.at("covers");
  const TaskJudgement judged = JudgeDocuments(forged.docs, forged.facts);
  *why = judged.reason;
  return judged.verdict;
}

const std::vector<std::string> kGates = {"C5", "C6", "C7", "C8", "C9", "C10"};

// Every field, or `per_shape` of each shape ("/paths/actor/sequences/*/bits/*").
struct Tally {
  int values = 0, removals = 0, harmless = 0;
  std::vector<std::string> passed;
};
Tally Sweep(size_t per_shape) {
  Tally tally;
  for (const std::string& gate : kGates) {
    const Json& honest = TheHonestTask().docs.at(gate);
    std::vector<Leaf> fields;
    Leaves(honest, "", "", &fields);
    std::map<std::string, size_t> seen;
    for (const Leaf& field : fields) {
      if (seen[field.shape]++ >= per_shape) continue;
      std::string why;
      Json changed = honest;
      Corrupt(&changed[Json::json_pointer(field.pointer)]);
      if (IsHarmless(gate + field.pointer)) {
        ++tally.harmless;
        EXPECT_EQ(Forged(gate, changed, &why), Verdict::kPass)
            << gate << field.pointer << " is listed as harmless and gives " << why;
      } else {
        ++tally.values;
        if (Forged(gate, changed, &why) == Verdict::kPass)
          tally.passed.push_back("value " + gate + field.pointer);
      }
      Json removed = honest;
      Remove(&removed, field.pointer);
      if (IsHarmless(gate + field.pointer, kHarmlessRemovals)) {
        ++tally.harmless;
        EXPECT_EQ(Forged(gate, removed, &why), Verdict::kPass)
            << gate << field.pointer << " may be taken away, and gives " << why;
        continue;
      }
      ++tally.removals;
      if (Forged(gate, removed, &why) == Verdict::kPass)
        tally.passed.push_back("removal " + gate + field.pointer);
    }
  }
  return tally;
}

TEST(BundleTest, TheHonestTaskPasses) {
  const TaskJudgement judged = JudgeDocuments(TheHonestTask().docs, TheHonestTask().facts);
  EXPECT_EQ(judged.verdict, Verdict::kPass) << Explain(judged);
  const Acceptances& a = judged.acceptances;
  EXPECT_EQ(a.forward, Verdict::kPass);
  EXPECT_EQ(a.backward, Verdict::kPass);
  EXPECT_EQ(a.quality, Verdict::kPass);
  EXPECT_EQ(a.performance, Verdict::kPass);
}

// The same document with the members of every object the other way round.
Json Turned(const Json& value) {
  Json out = value;
  if (value.is_object()) {
    out = Json::object();
    for (auto it = value.rbegin(); it != value.rend(); ++it) out[it.key()] = Turned(it.value());
  } else if (value.is_array()) {
    for (Json& element : out) element = Turned(element);
  }
  return out;
}

// Collectors write C8's recipe as it was given and C9's sorted: each document against the others,
// and against the ledger, with its members in another order.
TEST(BundleTest, TheOrderOfMembersMeansNothing) {
  for (const auto& [gate, doc] : TheHonestTask().docs) {
    std::map<std::string, Json> docs = TheHonestTask().docs;
    docs[gate] = Turned(doc);
    const TaskJudgement judged = JudgeDocuments(docs, TheHonestTask().facts);
    EXPECT_EQ(judged.verdict, Verdict::kPass) << gate << "\n" << Explain(judged);
  }
}

TEST(BundleTest, OneForgedFieldSealedAgainNeverPasses) {
  const Tally tally = Sweep(2);
  fmt::print("{} values and {} removals forged and sealed again, {} harmless by design\n",
             tally.values, tally.removals, tally.harmless);
  EXPECT_GE(tally.values + tally.removals, 500);
  EXPECT_TRUE(tally.passed.empty()) << fmt::format("{}", fmt::join(tally.passed, "\n"));
}

TEST(BundleTest, SlowEveryFieldSealedAgainNeverPasses) {
  const Tally tally = Sweep(SIZE_MAX);
  fmt::print("{} values and {} removals forged and sealed again, {} harmless by design\n",
             tally.values, tally.removals, tally.harmless);
  EXPECT_TRUE(tally.passed.empty()) << fmt::format("{}", fmt::join(tally.passed, "\n"));
}

// The same in a real ledger: the directory is made anew around the forged document, so that digest,
// sidecar, chain and sign-offs are right.
int SealedInLedgers(size_t stride) {
  int forged = 0;
  for (const std::string& gate : kGates) {
    std::vector<Leaf> fields;
    Leaves(TheHonestTask().docs.at(gate), "", "", &fields);
    std::map<std::string, size_t> seen;
    size_t number = 0;
    for (const Leaf& field : fields) {
      if (seen[field.shape]++ != 0 || IsHarmless(gate + field.pointer)) continue;
      if (number++ % stride != 0) continue;
      TempDir temp;
      TestEnv env;
      const Change change = [&](const std::string& at, Json* doc) {
        if (at == gate) Corrupt(&(*doc)[Json::json_pointer(field.pointer)]);
      };
      Builder(&env, temp / "task", change).Build();
      const auto judged = JudgeTask(&env, temp / "task");
      EXPECT_TRUE(judged.ok()) << judged.status().ToString();
      if (!judged.ok()) continue;
      ++forged;
      EXPECT_NE(judged->verdict, Verdict::kPass) << gate << field.pointer;
      // The ledger itself holds: what gives it away is its meaning.
      for (const GateFinding& f : judged->findings) EXPECT_NE(f.row, "ledger") << f.detail;
    }
  }
  return forged;
}

TEST(BundleTest, AForgedLedgerHoldsAndIsRefusedForItsMeaning) { EXPECT_GE(SealedInLedgers(40), 8); }

TEST(BundleTest, SlowForgedLedgersAreRefusedForTheirMeaning) {
  const int forged = SealedInLedgers(1);
  fmt::print("{} ledgers forged and sealed again\n", forged);
  EXPECT_GE(forged, 500);
}

TEST(BundleTest, AFieldChangedWithoutSealingIsSeen) {
  TempDir temp;
  TestEnv env;
  const std::string dir = temp / "task";
  Builder(&env, dir, [](const std::string&, Json*) {}).Build();
  const auto before = JudgeTask(&env, dir);
  ASSERT_TRUE(before.ok()) << before.status().ToString();
  ASSERT_EQ(before->verdict, Verdict::kPass) << Explain(*before);
  int changed = 0, seen = 0;
  for (const TreeEntry& entry : *ListTree(&env, dir)) {
    const size_t slash = entry.path.rfind('/');
    if (slash == std::string::npos || entry.path.substr(slash + 1) != kEvidenceName) continue;
    const std::string path = dir + "/" + entry.path, honest = *env.ReadFile(path);
    const Json doc = *ParseJson(honest);
    std::vector<Leaf> fields;
    Leaves(doc, "", "", &fields);
    std::map<std::string, size_t> of_shape;
    for (const Leaf& field : fields) {
      if (of_shape[field.shape]++ != 0) continue;
      Json forged = doc;
      Corrupt(&forged[Json::json_pointer(field.pointer)]);
      ASSERT_TRUE(env.WriteFileAtomic(path, forged.dump() + "\n").ok());
      const auto judged = JudgeTask(&env, dir);
      ASSERT_TRUE(judged.ok());
      ++changed;
      seen += judged->verdict == Verdict::kFail && judged->reason == reason::kArtifactChanged;
    }
    ASSERT_TRUE(env.WriteFileAtomic(path, honest).ok());
  }
  fmt::print("{} fields changed without sealing, {} seen by their digest\n", changed, seen);
  EXPECT_GE(changed, 500);
  EXPECT_EQ(seen, changed);
}

// GEN-07: forward, backward, quality and performance apart; no combination makes one green. BWD-01:
// forward parity alone leaves the others not covered.
TEST(BundleTest, FourAcceptancesStayApart) {
  const Honest& honest = TheHonestTask();
  for (int mask = 0; mask < 16; ++mask) {
    std::map<std::string, Json> docs;
    LedgerFacts facts = honest.facts;
    if (mask & 1) {
      docs["C5"] = honest.docs.at("C5");
      docs["C8"] = honest.docs.at("C8");
    }
    // Quality stands in C7: without it the document says that it is not covered.
    if (mask & 6) {
      docs["C7"] = honest.docs.at("C7");
      if (!(mask & 4)) {
        docs["C7"]["sft"]["control"] = nullptr;
        docs["C7"]["quality"] = "not covered";
        docs["C7"]["quality_evidence"] = "none";
        docs["C7"]["order"] = {"tolerances", "operator", "module", "model", "step"};
      }
      if (mask & 2) docs["C6"] = honest.docs.at("C6");
    }
    if (mask & 8) docs["C10"] = honest.docs.at("C10");
    const TaskJudgement judged = JudgeDocuments(docs, facts);
    const Acceptances& a = judged.acceptances;
    EXPECT_EQ(a.forward == Verdict::kPass, (mask & 1) != 0) << mask;
    EXPECT_EQ(a.backward == Verdict::kPass, (mask & 2) != 0) << mask;
    EXPECT_EQ(a.quality == Verdict::kPass, (mask & 4) != 0) << mask;
    EXPECT_EQ(a.performance == Verdict::kPass, (mask & 8) != 0) << mask;
    for (const auto& [bit, verdict] : {std::pair<int, Verdict>{1, a.forward},
                                       {2, a.backward},
                                       {4, a.quality},
                                       {8, a.performance}}) {
      if (!(mask & (bit == 2 ? 6 : bit))) {
        EXPECT_EQ(verdict, Verdict::kNotCovered) << mask;
      }
    }
    const Json json = a.ToJson();
    EXPECT_EQ(json.size(), 4u);
    for (const auto& [name, state] : json.items()) EXPECT_TRUE(state.contains("verdict")) << name;
  }
}

}  // namespace
}  // namespace tare::workflow
