// Every exit status of the program, through the program: scripts and CI depend on nothing else. A
// verdict that is no pass also names its reason on the last line of stderr.

#include <algorithm>
#include <vector>

#include "base/json.h"
#include "tensor/safetensors.h"
#include "tool.h"

namespace tare {
namespace {

class ExitCodes : public ToolTest {
 protected:
  Tensor Floats(const std::vector<float>& values) {
    Tensor t = Tensor::Allocate(DType::kF32, {static_cast<int64_t>(values.size())}).value();
    std::copy(values.begin(), values.end(), t.mutable_as<float>());
    return t;
  }
  void Set(const std::string& name, const std::vector<std::pair<std::string, Tensor>>& tensors) {
    ASSERT_TRUE(WriteSafetensors(Env::Real(), In(name), tensors).ok());
  }
  void Expect(const std::string& arguments, int status, const std::string& says) {
    const ToolRun run = Tare(arguments);
    EXPECT_EQ(run.status, status) << "tare " << arguments << "\n" << run.out << run.err;
    EXPECT_NE((run.out + run.err).find(says), std::string::npos)
        << "tare " << arguments << " does not say \"" << says << "\"\n"
        << run.out << run.err;
  }
  // As Expect, and stderr ends with "tare: VERDICT REASON".
  void ExpectVerdict(const std::string& arguments, int status, const std::string& verdict) {
    const ToolRun run = Tare(arguments);
    EXPECT_EQ(run.status, status) << "tare " << arguments << "\n" << run.out << run.err;
    EXPECT_TRUE(run.err.ends_with("tare: " + verdict + "\n")) << arguments << "\n" << run.err;
  }
};

TEST_F(ExitCodes, DiffGivesEveryVerdictItsStatus) {
  Set("a.safetensors", {{"x", Floats({1, 2, 3})}});
  Set("same.safetensors", {{"x", Floats({1, 2, 3})}});
  Set("other.safetensors", {{"x", Floats({1, 2, 4})}});
  Set("name.safetensors", {{"y", Floats({1, 2, 3})}});
  const std::string a = In("a.safetensors");
  const ToolRun pass = Tare("diff " + a + " " + In("same.safetensors"));
  EXPECT_EQ(pass.status, 0) << pass.out << pass.err;
  EXPECT_EQ(pass.err, "");
  EXPECT_NE(pass.out.find("PASS: 0 of 3 compared elements differ"), std::string::npos) << pass.out;
  ExpectVerdict("diff " + a + " " + In("other.safetensors"), 1, "fail bit-mismatch");
  ExpectVerdict("diff " + a + " " + In("name.safetensors"), 2, "inconclusive no-common-tensor");
  ExpectVerdict("diff " + a + " " + In("same.safetensors") + " --mask m", 3,
                "refused mask-missing");
  // The same in machine form: the document whole on stdout, the line on stderr.
  const ToolRun json = Tare("diff --json " + a + " " + In("other.safetensors"));
  EXPECT_EQ(json.status, 1);
  EXPECT_EQ(ParseJson(json.out).value()["verdict"], "fail");
  EXPECT_EQ(json.err, "tare: fail bit-mismatch\n");

  Write("decimal.jsonl",
        R"({"schema":"tare.logprobs/1","sequence":"0","weights":"theta0","kind":"raw",)"
        R"("prompt":[1],"tokens":[7],"dtype":"f32","logprobs":[-1.5]})"
        "\n");
  ExpectVerdict("diff " + In("decimal.jsonl") + " " + In("decimal.jsonl"), 6,
                "diagnostic-only decimal-only");
}

TEST_F(ExitCodes, WaitingForAPersonAndNotCovered) {
  const std::string task = In("task");
  Expect("init " + task + " --set 'requester.person=\"ann\"'", 0, "");
  Expect("approve C3 --task " + task, 4, "ssh-keygen -Y sign");
  Expect("find zzqqzz", 5, "no row of the problem index");
}

TEST_F(ExitCodes, UsageAndEnvironmentErrors) {
  Set("a.safetensors", {{"x", Floats({1})}});
  const std::string a = In("a.safetensors");
  Expect("diff " + a, 64, "b is required");
  Expect("diff " + a + " " + a + " --no-such-flag", 64, "--no-such-flag");
  Expect("no-such-command", 64, "subcommand is required");
  Expect("diff " + a + " " + a + " --tier broken", 64, "--tier broken");
  Write("cut.safetensors", Env::Real()->ReadFile(a).value().substr(0, 20));
  Expect("diff " + a + " " + In("cut.safetensors"), 65, "header ends at byte");
  Expect("diff " + a + " " + In("absent.safetensors"), 66, "no such file");
  std::string foreign = "{\"x\":{\"dtype\":\"F6_E2M3\",\"shape\":[1],\"data_offsets\":[0,1]}}";
  foreign.resize(72, ' ');
  std::string header(8, '\0');
  header[0] = 72;
  Write("foreign.safetensors", header + foreign + "x");
  Expect("diff " + In("foreign.safetensors") + " " + a, 69, "unsupported dtype \"F6_E2M3\"");
  Expect("model mini " + In("a.safetensors") + "/below", 74, "");
}

TEST_F(ExitCodes, HelpAndVersionAreNoErrors) {
  Expect("--help", 0, "diff");
  Expect("diff --help", 0, "--mask");
  Expect("--version", 0, "tare ");
}

}  // namespace
}  // namespace tare
