// Recording through the program: what is typed is what runs.

#include "tool.h"

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
  for (const char* wrong : {"echo --json hello", "echo -- hello", "--reason -- --json -- echo x"}) {
    const ToolRun run = Tare(Record(wrong));
    EXPECT_EQ(run.status, 64) << wrong;
    EXPECT_NE(run.err.find("behind `--`"), std::string::npos) << run.err;
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

}  // namespace
}  // namespace tare
