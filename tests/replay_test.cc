// From a difference to the smallest experiment that shows it, through the program: two dumps of
// MINI, one with a planted fault, are located, bundled, replayed in fresh processes and shrunk
// (GEN-01).

#include "compare/bundle.h"
#include "tool.h"

namespace tare {
namespace {

class ReplayTest : public ToolTest {
 protected:
  void SetUp() override {
    ToolTest::SetUp();
    ASSERT_EQ(Tare("model mini " + In("mini")).status, 0);
    // Sequences of 9, 21 and 14 tokens.
    std::string lines;
    for (const auto& [name, n] : {std::pair{"s0", 9}, std::pair{"s1", 21}, std::pair{"s2", 14}}) {
      Json line = {{"sequence", name}, {"prompt", Json::array()}, {"tokens", Json::array()}};
      for (int i = 0; i < n; ++i) line[i < 4 ? "prompt" : "tokens"].push_back((7 * i + n) % 90);
      lines += line.dump() + "\n";
    }
    Write("tokens.jsonl", lines);
  }
  void Score(const std::string& dump, const std::string& how) {
    const ToolRun run = Tare("score " + In("mini") + " --tokens " + In("tokens.jsonl") +
                             " --weight-version theta0 --dump " + In(dump) + " " + how);
    ASSERT_EQ(run.status, 0) << run.out << run.err;
  }
  // Two dumps that part at rope, and their bundle.
  void Bundle() {
    Score("a.dump", "--side trainer --fault rope.cast_before_rotate@rollout");
    Score("b.dump", "--side rollout --fault rope.cast_before_rotate@rollout --chunk 4");
    const ToolRun run =
        Tare("locate " + In("a.dump") + " " + In("b.dump") + " --bundle " + In("bundle"));
    ASSERT_EQ(run.status, 1) << run.out << run.err;
    ASSERT_NE(run.out.find("operator   rope"), std::string::npos) << run.out;
  }
};

TEST_F(ReplayTest, GEN01TheSameBitsComeBackInFreshProcesses) {
  Bundle();
  const Result<compare::Bundle> bundle = compare::OpenBundle(Env::Real(), In("bundle"));
  ASSERT_TRUE(bundle.ok()) << bundle.status().ToString();
  // The batch of each side is there whole: three sequences against the chunk that holds the row.
  EXPECT_EQ(compare::ReplayInput(Env::Real(), *bundle, "a")->size(), 3u);
  std::filesystem::remove_all(In("a.dump"));
  std::filesystem::remove_all(In("b.dump"));
  std::filesystem::remove(In("tokens.jsonl"));
  for (int i = 0; i < 3; ++i) {
    const ToolRun run = Tare("replay " + In("bundle") + " --json");
    ASSERT_EQ(run.status, 0) << run.out << run.err;
    const Json json = ParseJson(run.out).value();
    EXPECT_EQ(json["a"]["verdict"], "pass");
    EXPECT_EQ(json["b"]["verdict"], "pass");
  }
}

TEST_F(ReplayTest, GEN01AnotherWeightOrTokenIsRefused) {
  Bundle();
  // One bit of one weight.
  const std::string weights = In("mini/model.safetensors");
  const std::string bytes = Env::Real()->ReadFile(weights).value();
  std::string other = bytes;
  other[other.size() - 1] = static_cast<char>(other.back() ^ 1);
  ASSERT_TRUE(Env::Real()->WriteFileAtomic(weights, other).ok());
  ToolRun run = Tare("replay " + In("bundle"));
  EXPECT_EQ(run.status, 3) << run.out << run.err;
  EXPECT_TRUE(run.err.ends_with("tare: refused weight-hash-mismatch\n")) << run.err;
  ASSERT_TRUE(Env::Real()->WriteFileAtomic(weights, bytes).ok());
  ASSERT_EQ(Tare("replay " + In("bundle")).status, 0);
  // One token.
  const std::string input = In("bundle/input.b.jsonl");
  std::string text = Env::Real()->ReadFile(input).value();
  text[text.find("prompt\":[") + 9] ^= 1;
  ASSERT_TRUE(Env::Real()->WriteFileAtomic(input, text).ok());
  for (const std::string& command : {std::string("replay "), "shrink --out " + In("x") + " "}) {
    run = Tare(command + In("bundle"));
    EXPECT_EQ(run.status, 3) << run.out << run.err;
    EXPECT_TRUE(run.err.ends_with("tare: refused bundle-altered\n")) << run.err;
  }
  // A run with another fault has other bits: the recorded ones do not come back.
  Score("c.dump", "--profile sm90-mma --side trainer");
  Score("d.dump", "--profile sm90-mma --side rollout --fault rope.cast_before_rotate@rollout");
  ASSERT_EQ(
      Tare("locate " + In("c.dump") + " " + In("d.dump") + " --bundle " + In("bundle2")).status, 1);
  Json description = ParseJson(Env::Real()->ReadFile(In("bundle2/bundle.json")).value()).value();
  description["a"]["identity"]["replay"].push_back("--fault");
  description["a"]["identity"]["replay"].push_back("rope.cast_before_rotate@trainer");
  Write("bundle2/bundle.json", description.dump(1) + "\n");
  run = Tare("replay " + In("bundle2"));
  EXPECT_EQ(run.status, 1) << run.out << run.err;
  EXPECT_TRUE(run.err.ends_with("tare: fail replay-differs\n")) << run.err;
  // Without a recorded command nothing is claimed.
  description["a"]["identity"].erase("replay");
  Write("bundle2/bundle.json", description.dump(1) + "\n");
  run = Tare("replay " + In("bundle2"));
  EXPECT_EQ(run.status, 2) << run.out << run.err;
  EXPECT_TRUE(run.err.ends_with("tare: inconclusive missing-capture\n")) << run.err;
}

TEST_F(ReplayTest, ShrinkFindsTheTwoTokensThatRopeNeeds) {
  Bundle();
  ToolRun run = Tare("shrink " + In("bundle") + " --json --out " + In("small"));
  ASSERT_EQ(run.status, 0) << run.out << run.err;
  const Json json = ParseJson(run.out).value();
  EXPECT_EQ(json["minimal"], true);
  EXPECT_EQ(json["site"]["op"], "rope");
  EXPECT_EQ(json["sequences_after"], 2) << run.out;  // one on each side
  // Position 0 is not rotated: the fault needs a row at position 1, and a target after it.
  EXPECT_EQ(json["site"]["position"], 1);
  EXPECT_EQ(json["tokens_after"], 6) << run.out;
  run = Tare("replay " + In("small"));
  EXPECT_EQ(run.status, 0) << run.out << run.err;
  // The small bundle shrinks no further.
  run = Tare("shrink " + In("small") + " --json --out " + In("smaller"));
  ASSERT_EQ(run.status, 0) << run.out << run.err;
  EXPECT_EQ(ParseJson(run.out).value()["tokens_after"], 6);
  EXPECT_EQ(Tare("shrink " + In("bundle") + " --out " + In("small")).status, 74);
}

// C3-08: from logprobs alone to the operator, with no more runs than the layers' logarithm asks
// for.
TEST_F(ReplayTest, C308BisectsOverTheLayers) {
  Score("a.dump", "--side trainer --dump-only logprob");
  Score("b.dump", "--side rollout --fault rope.cast_before_rotate@rollout --dump-only logprob");
  ToolRun run = Tare("locate " + In("a.dump") + " " + In("b.dump") + " --bundle " + In("bundle"));
  ASSERT_EQ(run.status, 2) << run.out << run.err;  // logprobs alone name no operator
  run = Tare("probe " + In("bundle") + " --json --bundle " + In("small"));
  ASSERT_EQ(run.status, 1) << run.out << run.err;
  const Json json = ParseJson(run.out).value();
  EXPECT_EQ(json["site"]["op"], "rope");
  EXPECT_EQ(json["site"]["layer"], 0);
  EXPECT_EQ(json["site"]["proven"], true) << run.out;  // with inputs equal byte by byte
  const int64_t layers = json["layers"].get<int64_t>();
  int64_t log = 0;
  while ((int64_t{1} << log) < layers + 1) ++log;
  EXPECT_LE(json["runs"].get<int64_t>(), log + 1) << run.out;
  EXPECT_GE(layers, 2);
  EXPECT_EQ(Tare("replay " + In("small")).status, 0);
}

}  // namespace
}  // namespace tare
