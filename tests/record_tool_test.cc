// Recording through the program: what is typed is what runs, and no name, whatever bytes it has,
// stops it or reaches a terminal raw.

#include "tool.h"
#include "workflow/task.h"
#include "workflow/uuid.h"

namespace tare {
namespace {

class RecordTool : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    Write("input", "v1");
    ASSERT_EQ(Tare("init " + In("t")).status, 0);
  }
  std::string Record(const std::string& rest) {
    return "record --task " + In("t") +
           " --step C3 --kind E5 --conclude exit-status --quiet --scope "
           "'shape=b1;topology=1;dtype=bf16;model=m;path=decode' " +
           rest;
  }
  bool Logged(const std::string& text) const {
    return Env::Real()->ReadFile(In("t/events.jsonl"))->find(text) != std::string::npos;
  }
};

TEST_F(RecordTool, TheCommandIsTheOneBehindTheMark) {
  for (const std::string& list :
       {"--input code:" + In("input"), std::string("--config-key none"),
        "--depends code:a=" + std::string(64, 'a'), std::string("--material m")}) {
    const ToolRun run = Tare(Record(list + " -- echo --json hello"));
    EXPECT_EQ(run.status, 0) << list << ": " << run.err;
    EXPECT_EQ(run.out, "") << "--json was the command's";
    EXPECT_TRUE(Logged("\"command\":[\"echo\",\"--json\",\"hello\"]")) << list;
  }
  EXPECT_FALSE(Logged("\"command\":[\"echo\",\"hello\"]"));
  // The parser takes a word in brackets for a list.
  EXPECT_EQ(Tare(Record("-- echo '[1,2]' '[[],x]'")).status, 0);
  EXPECT_TRUE(Logged("\"command\":[\"echo\",\"[1,2]\",\"[[],x]\"]"));
  // Words before the mark, or an option that takes the mark for its value: no guess is made.
  const char* behind = "the command stands behind `--`";
  for (const auto& [wrong, said] : std::vector<std::pair<const char*, const char*>>{
           {"echo --json hello", behind},
           {"echo -- hello", "not expected: hello"},  // the parser's own refusal
           {"--reason -- --json -- echo x", behind}}) {
    const ToolRun run = Tare(Record(wrong));
    EXPECT_EQ(run.status, 64) << wrong;
    EXPECT_NE(run.err.find(said), std::string::npos) << wrong << ": " << run.err;
  }
  const ToolRun lease = Tare("lease cpu:0 --dir " + root_ + " -- sh -c 'echo \"$0\"' '[a,b]'");
  EXPECT_EQ(lease.out, "[a,b]\n") << lease.err;
}

TEST_F(RecordTool, AListOptionTakesOneValueEachTime) {
  // The folder behind the option is the task, not a second configuration.
  Write("c.json", "{\"hidden_size\":64}");
  EXPECT_EQ(Tare("init --config " + In("c.json") + " " + In("n")).status, 0);
  EXPECT_TRUE(std::filesystem::exists(In("n/task.toml")));
}

TEST_F(RecordTool, EveryConflictIsListedWithBothValues) {
  Write("a.json", "{\"tensor_parallel_size\":2}");
  Write("b.json", "{\"tensor_parallel_size\":4}");
  const ToolRun run =
      Tare("init " + In("n") + " --config " + In("a.json") + " --config " + In("b.json"));
  EXPECT_NE(run.out.find("conflict: parallelism.tp = 2 (recovered: a.json tensor_parallel_size) "
                         "holds over 4 (recovered: b.json tensor_parallel_size)"),
            std::string::npos)
      << run.out;
}

TEST_F(RecordTool, WhatIsNotKeptIsNamed) {
  const ToolRun run = Tare(Record("-- sh -c 'echo x; : > $TARE_OUT/a; mkfifo $TARE_OUT/b'"));
  EXPECT_EQ(run.status, 2);
  EXPECT_NE(run.err.find("not kept: out/a: "), std::string::npos) << run.err;
  EXPECT_NE(run.err.find("not kept: out/b: "), std::string::npos) << run.err;
}

// What the recorder has to say finds no reader: the run ends all the same.
TEST_F(RecordTool, ARunEndsAlsoWhenNobodyListens) {
  Tare(Record("-- sh -c '(while echo x; do sleep 0.05; done) & exit 0' 2>&1 | true"));
  EXPECT_TRUE(Logged("\"type\":\"run-ended\""));
}

TEST_F(RecordTool, NamesOfAnyBytes) {
  Write("c\xff.json", "{\"hidden_size\":64}");
  const ToolRun json = Tare("init " + In("n") + " --json --config " + In("c\xff.json"));
  EXPECT_EQ(json.status, 0) << json.err;
  EXPECT_NE(json.out.find("c\\\\xff.json"), std::string::npos) << json.out;
  // A line end in a file's name makes no line of task.toml.
  const std::string recipe = "r\n[[reviewer]]\nperson=\"mallory\"\n#.toml";
  Write(recipe, "[model]\nhidden_size = 64\n");
  const ToolRun init = Tare("init " + In("r") + " --recipe '" + In(recipe) + "'");
  EXPECT_EQ(init.status, 0) << init.err;
  EXPECT_EQ(Tare("verify " + In("r")).status, 0);
  EXPECT_EQ(Env::Real()->ReadFile(In("r/task.toml"))->find("\nperson=\"mallory\""),
            std::string::npos);
  const ToolRun escape = Tare("status \"$(printf '/nowhere/\\033[2J')\"");
  EXPECT_NE(escape.status, 0);
  EXPECT_EQ(escape.err.find('\033'), std::string::npos);
  EXPECT_NE(escape.err.find("\\x1b"), std::string::npos) << escape.err;
}

TEST_F(RecordTool, StatusReadsAPlainFileOnly) {
  std::filesystem::rename(In("t/task.toml"), In("moved.toml"));
  std::filesystem::create_symlink(In("moved.toml"), In("t/task.toml"));
  EXPECT_NE(Tare("status " + In("t")).out.find("config-unrecorded"), std::string::npos);
  std::filesystem::remove(In("t/task.toml"));
  ASSERT_EQ(std::system(("mkfifo " + In("t/task.toml")).c_str()), 0);
  EXPECT_NE(Tare("status " + In("t")).out.find("config-unrecorded"), std::string::npos);
}

// What a log from elsewhere says is text, not commands to the reader's terminal.
TEST_F(RecordTool, NothingOfALogReachesATerminalRaw) {
  auto task = workflow::Task::Open(Env::Real(), In("t"), "ann");
  ASSERT_TRUE(task.ok());
  const std::string evil = "\033[2Jx";
  ASSERT_TRUE((*task)->Refuse(evil, evil, evil).ok());
  const Json started = {{"step", "C3"},      {"kind", "E5"},      {"parent", ""},
                        {"command", {evil}}, {"candidate", evil}, {"content_id", ""},
                        {"host", evil},      {"boot_id", evil},   {"pid", 1},
                        {"pid_start", 1},    {"heartbeat_s", 1},  {"dependencies", Json::array()}};
  ASSERT_TRUE((*task)->Append({workflow::NewRunId(Env::Real()), "run-started", started}).ok());
  ASSERT_TRUE((*task)->WriteIndexes().ok());
  task->reset();
  const ToolRun run = Tare("status --explain " + In("t"));
  EXPECT_NE(run.out.find("is lost: host \\x1b[2Jx"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("refused: event"), std::string::npos);
  EXPECT_EQ((run.out + run.err).find('\033'), std::string::npos);
}

}  // namespace
}  // namespace tare
