// Tasks, runs, artifacts, evidence, staleness and ledger. Rows GEN-07..GEN-21, GEN-31, DOC-07,
// DOC-11, CHEAP-13, T-25.

#include "workflow/task.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/reasons.h"
#include "workflow/index.h"
#include "workflow/ledger.h"
#include "workflow/process.h"
#include "workflow/testing_task.h"
#include "workflow/verify.h"

namespace tare::workflow {
namespace {

TEST(Task, InitOnceIntoAFolderOfItsOwn) {  // GEN-13
  TempDir dir;
  TestEnv env;
  ASSERT_NE(InitTask(&env, dir / "t"), nullptr);
  InitReport report;
  auto again = Task::Init(&env, dir / "t", "ann", {}, &report);
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.status().code(), Code::kAlreadyExists);
  std::filesystem::create_directory(dir / "other");
  ASSERT_TRUE(env.WriteFileAtomic(dir / "other/notes.txt", "x").ok());
  auto occupied = Task::Init(&env, dir / "other", "ann", {}, &report);
  ASSERT_FALSE(occupied.ok());
  EXPECT_NE(occupied.status().message().find("notes.txt"), std::string::npos);
  // An init that a crash cut short before its first event may be repeated.
  std::filesystem::create_directory(dir / "cut");
  ASSERT_TRUE(env.WriteFileAtomic(dir / "cut/events.jsonl", "{\"seq\":0,").ok());
  auto resumed = Task::Init(&env, dir / "cut", "ann", {}, &report);
  ASSERT_TRUE(resumed.ok()) << resumed.status().ToString();
  resumed->reset();
  EXPECT_EQ(VerifyTask(&env, dir / "cut")->verdict, Verdict::kPass);
}

TEST(Task, RebuiltStateIsTheLiveState) {  // GEN-14
  TempDir dir;
  TestEnv env;
  BuildSmallTask(&env, dir / "t");
  auto task = Task::Open(&env, dir / "t", "ann");
  ASSERT_TRUE(task.ok());
  RunSpec spec;
  AddRun(task->get(), spec);
  const std::string live = (*task)->state().ToJson().dump();
  task->reset();
  auto view = ReadTask(&env, dir / "t");
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->state.ToJson().dump(), live);
  EXPECT_TRUE(view->state.problems.empty());
}

TEST(Task, ARunLackingAnyOfTheFourLinksSatisfiesNothing) {  // GEN-16
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  {
    Staleness staleness(task->state());
    const std::string id = AddRun(task.get(), {});
    Staleness after(task->state());
    EXPECT_EQ(AssessRun(task->state(), &after, *task->state().FindRun(id)).verdict, Verdict::kPass);
  }
  for (const char* role : {"config", "identity", "raw", "conclusion"}) {
    RunSpec spec;
    spec.skip = role;
    const std::string id = AddRun(task.get(), spec);
    Staleness staleness(task->state());
    const RunRecord& run = *task->state().FindRun(id);
    const EvidenceStatus status = AssessRun(task->state(), &staleness, run);
    EXPECT_EQ(status.verdict, Verdict::kInconclusive) << role;
    EXPECT_EQ(status.reason, reason::kRunIncomplete) << role;
    EXPECT_EQ(task->state().MissingLinks(run), std::vector<std::string>{role});
  }
}

TEST(Task, NothingIsAddedLateTwiceOrElsewhere) {  // GEN-19
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  const std::string id = AddRun(task.get(), {});
  EXPECT_FALSE(task->AddBytes(id, "late.txt", Role::kMaterial, "x").ok());
  RunStart start;
  start.step = "C5";
  start.kind = EvidenceKind::kE6;
  const std::string open = *task->StartRun(start);
  EXPECT_TRUE(task->AddBytes(open, "a.txt", Role::kMaterial, "x").ok());
  EXPECT_EQ(task->AddBytes(open, "a.txt", Role::kMaterial, "y").code(), Code::kAlreadyExists);
  for (const char* name : {"../../x", "/etc/x", "x.intoto.jsonl", "heartbeat", "a\nb", ""}) {
    EXPECT_FALSE(task->AddBytes(open, name, Role::kMaterial, "x").ok()) << name;
  }
  // A link in place of a folder leads nowhere.
  std::filesystem::create_directory_symlink(dir.path(), dir / fmt::format("t/C5/{}/out", open));
  EXPECT_FALSE(task->AddBytes(open, "out/x", Role::kMaterial, "x").ok());
  EXPECT_FALSE(env.Exists(dir / "x"));
  start.step = "C12";
  EXPECT_FALSE(task->StartRun(start).ok());
}

TEST(Task, EmptyRawResultsAreRefused) {  // CHEAP-13
  const auto safetensors = [](const std::string& header, const std::string& data) {
    std::string out(8, '\0');
    out[0] = static_cast<char>(header.size());
    return out + header + data;
  };
  const std::string header =
      R"({"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"loss_mask":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}})";
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"a.bin", ""},
      {"a.jsonl", "\n \n"},
      {"a.json", "[]"},
      {"a.json", "{}\n"},
      {"a.bin", std::string(100, '\0')},
      {"a.safetensors", "1234"},
      {"a.safetensors", safetensors(header, "")},
      {"a.safetensors", safetensors(header, std::string(6, '\0'))},
      {"a.safetensors", safetensors(header, std::string("\0\0\x80\x3f\0\0", 6))},
  };
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  RunStart start;
  start.step = "C5";
  start.kind = EvidenceKind::kE6;
  const std::string open = *task->StartRun(start);
  for (const auto& [name, bytes] : bad) {
    const Status status = task->AddBytes(open, name, Role::kRaw, bytes);
    EXPECT_FALSE(status.ok()) << name;
    EXPECT_NE(status.message().find("empty-artifact"), std::string::npos) << status.message();
  }
  EXPECT_TRUE(task->AddBytes(open, "a.safetensors", Role::kRaw,
                             safetensors(header, std::string("\0\0\x80\x3f\1\0", 6)))
                  .ok());
}

TEST(Evidence, TenKindsThatNeverStandInForEachOther) {  // DOC-07
  ASSERT_EQ(AllEvidenceKinds().size(), 10u);
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  const auto accepted = [&](EvidenceKind wanted, const RunRecord& run) {
    Staleness s(task->state());
    const State& state = task->state();
    switch (wanted) {
      case EvidenceKind::kE1:
        return Evidence<EvidenceKind::kE1>::From(state, &s, run).ok();
      case EvidenceKind::kE2:
        return Evidence<EvidenceKind::kE2>::From(state, &s, run).ok();
      case EvidenceKind::kE3:
        return Evidence<EvidenceKind::kE3>::From(state, &s, run).ok();
      case EvidenceKind::kE4:
        return Evidence<EvidenceKind::kE4>::From(state, &s, run).ok();
      case EvidenceKind::kE5:
        return Evidence<EvidenceKind::kE5>::From(state, &s, run).ok();
      case EvidenceKind::kE6:
        return Evidence<EvidenceKind::kE6>::From(state, &s, run).ok();
      case EvidenceKind::kE7:
        return Evidence<EvidenceKind::kE7>::From(state, &s, run).ok();
      case EvidenceKind::kE8:
        return Evidence<EvidenceKind::kE8>::From(state, &s, run).ok();
      case EvidenceKind::kE9:
        return Evidence<EvidenceKind::kE9>::From(state, &s, run).ok();
      case EvidenceKind::kE10:
        return Evidence<EvidenceKind::kE10>::From(state, &s, run).ok();
    }
    return false;
  };
  for (const EvidenceKind made : AllEvidenceKinds()) {
    RunSpec spec;
    spec.kind = made;
    const std::string id = AddRun(task.get(), spec);
    for (const EvidenceKind wanted : AllEvidenceKinds()) {
      EXPECT_EQ(accepted(wanted, *task->state().FindRun(id)), made == wanted);
    }
  }
}

TEST(Evidence, ALoopOrPerformanceNeedsANormalExit) {
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  const auto verdict = [&](EvidenceKind kind, std::optional<int64_t> exit_code, bool elsewhere) {
    RunSpec spec;
    spec.kind = kind;
    spec.exit_code = exit_code;
    if (elsewhere) spec.command.clear();
    const std::string id = AddRun(task.get(), spec);
    Staleness s(task->state());
    return AssessRun(task->state(), &s, *task->state().FindRun(id)).verdict;
  };
  EXPECT_EQ(verdict(EvidenceKind::kE8, 0, false), Verdict::kPass);
  EXPECT_EQ(verdict(EvidenceKind::kE8, 1, false), Verdict::kInconclusive);
  EXPECT_EQ(verdict(EvidenceKind::kE10, std::nullopt, true), Verdict::kInconclusive);
  EXPECT_EQ(verdict(EvidenceKind::kE10, 0, true), Verdict::kPass);
  EXPECT_EQ(verdict(EvidenceKind::kE6, std::nullopt, true), Verdict::kPass);
  EXPECT_EQ(verdict(EvidenceKind::kE6, 139, false), Verdict::kInconclusive);
}

TEST(Scope, AnswersPassOnlyInsideARecordedScope) {  // GEN-31
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  RunSpec spec;
  spec.step = "C3";
  spec.kind = EvidenceKind::kE5;
  Conclusion c = PassConclusion();
  c.scope = *Scope::FromJson(*ParseJson(
      R"([{"shape":["b1"],"topology":["1"],"dtype":["bf16"],"model":["m"],"path":["decode"]},
          {"shape":["b64"],"topology":["1"],"dtype":["fp8"],"model":["m"],"path":["decode"]}])"));
  spec.conclusion = c;
  AddRun(task.get(), spec);
  const auto ask = [&](ScopePoint p, EvidenceKind kind = EvidenceKind::kE5,
                       const char* step = "C3") {
    Staleness s(task->state());
    return QueryScope(task->state(), &s, step, kind, p).verdict;
  };
  EXPECT_EQ(ask({"b1", "1", "bf16", "m", "decode"}), Verdict::kPass);
  EXPECT_EQ(ask({"b64", "1", "fp8", "m", "decode"}), Verdict::kPass);
  EXPECT_EQ(ask({"b64", "1", "bf16", "m", "decode"}), Verdict::kNotCovered);  // never run together
  EXPECT_EQ(ask({"b2", "1", "bf16", "m", "decode"}), Verdict::kNotCovered);
  EXPECT_EQ(ask({"b1", "tp2", "bf16", "m", "decode"}), Verdict::kNotCovered);
  EXPECT_EQ(ask({"b1", "1", "bf16", "other", "decode"}), Verdict::kNotCovered);
  EXPECT_EQ(ask({"b1", "1", "bf16", "m", ""}), Verdict::kNotCovered);
  EXPECT_EQ(ask({"b1", "1", "bf16", "m", "decode"}, EvidenceKind::kE6), Verdict::kNotCovered);
  EXPECT_EQ(ask({"b1", "1", "bf16", "m", "decode"}, EvidenceKind::kE5, "C4"), Verdict::kNotCovered);
  EXPECT_FALSE(Conclusion::FromJson(
                   {{"schema", "tare-conclusion-1"}, {"verdict", "pass"}, {"scope", Json::array()}})
                   .ok());
  for (const char* bad : {"shape=b1", "shape=;topology=1;dtype=x;model=m;path=p", "x=1", "shape",
                          "shape=a;shape=b;topology=1;dtype=x;model=m;path=p"}) {
    EXPECT_FALSE(Scope::FromText(bad).ok()) << bad;
  }
}

TEST(Staleness, NamesTheInputAndIsTransitiveWithEarlyCutoff) {  // GEN-12, GEN-21, A-25
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  const auto code = [](char c) {
    return Dependency{DependencyType::kCode, "src/attention.cu", std::string(64, c)};
  };
  const Dependency docs{DependencyType::kCode, "docs/x.md", std::string(64, '1')};
  const auto artifact = [&](const std::string& run) {
    const ArtifactRecord* raw = task->state().ArtifactOf(*task->state().FindRun(run), Role::kRaw);
    return Dependency{DependencyType::kArtifact, "C2/raw.jsonl", raw->sha256};
  };
  const auto stale = [&](const std::string& id) {
    Staleness s(task->state());
    return s.Of(*task->state().FindRun(id));
  };
  const auto observe = [&](std::vector<Dependency> d, std::vector<std::string> unknown = {}) {
    EventDraft draft{
        task->state().task_id,
        "observed",
        {{"candidate", ""}, {"dependencies", DependenciesToJson(d)}, {"unknown", unknown}}};
    ASSERT_TRUE(task->Append(draft).ok());
  };
  RunSpec upstream;
  upstream.step = "C2";
  upstream.dependencies = {code('a')};
  const std::string r1 = AddRun(task.get(), upstream);
  RunSpec downstream;
  downstream.step = "C5";
  downstream.dependencies = {artifact(r1)};
  const std::string r2 = AddRun(task.get(), downstream);
  RunSpec apart;
  apart.step = "C7";
  apart.dependencies = {docs};
  const std::string r3 = AddRun(task.get(), apart);
  EXPECT_FALSE(stale(r1));
  EXPECT_FALSE(stale(r2));

  observe({code('b')});
  ASSERT_TRUE(stale(r1));
  EXPECT_EQ(stale(r1)->was, std::string(64, 'a'));
  EXPECT_EQ(stale(r1)->now, std::string(64, 'b'));
  ASSERT_TRUE(stale(r2));  // through r1
  EXPECT_EQ(stale(r2)->via, (std::vector<std::string>{r2, r1}));
  EXPECT_NE(stale(r2)->ToString().find("src/attention.cu"), std::string::npos);
  EXPECT_FALSE(stale(r3));

  // Made again under the new code, with the same bytes: nothing after it is stale.
  upstream.dependencies = {code('b')};
  const std::string r4 = AddRun(task.get(), upstream);
  EXPECT_FALSE(stale(r4));
  EXPECT_FALSE(stale(r2));
  // With other bytes it is, and the mark says so.
  observe({code('d')});
  upstream.dependencies = {code('d')};
  upstream.raw = {{"raw.jsonl", "{\"logprob\":\"00000001\"}\n"}};
  AddRun(task.get(), upstream);
  ASSERT_TRUE(stale(r2));
  EXPECT_EQ(stale(r2)->type, DependencyType::kArtifact);
  EXPECT_FALSE(stale(r2)->now.empty());
  // Digests match again: fresh again.
  observe({code('a')});
  EXPECT_FALSE(stale(r1));
  EXPECT_FALSE(stale(r2));
  // What can no longer be determined counts as changed, and so does what was never declared.
  observe({}, {"code:docs/x.md"});
  ASSERT_TRUE(stale(r3));
  EXPECT_TRUE(stale(r3)->now.empty());
  RunSpec silent;
  silent.dependencies.clear();
  EXPECT_TRUE(stale(AddRun(task.get(), silent)));
}

TEST(Staleness, ConfigKeysByClass) {  // GEN-12, STOP-13
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  RunSpec spec;
  spec.step = "C5";
  spec.dependencies = task->state().config()->config.SemanticDependencies();
  const std::string id = AddRun(task.get(), spec);
  const auto amend = [&](const std::string& from, const std::string& to) {
    std::string toml = *env.ReadFile(dir / "t/task.toml");
    const size_t at = toml.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    toml.replace(at, from.size(), to);
    ASSERT_TRUE(env.WriteFileAtomic(dir / "t/task.toml", toml).ok());
    auto report = task->Amend("test");
    ASSERT_TRUE(report.ok()) << report.status().ToString();
  };
  const auto stale = [&] {
    Staleness s(task->state());
    return s.Of(*task->state().FindRun(id));
  };
  amend("level = \"info\"", "level = \"debug\"");
  amend("output = \"out\"", "output = \"elsewhere\"");
  amend("# The configuration", "# (edited) The configuration");
  EXPECT_FALSE(stale());
  amend("kv_cache = \"bf16\"", "kv_cache = \"e4m3\"");
  ASSERT_TRUE(stale());
  EXPECT_EQ(stale()->name, "precision.kv_cache");
  amend("kv_cache = \"e4m3\"", "kv_cache = \"bf16\"");
  EXPECT_FALSE(stale());
  EXPECT_FALSE(task->Amend("nothing changed").ok());
}

TEST(Staleness, RebuiltImageUnderTheSameTagVoidsOldReceipts) {  // T-25
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  RunSpec spec;
  spec.step = "C5";
  spec.kind = EvidenceKind::kE6;
  spec.dependencies = {{DependencyType::kImage, "registry/tare:latest", std::string(64, '1')}};
  const std::string receipt = AddRun(task.get(), spec);
  RunSpec smoke;  // not reproduced: says nothing about the defect
  smoke.step = "C5";
  smoke.dependencies = {{DependencyType::kImage, "registry/tare:latest", std::string(64, '2')}};
  Conclusion c = FailConclusion("no-difference");
  c.verdict = Verdict::kInconclusive;
  smoke.conclusion = c;
  AddRun(task.get(), smoke);
  Staleness s(task->state());
  const EvidenceStatus status = AssessRun(task->state(), &s, *task->state().FindRun(receipt));
  EXPECT_EQ(status.reason, reason::kStaleEvidence);
  for (const BoardLine& line : Board(task->state(), &s)) {
    if (line.step == "C5" || line.step == "C9") {
      EXPECT_NE(line.verdict, Verdict::kPass);
    }
  }
}

TEST(Ledger, SaysWhatIsKeptLostAndWithdrawnUnderWhichRule) {  // DOC-11
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  const Dependency kernel{DependencyType::kCode, "src/attention.cu", std::string(64, 'a')};
  const Dependency norm{DependencyType::kCode, "src/rmsnorm.cu", std::string(64, 'b')};
  RunSpec a;
  a.candidate = "A";
  a.dependencies = {kernel};
  a.conclusion->inferences = {{"I1", "attention is batch invariant at c=8"}};
  const std::string lost = AddRun(task.get(), a);
  RunSpec b;
  b.candidate = "A";
  b.step = "C3";
  b.dependencies = {norm};
  b.conclusion->inferences = {{"I2", "the norm is exact"}};
  const std::string kept = AddRun(task.get(), b);
  RunSpec c;
  c.candidate = "A";
  c.step = "C5";
  c.dependencies = {{DependencyType::kArtifact, "C1/raw.jsonl",
                     task->state().ArtifactOf(*task->state().FindRun(lost), Role::kRaw)->sha256}};
  const std::string upstream = AddRun(task.get(), c);
  const Dependency changed{DependencyType::kCode, "src/attention.cu", std::string(64, 'd')};
  LedgerChange change = CompareCandidates(task->state(), "A", {changed, norm});
  EXPECT_EQ(change.kept, std::vector<std::string>{kept});
  ASSERT_EQ(change.lost.size(), 2u);
  EXPECT_EQ(change.lost[0].run_id, lost);
  EXPECT_EQ(change.lost[0].rule, "L-CODE");
  EXPECT_EQ(change.lost[1].run_id, upstream);
  EXPECT_EQ(change.lost[1].rule, "L-UPSTREAM");
  ASSERT_EQ(change.withdrawn.size(), 1u);
  EXPECT_EQ(change.withdrawn[0].id, "I1");
  change = CompareCandidates(task->state(), "A", {changed});  // says nothing of the norm
  EXPECT_TRUE(change.kept.empty());
  EXPECT_EQ(change.lost[1].rule, "L-UNKNOWN");
}

TEST(Index, FailedStaysVisibleAndEveryListIsExplicit) {  // GEN-17
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  ASSERT_EQ(Approve(task.get(), "task", "bob", kBob, true).verdict, Verdict::kPass);
  RunSpec bad;
  bad.candidate = "tile-64";
  bad.conclusion = FailConclusion();
  bad.exit_code = 1;
  AddRun(task.get(), bad);
  RunSpec retry = bad;  // the same candidate passes later: it stands in both lists
  retry.conclusion = PassConclusion();
  retry.exit_code = 0;
  AddRun(task.get(), retry);
  RunSpec incomplete;
  incomplete.candidate = "tile-128";
  incomplete.skip = "identity";
  AddRun(task.get(), incomplete);
  const auto lists = [&] {
    Staleness s(task->state());
    return ListsOf(task->state(), &s, "C1");
  };
  StepLists l = lists();
  EXPECT_EQ(l.candidates, std::vector<std::string>{"tile-64"});
  ASSERT_EQ(l.failed.size(), 1u);
  EXPECT_NE(l.failed[0].find("bit-mismatch"), std::string::npos);
  ASSERT_EQ(l.unverified.size(), 1u);
  EXPECT_NE(l.unverified[0].find("run-incomplete"), std::string::npos);
  EXPECT_TRUE(l.human_confirmed.empty());
  Staleness s(task->state());
  EXPECT_NE(RenderStepIndex(task->state(), &s, "C1").find("### Human-confirmed\n\n- none"),
            std::string::npos);
  ASSERT_EQ(Approve(task.get(), "C1", "bob", kBob, true).verdict, Verdict::kPass);
  l = lists();
  EXPECT_EQ(l.human_confirmed, std::vector<std::string>{"tile-64, by bob"});
  EXPECT_TRUE(l.candidates.empty());
  EXPECT_EQ(l.failed.size(), 1u);  // still
  ASSERT_TRUE(task->WriteIndexes().ok());
  task.reset();
  EXPECT_EQ(VerifyTask(&env, dir / "t")->verdict, Verdict::kPass);
  // A hand edit, re-sealed or not, is found.
  std::string page = *env.ReadFile(dir / "t/C1/index.md");
  page.replace(page.find("bit-mismatch"), 12, "flaky-host!!");
  ASSERT_TRUE(env.WriteFileAtomic(dir / "t/C1/index.md", page).ok());
  auto report = VerifyTask(&env, dir / "t");
  EXPECT_EQ(report->verdict, Verdict::kFail);
  EXPECT_EQ(report->findings[0].reason, reason::kGeneratedEdited);
  const std::string body = page.substr(0, page.rfind("\n<!-- generated"));
  auto view = ReadTask(&env, dir / "t");
  ASSERT_TRUE(
      env.WriteFileAtomic(dir / "t/C1/index.md",
                          WithFooter(body, {view->log.scan.lines.size(), view->log.scan.head}))
          .ok());
  EXPECT_EQ(VerifyTask(&env, dir / "t")->findings[0].reason, reason::kGeneratedEdited);
}

// The board's line of a step as the task stands.
BoardLine LineOf(const Task& task, const std::string& step) {
  Staleness staleness(task.state());
  for (const BoardLine& line : Board(task.state(), &staleness)) {
    if (line.step == step) return line;
  }
  return {};
}

TEST(Board, OneReasonForEachClosedStep) {
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  const auto line = [&](const std::string& step) { return LineOf(*task, step); };
  EXPECT_EQ(line("C1").reason, reason::kNoEvidence);
  AddRun(task.get(), {});
  EXPECT_EQ(line("C1").reason, reason::kNoSignoff);
  EXPECT_EQ(line("C1").verdict, Verdict::kWaitingHuman);
  RunSpec c3;
  c3.step = "C3";
  c3.kind = EvidenceKind::kE6;
  AddRun(task.get(), c3);  // DOC-07: another kind is kept and opens nothing
  EXPECT_EQ(line("C3").verdict, Verdict::kRefused);
  EXPECT_EQ(line("C3").reason, reason::kWrongEvidenceKind);
  c3.kind = EvidenceKind::kE5;
  c3.candidate = "tile-64";
  AddRun(task.get(), c3);
  EXPECT_EQ(line("C3").verdict, Verdict::kPass);
  const auto say = [&](const std::string& state) {
    EventDraft word{task->state().task_id,
                    "candidate",
                    {{"name", "tile-64"},
                     {"step", "C3"},
                     {"state", state},
                     {"reason", "wrong on ragged rows"},
                     {"previous", ""},
                     {"identity", Json::array()},
                     {"ledger", Json::object()}}};
    ASSERT_TRUE(task->Append(word).ok());
  };
  say("excluded");
  EXPECT_EQ(line("C3").verdict, Verdict::kInconclusive);
  EXPECT_EQ(line("C3").reason, reason::kCandidateExcluded);
  Staleness now(task->state());
  EXPECT_NE(QueryScope(task->state(), &now, "C3", EvidenceKind::kE5,
                       {"b1", "1", "bf16", "mini", "decode"})
                .verdict,
            Verdict::kPass);
  const std::vector<std::string> candidates = ListsOf(task->state(), &now, "C3").candidates;
  EXPECT_EQ(std::count(candidates.begin(), candidates.end(), "tile-64"), 0);
  say("proposed");  // the latest word counts
  EXPECT_EQ(line("C3").verdict, Verdict::kPass);
  c3.conclusion = FailConclusion();
  c3.exit_code = 1;
  AddRun(task.get(), c3);
  EXPECT_EQ(line("C3").verdict, Verdict::kFail);
  EXPECT_EQ(line("C3").reason, "bit-mismatch");
}

// The entry into the whole model rests on every step before, whatever was recorded for it.
TEST(Board, ALaterStepStaysClosedWhileOneBeforeIsNotOpen) {
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  const auto line = [&](const std::string& step) { return LineOf(*task, step); };
  ASSERT_EQ(Approve(task.get(), "task", "bob", kBob, true).verdict, Verdict::kPass);
  for (const auto& [step, kind] :
       std::vector<std::pair<std::string, EvidenceKind>>{{"C9", EvidenceKind::kE8},
                                                         {"C1", EvidenceKind::kE10},
                                                         {"C3", EvidenceKind::kE5},
                                                         {"C4", EvidenceKind::kE10},
                                                         {"C5", EvidenceKind::kE6},
                                                         {"C6", EvidenceKind::kE7},
                                                         {"C7", EvidenceKind::kE7}}) {
    RunSpec run;
    run.step = step;
    run.kind = kind;
    AddRun(task.get(), run);
  }
  ASSERT_EQ(Approve(task.get(), "C1", "bob", kBob, true).verdict, Verdict::kPass);
  ASSERT_EQ(Approve(task.get(), "C9", "bob", kBob, true).verdict, Verdict::kPass);
  EXPECT_EQ(line("C7").verdict, Verdict::kPass);
  EXPECT_EQ(line("C9").reason, reason::kPrerequisiteOpen);
  EXPECT_EQ(line("C9").detail, "C8 is inconclusive");
  RunSpec loop;
  loop.step = "C8";
  loop.kind = EvidenceKind::kE8;
  AddRun(task.get(), loop);
  EXPECT_EQ(line("C9").verdict, Verdict::kPass);
}

// GEN-16: a link is a file with something in it, whoever wrote the event.
TEST(Task, AnEmptyFileIsNoLink) {
  TempDir dir;
  TestEnv env;
  auto task = InitTask(&env, dir / "t");
  const std::string id = AddRun(task.get(), {});
  ASSERT_TRUE(task->state().MissingLinks(*task->state().FindRun(id)).empty());
  const auto log = ReadLog(&env, dir / "t");
  ASSERT_TRUE(log.ok());
  for (const char* role : {"config", "identity", "raw", "conclusion"}) {
    State state;
    for (const std::string_view line : log->scan.lines) {
      Event event = *ParseEvent(line, false);
      if (event.type == "artifact" && event.data["role"] == role) event.data["bytes"] = 0;
      state.Apply(event);
    }
    ASSERT_TRUE(state.problems.empty());
    EXPECT_EQ(state.MissingLinks(*state.FindRun(id)), std::vector<std::string>{role});
  }
}

TEST(Process, LostAndRunningAreToldApart) {
  TestEnv env;
  TempDir dir;
  RunRecord run;
  const ProcessIdentity self = ThisProcess();
  ASSERT_GT(self.start_ticks, 0u);
  run.host = self.host;
  run.boot_id = self.boot_id;
  run.pid = self.pid;
  run.pid_start = self.start_ticks;
  run.heartbeat_s = 5;
  EXPECT_EQ(CheckLiveness(&env, run, dir.path()).liveness, Liveness::kRunning);
  run.pid_start += 1;  // the pid was given to another process
  EXPECT_EQ(CheckLiveness(&env, run, dir.path()).liveness, Liveness::kLost);
  run.pid_start = self.start_ticks;
  run.boot_id = "another boot";
  EXPECT_EQ(CheckLiveness(&env, run, dir.path()).liveness, Liveness::kLost);
  run.host = "another host";
  EXPECT_EQ(CheckLiveness(&env, run, dir.path()).liveness, Liveness::kLost);
  ASSERT_TRUE(env.WriteFileAtomic(dir / "heartbeat", "x").ok());
  EXPECT_EQ(CheckLiveness(&env, run, dir.path()).liveness, Liveness::kRunning);
  env.now_ns = Env::Real()->NowNs() + 60'000'000'000;
  EXPECT_EQ(CheckLiveness(&env, run, dir.path()).liveness, Liveness::kLost);
  EXPECT_FALSE(ProcessStart(0x7ffffff0).has_value());
}

}  // namespace
}  // namespace tare::workflow
