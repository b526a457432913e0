// Recording: whatever a command does to its folder, its run ends in the log, and what could not be
// kept is named. Rows GEN-13, GEN-16, GEN-19, CHEAP-13.

#include "workflow/record.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>

#include "base/reasons.h"
#include "workflow/archive.h"
#include "workflow/process.h"
#include "workflow/spawn.h"
#include "workflow/testing_task.h"
#include "workflow/verify.h"

namespace tare::workflow {
namespace {

class RecordTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(InitTask(&env_, Dir()), nullptr); }

  std::string Dir() const { return dir_ / "t"; }

  RecordOptions Options(const std::string& shell) const {
    RecordOptions o;
    o.step = "C3";
    o.kind = EvidenceKind::kE5;
    o.command = {"sh", "-c", shell};
    o.conclude = "exit-status";
    o.scope = TestScope();
    o.quiet = true;
    o.config_keys = {"none"};
    return o;
  }
  RecordReport Record(const RecordOptions& options) {
    auto report = RecordCommand(&env_, Dir(), "ann", options);
    EXPECT_TRUE(report.ok()) << report.status().ToString();
    return report.ok() ? *report : RecordReport();
  }
  RecordReport Record(const std::string& shell) { return Record(Options(shell)); }

  // Every run has ended in the log, and the task verifies.
  void ExpectSound() {
    auto view = ReadTask(&env_, Dir());
    ASSERT_TRUE(view.ok());
    for (const RunRecord& run : view->state.runs) EXPECT_TRUE(run.ended) << run.id;
    auto report = VerifyTask(&env_, Dir());
    ASSERT_TRUE(report.ok());
    EXPECT_EQ(report->verdict, Verdict::kPass)
        << report->findings[0].reason << " " << report->findings[0].message;
  }
  std::vector<RefusalRecord> Refusals() { return ReadTask(&env_, Dir())->state.refusals; }

  TempDir dir_;
  TestEnv env_;
};

TEST_F(RecordTest, WhatTheCommandLeavesIsKept) {
  const RecordReport good = Record("echo said; mkdir $TARE_OUT/a; echo 1 > $TARE_OUT/a/r.txt");
  EXPECT_EQ(good.status.verdict, Verdict::kPass);
  EXPECT_TRUE(good.refused.empty());
  EXPECT_EQ(good.artifacts.size(), 6u);
  ExpectSound();
}

TEST_F(RecordTest, ARefusedResultIsNamedAndMakesTheRunNoPass) {  // CHEAP-13
  const RecordReport report = Record(
      "echo done; cd $TARE_OUT; : > logits.safetensors; mkfifo pipe; ln -s /etc/passwd link; "
      "echo x > \"$(printf 'a\\nb')\"; echo x > y.intoto.jsonl; echo x > y; echo x > good");
  EXPECT_EQ(report.status.verdict, Verdict::kInconclusive);
  EXPECT_EQ(report.refused.size(), 6u);
  const auto refusals = Refusals();
  ASSERT_EQ(refusals.size(), 6u);
  const auto has = [&](const std::string& name, std::string_view reason) {
    return std::any_of(refusals.begin(), refusals.end(), [&](const RefusalRecord& r) {
      return r.what == "record" && r.reason == reason &&
             r.detail.find(" out/" + name + ": ") != std::string::npos &&
             r.detail.find(report.run_id) != std::string::npos;
    });
  };
  EXPECT_TRUE(has("logits.safetensors", reason::kEmptyArtifact));
  EXPECT_TRUE(has("pipe", reason::kNotPlainFile));
  EXPECT_TRUE(has("link", reason::kNotPlainFile));
  EXPECT_TRUE(has("a\\x0ab", reason::kUnrecordedFile));
  EXPECT_TRUE(has("y.intoto.jsonl", reason::kUnrecordedFile));
  // The command's own file stays as it was, so the artifact beside it has no place for its sidecar.
  EXPECT_TRUE(has("y", reason::kUnrecordedFile));
  const std::string out = fmt::format("{}/C3/{}/out/", Dir(), report.run_id);
  EXPECT_EQ(*env_.ReadFile(out + "y.intoto.jsonl"), "x\n");
  EXPECT_TRUE(env_.Exists(out + "good.intoto.jsonl"));
  ExpectSound();
  // A failure stays one.
  EXPECT_EQ(Record("echo no; : > $TARE_OUT/x; exit 1").status.verdict, Verdict::kFail);
}

TEST_F(RecordTest, APassOfItsOwnIsTakenBackToo) {
  RecordOptions options =
      Options("echo x; : > $TARE_OUT/empty; echo '" + PassConclusion().ToJson().dump() +
              "' > $TARE_OUT/conclusion.json");
  options.conclude.clear();
  const RecordReport report = Record(options);
  EXPECT_EQ(report.status.verdict, Verdict::kInconclusive);
  EXPECT_EQ(report.status.reason, reason::kEmptyArtifact);
  // What the command said is kept as it said it.
  const std::string said = fmt::format("{}/C3/{}/out/conclusion.json", Dir(), report.run_id);
  EXPECT_NE(env_.ReadFile(said)->find("\"pass\""), std::string::npos);
  ExpectSound();
}

TEST_F(RecordTest, NothingIsWrittenThroughALinkInTheFoldersPlace) {  // GEN-13
  std::filesystem::create_directory(dir_ / "outside");
  ASSERT_TRUE(env_.WriteFileAtomic(dir_ / "outside/precious", "kept").ok());
  const RecordReport out =
      Record("echo hi; rmdir $TARE_OUT; ln -s " + (dir_ / "outside") + " $TARE_OUT");
  EXPECT_EQ(out.exit_code, 0);
  EXPECT_EQ(out.status.verdict, Verdict::kRefused);
  EXPECT_EQ(out.status.reason, reason::kNotPlainFile);
  const RecordReport inside = Record("echo hi; ln -s " + (dir_ / "outside") + " $TARE_OUT/deeper");
  EXPECT_EQ(inside.status.reason, reason::kNotPlainFile);
  ExpectSound();
  // The whole folder of the run: not even its heartbeat or conclusion goes there.
  Record("echo hi; cd $TARE_TASK/C3; mv $TARE_RUN_ID ../gone; ln -s " + (dir_ / "outside") +
         " $TARE_RUN_ID");
  auto view = ReadTask(&env_, Dir());
  EXPECT_TRUE(view->state.runs.back().ended);
  EXPECT_EQ(view->state.runs.back().exit_code, 0);
  EXPECT_EQ(view->state.runs.back().conclusion->verdict, Verdict::kRefused);
  EXPECT_EQ(env_.List(dir_ / "outside")->size(), 1u);
}

TEST_F(RecordTest, AHeartbeatIsNeverWrittenThroughALink) {
  ASSERT_TRUE(env_.WriteFileAtomic(dir_ / "victim", "keep").ok());
  RecordOptions options =
      Options("echo hi; ln -sf " + (dir_ / "victim") + " $TARE_OUT/../heartbeat; sleep 1.3");
  options.heartbeat_s = 1;
  EXPECT_EQ(Record(options).status.verdict, Verdict::kPass);
  EXPECT_EQ(*env_.ReadFile(dir_ / "victim"), "keep");
  ExpectSound();
  // A folder there keeps nobody from ending the run.
  Record("echo hi; rm $TARE_OUT/../heartbeat; mkdir -p $TARE_OUT/../heartbeat/x");
  ExpectSound();
}

TEST_F(RecordTest, AnInputThatChangesMeanwhileMakesTheRunStale) {
  for (const char* change : {"echo v2 > ", "rm "}) {
    ASSERT_TRUE(env_.WriteFileAtomic(dir_ / "code.py", "v1\n").ok());
    RecordOptions options = Options(change + (dir_ / "code.py") + "; echo ran");
    options.inputs = {"code:code=" + (dir_ / "code.py")};
    const RecordReport report = Record(options);
    EXPECT_EQ(report.status.reason, reason::kStaleEvidence);
    EXPECT_NE(report.status.detail.find("code code changed: "), std::string::npos)
        << report.status.detail;
    // Also when the file is put back: which of the two ran is not known.
    ASSERT_TRUE(env_.WriteFileAtomic(dir_ / "code.py", "v1\n").ok());
    RecordOptions again = Options("echo ran");
    again.inputs = options.inputs;
    EXPECT_EQ(Record(again).status.verdict, Verdict::kPass);
    auto view = ReadTask(&env_, Dir());
    Staleness staleness(view->state);
    EXPECT_TRUE(staleness.Of(*view->state.FindRun(report.run_id)).has_value());
  }
  ExpectSound();
}

TEST_F(RecordTest, WhateverFailsAfterTheCommandItsRunEnds) {  // GEN-16
  const RecordReport removed = Record("echo hello; rmdir $TARE_OUT");
  EXPECT_EQ(removed.exit_code, 0);
  EXPECT_EQ(removed.status.verdict, Verdict::kInconclusive);
  RecordOptions options = Options("echo hello; exit 3");
  options.conclude = dir_ / "nowhere.json";
  const RecordReport missing = Record(options);
  EXPECT_EQ(missing.exit_code, 3);
  EXPECT_EQ(missing.status.reason, reason::kRunIncomplete);
  // A conclusion that no event can hold.
  Conclusion large = PassConclusion();
  for (int i = 0; i < 3; ++i)
    large.inferences.push_back({fmt::format("I{}", i), std::string(1 << 20, 'x')});
  ASSERT_TRUE(env_.WriteFileAtomic(dir_ / "large.json", large.ToJson().dump()).ok());
  options.conclude = dir_ / "large.json";
  EXPECT_EQ(Record(options).status.reason, reason::kRunIncomplete);
  // Output that the command took away.
  EXPECT_EQ(Record("echo x; rm $TARE_OUT/../stdout.txt; echo 1 > $TARE_OUT/r").status.verdict,
            Verdict::kInconclusive);
  ExpectSound();
}

TEST_F(RecordTest, AWorkingDirectoryOfAnyNameIsKeptAsText) {
  const std::string odd = dir_ / "x\xff";
  std::filesystem::create_directory(odd);
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(odd);
  const RecordReport report = Record("echo hello");
  std::filesystem::current_path(before);
  EXPECT_EQ(report.status.verdict, Verdict::kPass);
  const std::string identity =
      *env_.ReadFile(fmt::format("{}/C3/{}/identity.json", Dir(), report.run_id));
  EXPECT_NE(ParseJson(identity)->at("working_directory").get<std::string>().find("x\\xff"),
            std::string::npos);
  ExpectSound();
}

TEST_F(RecordTest, OneDepthForRecordingVerifyingAndSigning) {
  std::string deep = "out";
  while (std::count(deep.begin(), deep.end(), '/') + 4 < static_cast<int64_t>(kMaxPathParts)) {
    deep += "/d";
  }
  const std::string shell =
      "echo x; mkdir -p $TARE_OUT/../" + deep + "/e; echo 1 > $TARE_OUT/../" + deep + "/f";
  EXPECT_EQ(Record(shell).status.verdict, Verdict::kPass);
  const RecordReport report = Record(shell + "; echo 1 > $TARE_OUT/../" + deep + "/e/f");
  EXPECT_EQ(report.status.reason, reason::kUnrecordedFile);
  ExpectSound();
  auto task = Task::Open(&env_, Dir(), "ann");
  RunStart start;
  start.step = "C3";
  start.kind = EvidenceKind::kE5;
  const std::string run = *(*task)->StartRun(start);
  EXPECT_TRUE((*task)->AddBytes(run, deep + "/f", Role::kRaw, "12").ok());
  EXPECT_FALSE((*task)->AddBytes(run, deep + "/e/f", Role::kRaw, "12").ok());
}

// The command is over, and a process that it left behind writes for ever.
TEST_F(RecordTest, OutputIsReadForALimitedTimeAfterTheEnd) {
  const RecordReport report = Record("(while echo x; do sleep 0.05; done) & exit 0");
  EXPECT_EQ(report.exit_code, 0);
  EXPECT_EQ(report.status.verdict, Verdict::kPass);
  ExpectSound();
}

// Another writer holds the lock for more than a minute as the command ends.
TEST_F(RecordTest, SlowAFinishedRunWaitsForTheLock) {
  RecordOptions options = Options(
      "flock $TARE_TASK/events.lock sleep 66 >/dev/null 2>&1 & sleep 0.2; echo a day of work");
  options.heartbeat_s = 1;
  EXPECT_EQ(Record(options).status.verdict, Verdict::kPass);
  ExpectSound();
}

TEST_F(RecordTest, AddLooksAtEverythingBeforeItStartsARun) {
  ASSERT_TRUE(env_.WriteFileAtomic(dir_ / "raw.txt", "12").ok());
  ASSERT_TRUE(env_.WriteFileAtomic(dir_ / "x.intoto.jsonl", "{\"x\":1}").ok());
  ASSERT_TRUE(env_.WriteFileAtomic(dir_ / "empty", "").ok());
  const auto add = [&](const std::function<void(AddOptions*)>& change) {
    AddOptions options;
    options.step = "C3";
    options.kind = EvidenceKind::kE5;
    options.raw = {dir_ / "raw.txt"};
    change(&options);
    return AddArtifacts(&env_, Dir(), "ann", options);
  };
  EXPECT_FALSE(add([&](AddOptions* o) { o->raw = {dir_ / "x.intoto.jsonl"}; }).ok());
  EXPECT_FALSE(add([&](AddOptions* o) { o->identity = dir_ / "nope"; }).ok());
  EXPECT_FALSE(add([&](AddOptions* o) { o->config = dir_ / "nope"; }).ok());
  EXPECT_FALSE(add([&](AddOptions* o) { o->materials = {dir_ / "raw.txt"}; }).ok());
  for (std::string AddOptions::*file :
       {&AddOptions::config, &AddOptions::identity, &AddOptions::conclusion}) {
    const auto refused = add([&](AddOptions* o) { o->*file = dir_ / "empty"; });
    ASSERT_TRUE(refused.ok()) << refused.status().ToString();
    EXPECT_EQ(refused->status.reason, reason::kEmptyArtifact);
  }
  EXPECT_EQ(Refusals().size(), 3u);
  EXPECT_TRUE(ReadTask(&env_, Dir())->state.runs.empty());
  EXPECT_TRUE(add([](AddOptions*) {}).ok());
  ExpectSound();
}

TEST_F(RecordTest, AnEmptyConfigurationOrIdentityIsNone) {
  auto task = Task::Open(&env_, Dir(), "ann");
  RunStart start;
  start.step = "C3";
  start.kind = EvidenceKind::kE5;
  const std::string run = *(*task)->StartRun(start);
  for (const Role role : {Role::kConfig, Role::kIdentity, Role::kConclusion, Role::kRaw}) {
    const Status s = (*task)->AddBytes(run, fmt::format("{}.json", RoleName(role)), role, "");
    EXPECT_NE(s.message().find("empty-artifact"), std::string::npos) << RoleName(role);
  }
  EXPECT_TRUE((*task)->AddBytes(run, "notes.txt", Role::kMaterial, "").ok());
}

TEST_F(RecordTest, ACommandTooLongForASidecarIsRefusedBeforeItRuns) {
  auto task = Task::Open(&env_, Dir(), "ann");
  RunStart start;
  start.step = "C3";
  start.kind = EvidenceKind::kE5;
  start.command = {std::string(kMaxEventBytes - 2000, 'x')};
  EXPECT_EQ((*task)->StartRun(start).status().code(), Code::kExhausted);
  start.command = {std::string(kMaxEventBytes - 40000, 'x')};
  const auto run = (*task)->StartRun(start);
  ASSERT_TRUE(run.ok());
  ASSERT_TRUE((*task)->AddBytes(*run, "config.json", Role::kConfig, "{\"x\":1}").ok());
  ASSERT_TRUE((*task)->AddBytes(*run, "raw.txt", Role::kRaw, "12").ok());
  ASSERT_TRUE((*task)->EndRun(*run, {}).ok());
  ASSERT_TRUE((*task)->WriteIndexes().ok());
  task->reset();
  ExpectSound();
}

TEST_F(RecordTest, ForeignNamesBesideTheLogBlockNobody) {
  ASSERT_TRUE(env_.WriteFileAtomic(Dir() + "/events.torn-\xff", "x").ok());
  ASSERT_TRUE(env_.WriteFileAtomic(Dir() + "/events.torn-7", "x").ok());
  std::filesystem::create_directory(Dir() + "/events.torn-1-0123abcd");
  ASSERT_EQ(::mkfifo((Dir() + "/events.torn-3-0123abcd").c_str(), 0600), 0);
  std::filesystem::create_symlink("/etc/passwd", Dir() + "/events.torn-2-0123abcd");
  EXPECT_EQ(Record("echo hi").status.verdict, Verdict::kPass);
  ExpectSound();
  std::string named;
  const VerifyReport report = VerifyTask(&env_, Dir()).value();
  for (const Finding& f : report.findings) named += fmt::format("{} {}\n", f.reason, f.where);
  EXPECT_EQ(named,
            "unrecorded-file events.torn-2-0123abcd\nunrecorded-file events.torn-3-0123abcd\n"
            "unrecorded-file events.torn-7\nunrecorded-file events.torn-\\xff\n");
}

TEST_F(RecordTest, AnArchiveIsAFolderApart) {  // GEN-19
  Record("echo hi");
  std::filesystem::create_directory(dir_ / "other");
  std::filesystem::create_directory_symlink(Dir() + "/C3", dir_ / "other/link");
  for (const std::string& target : {Dir() + "/arch", Dir() + "/C3/arch/", Dir() + "/C3/../arch",
                                    dir_ / "other/link/arch", dir_ / "other/../t/arch"}) {
    const auto report = ArchiveTask(&env_, Dir(), target, "ann");
    ASSERT_FALSE(report.ok()) << target;
    EXPECT_EQ(report.status().code(), Code::kInvalidArgument) << report.status().ToString();
  }
  EXPECT_TRUE(CheckArchive(&env_, Dir())->empty());
  EXPECT_TRUE(ArchiveTask(&env_, Dir() + "/", dir_ / "other/arch", "ann").ok());
}

TEST(Identity, ValuesOfVariablesThatLookLikeSecretsAreLeftOut) {
  TestEnv env;
  ::setenv("VLLM_AUTH", "hidden", 1);
  ::setenv("TORCH_PASSWD", "hidden", 1);
  ::setenv("CUDA_CREDENTIALS", "hidden", 1);
  ::setenv("OMP_NUM_THREADS", "3", 1);
  const Json identity = ExecutionIdentity(&env, {}, {});
  EXPECT_EQ(identity.dump().find("hidden"), std::string::npos);
  EXPECT_EQ(identity["environment"]["OMP_NUM_THREADS"], "3");
  for (const char* name : {"VLLM_AUTH", "TORCH_PASSWD", "CUDA_CREDENTIALS", "OMP_NUM_THREADS"})
    ::unsetenv(name);
}

TEST(Process, AnotherNamespaceOrBootIsJudgedByTheHeartbeat) {
  TestEnv env;
  TempDir dir;
  const ProcessIdentity self = ThisProcess();
  ASSERT_NE(self.boot_id.find(" pid:["), std::string::npos);
  const std::string boot = self.boot_id.substr(0, self.boot_id.find(' '));
  RunRecord run;
  run.host = self.host;
  run.pid = 0x7ffffff0;  // nobody here
  run.pid_start = 1;
  run.heartbeat_s = 5;
  for (const std::string& id : {boot + " pid:[1]", std::string("another-boot pid:[1]")}) {
    run.boot_id = id;
    EXPECT_EQ(CheckLiveness(&env, run, dir.path()).liveness, Liveness::kLost) << id;
    ASSERT_TRUE(env.WriteFileAtomic(dir / "heartbeat", "x").ok());
    EXPECT_EQ(CheckLiveness(&env, run, dir.path()).liveness, Liveness::kRunning) << id;
    ASSERT_TRUE(env.Remove(dir / "heartbeat").ok());
  }
  // Here, and in logs that name no namespace, the process decides, whatever the heartbeat says.
  ASSERT_TRUE(env.WriteFileAtomic(dir / "heartbeat", "x").ok());
  for (const std::string& id : {self.boot_id, boot}) {
    run.boot_id = id;
    EXPECT_EQ(CheckLiveness(&env, run, dir.path()).liveness, Liveness::kLost) << id;
  }
}

}  // namespace
}  // namespace tare::workflow
