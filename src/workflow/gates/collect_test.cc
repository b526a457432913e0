// `tare run`: what a gate may rest on, what is recorded, and what reopens. The commands are played
// by a script that prints prepared reports, so that the machine itself is tried here; the real ones
// run in tests/gates_run_test.cc.

#include "workflow/gates/collect.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "workflow/gates/contract_check.h"
#include "workflow/gates/testing_evidence_c0_c4.h"
#include "workflow/index.h"
#include "workflow/testing_task.h"

namespace tare::workflow {
namespace {

class CollectTest : public ::testing::Test {
 protected:
  void SetUp() override {
    { auto task = InitTask(Env::Real(), task_); }
    const Json c0 = HonestC0(), c4 = HonestC4();
    const std::string hash(64, '1');
    Json shapes = {
        {{"types", {"attention.full", "mlp"}}, {"states", {"kv"}}, {"shares", Json::array()}},
        {{"types", {"attention.window", "moe"}},
         {"states", {"kv.window"}},
         {"shares", Json::array()}}};
    subject_ = {{"schema", "tare.inventory/1"},
                {"model", "small"},
                {"source", "models/small"},
                {"weights", hash},
                {"image", "sha256:" + hash},
                {"contracts", hash},
                {"executable_sha256", hash},
                {"commit", "0.1.0"},
                {"hidden", 64},
                {"layers", 2},
                {"vocab", 512},
                {"dtype", "bf16"},
                {"layer_shapes", shapes},
                {"geometry", {{"hidden", "64"}, {"q_heads", "4"}}}};
    inventory_ = subject_;
    for (const char* key : {"tensors", "trace", "rows"}) inventory_[key] = c0[key];
    launches_ = subject_;
    launches_["steady_allocation_bytes"] = 0;
    launches_["profiles"] = Json::array();
    for (const Json& p : c4["profiles"]) {
      Json out = {
          {"id", p["id"]}, {"phase", p["phase"]}, {"tokens", p["tokens"]}, {"chunks", p["chunks"]}};
      out["launches"] = Json::array();
      for (const Json& l : p["launches"]) {
        out["launches"].push_back(Json{{"phase", p["phase"]},
                                       {"op", l["op"]},
                                       {"kernel", "k"},
                                       {"dtypes", "bf16"},
                                       {"count", l["count"]}});
      }
      launches_["profiles"].push_back(out);
    }
    const auto cell = [&](const char* axis, const std::string& condition, const char* counter) {
      Json c = {{"axis", axis}, {"condition", condition}, {"verdict", "pass"},
                {"reason", ""}, {"compared", 32},         {"mismatches", 0},
                {"first", ""},  {"proof", Json::object()}};
      if (counter != nullptr) c["proof"] = {{counter, 100}, {"at_least", 1}};
      invariance_["cells"].push_back(c);
    };
    invariance_ = {{"schema", "tare.invariance/1"},
                   {"model", "small"},
                   {"weights_sha256", hash},
                   {"cells", Json::array()}};
    for (const int size : {2, 4, 8, 16, 32, 64}) {
      cell("batch", fmt::format("{} slot 0", size), "widest_step");
    }
    for (const int size : {1, 15, 16, 17, 37}) {
      cell("chunk", fmt::format("{} of blocks of 16", size), "chunked_runs");
    }
    cell("chunk", "whole prompts", nullptr);
    cell("prefill against decode", "45 tokens", nullptr);
    cell("cache", "cold", nullptr);
    cell("cache", "hot", "prefix_hits");
    cell("cache", "partly hot", "prefix_hits");
    cell("cache", "evicted and reused", "computed_tokens");
    cell("preemption", "blocks run out", "preemptions");
    cell("mixed", "prefill and decode in one step", "mixed_steps");
    cell("order", "reversed", "mixed_steps");
    cell("process", "fresh", nullptr);
    Write();
    // The reports name the script as the executable, as the real ones name the program.
    const std::string self = *HashPath(Env::Real(), dir_ / "tare");
    for (Json* report : {&subject_, &inventory_, &launches_}) (*report)["executable_sha256"] = self;
    Write();
  }

  void Write() {
    Env* env = Env::Real();
    const auto put = [&](const char* name, const Json& json) {
      EXPECT_TRUE(env->WriteFileAtomic(dir_ / name, json.dump(1)).ok());
    };
    put("subject.json", subject_);
    put("inventory.json", inventory_);
    put("launches.json", launches_);
    put("invariance.json", invariance_);
    const std::string script = fmt::format(
        "#!/bin/sh\ncase \"$*\" in\n*--subject*) cat {0}/subject.json;;\n"
        "*--launches*) cat {0}/launches.json;;\ninventory*) cat {0}/inventory.json;;\n"
        "invariance*) cat {0}/invariance.json;;\n*) echo unknown >&2; exit 64;;\nesac\n",
        dir_.path());
    EXPECT_TRUE(env->WriteFileAtomic(dir_ / "tare", script).ok());
    std::filesystem::permissions(dir_ / "tare", std::filesystem::perms::owner_all);
  }

  RunGateReport Run(const std::string& gate) {
    RunGateOptions options;
    options.gate = gate;
    options.task = task_;
    options.model = "models/small";
    options.program = dir_ / "tare";
    auto report = RunGate(Env::Real(), "ann", options);
    EXPECT_TRUE(report.ok()) << gate << ": " << report.status().ToString();
    return report.ok() ? *report : RunGateReport();
  }
  // Board verdicts, "C3 pass".
  std::map<std::string, Verdict> Open() {
    const auto view = ReadTask(Env::Real(), task_);
    EXPECT_TRUE(view.ok());
    Staleness staleness(view->state);
    std::map<std::string, Verdict> out;
    for (const BoardLine& line : Board(view->state, &staleness)) out[line.step] = line.verdict;
    return out;
  }
  void Amend(const std::string& from, const std::string& to) {
    Env* env = Env::Real();
    std::string toml = *env->ReadFile(task_ + "/task.toml");
    const size_t at = toml.find(from);
    ASSERT_NE(at, std::string::npos) << from << "\n" << toml;
    toml.replace(at, from.size(), to);
    ASSERT_TRUE(env->WriteFileAtomic(task_ + "/task.toml", toml).ok());
    auto task = Task::Open(env, task_, "ann");
    ASSERT_TRUE(task.ok());
    const auto report = (*task)->Amend("test");
    ASSERT_TRUE(report.ok()) << report.status().ToString();
  }
  void ToC4() {
    for (const char* gate : {"C0", "C2", "C3", "C4"}) {
      const RunGateReport r = Run(gate);
      ASSERT_EQ(r.verdict, Verdict::kPass) << gate << " " << r.judgement.ToJson().dump(1);
    }
  }

  TempDir dir_;
  std::string task_ = dir_ / "task";
  Json subject_, inventory_, launches_, invariance_;
};

TEST_F(CollectTest, ActsJudgesAndRecords) {
  const RunGateReport r = Run("C0");
  ASSERT_EQ(r.verdict, Verdict::kPass) << r.judgement.ToJson().dump(1);
  const auto view = ReadTask(Env::Real(), task_);
  ASSERT_TRUE(view.ok());
  const RunRecord* run = view->state.FindRun(r.run_id);
  ASSERT_NE(run, nullptr);
  EXPECT_TRUE(view->state.MissingLinks(*run).empty());
  EXPECT_EQ(view->state.gates.at("C0").verdict, Verdict::kPass);
  // The commands that were run are recorded too, and conclude nothing by themselves.
  int others = 0;
  for (const RunRecord& other : view->state.runs) {
    if (other.id == r.run_id) continue;
    ++others;
    EXPECT_FALSE(other.conclusion.has_value());
    EXPECT_EQ(other.step, "C0");
  }
  EXPECT_EQ(others, 2);
  EXPECT_EQ(Open()["C0"], Verdict::kPass);
}

// GEN-20, TRACK-05: nothing later runs before what it rests on has passed by a judge.
TEST_F(CollectTest, AGateRestsOnThoseBeforeIt) {
  const RunGateReport early = Run("C3");
  EXPECT_EQ(early.verdict, Verdict::kRefused);
  EXPECT_EQ(early.reason, "prerequisite-open");
  EXPECT_NE(early.detail.find("C2"), std::string::npos) << early.detail;
  // A pass that somebody recorded by hand opens no later gate.
  {
    auto task = Task::Open(Env::Real(), task_, "ann");
    ASSERT_TRUE(task.ok());
    RunSpec by_hand;
    by_hand.step = "C0";
    by_hand.kind = EvidenceKind::kE1;
    AddRun(task->get(), by_hand);
  }
  EXPECT_EQ(Open()["C0"], Verdict::kPass);
  EXPECT_EQ(Run("C2").reason, "prerequisite-open");
  ToC4();
  // Provisional while nobody has confirmed C1 (A-35, TRACK-04, TRACK-08).
  EXPECT_TRUE(Run("C3").judgement.scope.contains("provisional"));
}

// GEN-12, GEN-21: exactly what depends on the change reopens.
TEST_F(CollectTest, AChangeReopensWhatDependsOnIt) {
  ToC4();
  const auto reopened = [&] {
    std::string out;
    for (const auto& [step, verdict] : Open()) {
      const bool ran = step == "C0" || step == "C2" || step == "C3" || step == "C4";
      if (ran && verdict != Verdict::kPass) out += step + " ";
    }
    return out;
  };
  EXPECT_EQ(reopened(), "");
  Amend("name = \"small\"", "name = \"smaller\"");  // cosmetic
  EXPECT_EQ(reopened(), "");
  Amend("optimizer = \"adamw\"", "optimizer = \"adamw\"\nrecompute = \"full\"");
  EXPECT_EQ(reopened(), "C4 ");
  Amend("\nrecompute = \"full\"", "");
  EXPECT_EQ(reopened(), "");
  Amend("implementation = \"tare\"", "implementation = \"tare\"\nblock_size = 32");
  EXPECT_EQ(reopened(), "C3 C4 ");  // C4 rests on C3
  Amend("\nblock_size = 32", "");
  EXPECT_EQ(reopened(), "");
  Amend("kv_cache = \"bf16\"", "kv_cache = \"e4m3\"");
  EXPECT_EQ(reopened(), "C2 C3 C4 ");
}

TEST_F(CollectTest, AFailureClosesTheStep) {
  ToC4();
  for (Json& cell : invariance_["cells"]) {
    if (cell["axis"] == "prefill against decode") {
      cell["mismatches"] = 2;
      cell["verdict"] = "fail";
      cell["first"] = "decode: token 3: 0x3f800000 alone, 0x3f800001 here";
    }
  }
  Write();
  const RunGateReport r = Run("C3");
  EXPECT_EQ(r.verdict, Verdict::kFail);
  EXPECT_EQ(r.reason, "bit-mismatch");
  EXPECT_FALSE(r.next.empty());
  EXPECT_EQ(Open()["C3"], Verdict::kFail);
  EXPECT_EQ(Run("C4").reason, "prerequisite-open");
}

TEST_F(CollectTest, ACommandThatBreaksIsNoVerdict) {
  EXPECT_TRUE(std::filesystem::remove(dir_ / "inventory.json"));
  RunGateOptions options;
  options.gate = "C0";
  options.task = task_;
  options.model = "models/small";
  options.program = dir_ / "tare";
  EXPECT_FALSE(RunGate(Env::Real(), "ann", options).ok());
  EXPECT_NE(Open()["C0"], Verdict::kPass);
  options.gate = "C11";
  EXPECT_EQ(RunGate(Env::Real(), "ann", options).status().code(), Code::kInvalidArgument);
}

// C1: judged from a given document, then the person's stop, which only a signature ends.
TEST_F(CollectTest, C1WaitsForItsAudit) {
  Env* env = Env::Real();
  Json doc = HonestC1();
  ASSERT_TRUE(env->WriteFileAtomic(dir_ / "c1.json", doc.dump(1)).ok());
  auto report = JudgeDocument(env, "ann", task_, dir_ / "c1.json", 0);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->judgement.verdict, Verdict::kPass);
  EXPECT_EQ(report->verdict, Verdict::kWaitingHuman);
  EXPECT_EQ(report->reason, "no-signoff");
  {
    auto task = Task::Open(env, task_, "ann");
    ASSERT_TRUE(task.ok());
    EXPECT_EQ(Approve(task->get(), "task", "bob", kBob, true).verdict, Verdict::kPass);
    EXPECT_EQ(Approve(task->get(), "C1", "carol", kCarol, false).verdict, Verdict::kPass);
  }
  EXPECT_EQ(Open()["C1"], Verdict::kPass);
  // Any change that the approval covers voids it.
  Amend("count = 1", "count = 2");
  EXPECT_NE(Open()["C1"], Verdict::kPass);
}

TEST_F(CollectTest, InferenceOnlyTasksHaveNoTrainingGates) {
  Amend("scope = \"full\"", "scope = \"inference-only\"");
  const auto view = ReadTask(Env::Real(), task_);
  ASSERT_TRUE(view.ok());
  Staleness staleness(view->state);
  for (const char* gate : {"C5", "C6", "C7", "C8"}) {
    const EvidenceStatus may = MayRun(view->state, &staleness, gate);
    EXPECT_EQ(may.verdict, Verdict::kNotCovered) << gate;
    EXPECT_NE(may.detail.find("training loop is not accepted"), std::string::npos);
  }
  EXPECT_EQ(MayRun(view->state, &staleness, "C0").verdict, Verdict::kPass);
  // C9 needs what an inference-only task never has.
  EXPECT_EQ(MayRun(view->state, &staleness, "C9").verdict, Verdict::kRefused);
}

// GEN-04: model, precision, parallelism and target are the user's. Changed in the file without an
// amendment, nothing runs; evidence about a fallback is refused; an amendment lets it run.
TEST_F(CollectTest, TheUsersContractIsKept) {
  Env* env = Env::Real();
  const std::string toml = *env->ReadFile(task_ + "/task.toml");
  const auto edited = [&](const std::string& from, const std::string& to) {
    std::string text = toml;
    EXPECT_NE(text.find(from), std::string::npos) << from;
    text.replace(text.find(from), from.size(), to);
    EXPECT_TRUE(env->WriteFileAtomic(task_ + "/task.toml", text).ok());
    return Run("C0");
  };
  for (const auto& [from, to, key] :
       {std::tuple<const char*, const char*, const char*>{
            "kv_cache = \"bf16\"", "kv_cache = \"e4m3\"", "precision.kv_cache"},
        {"\ntp = 1", "\ntp = 2", "parallelism.tp"},
        {"consistency = \"bitwise\"", "consistency = \"tolerance\"", "target.consistency"},
        {"\nhidden_size = 64", "\nhidden_size = 128", "model.hidden_size"}}) {
    const RunGateReport r = edited(from, to);
    EXPECT_EQ(r.verdict, Verdict::kRefused) << key;
    EXPECT_EQ(r.reason, reason::kContractChanged) << key;
    EXPECT_NE(r.detail.find(key), std::string::npos) << r.detail;
    EXPECT_NE(r.next.find("tare init --amend"), std::string::npos) << r.next;
  }
  // What is no part of the contract asks for no amendment here.
  EXPECT_EQ(edited("name = \"small\"", "name = \"smaller\"").verdict, Verdict::kPass);
  ASSERT_TRUE(env->WriteFileAtomic(task_ + "/task.toml", toml).ok());
  EXPECT_EQ(Run("C0").verdict, Verdict::kPass);
  // The user asks for an fp8 cache and the recipe fell back to bf16: no pass, whoever measured it.
  Amend("kv_cache = \"bf16\"", "kv_cache = \"e4m3\"");
  ASSERT_TRUE(env->WriteFileAtomic(dir_ / "c1.json", HonestC1().dump(1)).ok());
  const auto fallback = JudgeDocument(env, "ann", task_, dir_ / "c1.json", 0);
  ASSERT_TRUE(fallback.ok()) << fallback.status().ToString();
  EXPECT_EQ(fallback->judgement.verdict, Verdict::kRefused);
  EXPECT_EQ(fallback->judgement.reason, reason::kContractChanged);
  EXPECT_NE(Open()["C1"], Verdict::kWaitingHuman);
  // The user amends, and it runs.
  Amend("kv_cache = \"e4m3\"", "kv_cache = \"bf16\"");
  const auto asked = JudgeDocument(env, "ann", task_, dir_ / "c1.json", 0);
  EXPECT_EQ(asked->judgement.verdict, Verdict::kPass) << asked->judgement.ToJson().dump(1);
  for (const auto& [pointer, value] : {std::pair<const char*, Json>{"/recipe/parallelism/tp", 2},
                                       {"/recipe/standard/kind", "tolerance"},
                                       {"/subject/weights", std::string(64, '7')}}) {
    TaskConfig user;
    user.values["parallelism.tp"].text = "1";
    user.values["target.consistency"].text = "\"bitwise\"";
    user.values["weights.sha256"].text = HonestC1()["subject"]["weights"].dump();
    EXPECT_TRUE(ContractChanges(user, HonestC1()).empty());
    EXPECT_EQ(ContractChanges(user, With(HonestC1(), pointer, value)).size(), 1u) << pointer;
  }
}

TEST_F(CollectTest, DocumentsOfNoGateAreRefused) {
  Env* env = Env::Real();
  for (const char* text : {"", "[]", "{}", "{\"schema\":\"tare.gate.C11/v1\"}", "{\"schema\":7}"}) {
    ASSERT_TRUE(env->WriteFileAtomic(dir_ / "x.json", text).ok());
    EXPECT_EQ(JudgeDocument(env, "ann", "", dir_ / "x.json", {}).status().code(), Code::kDataLoss)
        << text;
  }
}

}  // namespace
}  // namespace tare::workflow
