// Provenance sidecars (GEN-15): one spelling, hostile ones refused, and read by the standard
// in-toto package.

#include "workflow/sidecar.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>

#include "workflow/testing_task.h"

namespace tare::workflow {
namespace {

Sidecar Example() {
  Sidecar s;
  s.subject = "C5/01890000-0000-7000-8000-000000000001/out/r.jsonl";
  s.subject_sha256 = std::string(64, 'a');
  s.run_id = "01890000-0000-7000-8000-000000000001";
  s.task_id = "01890000-0000-7000-8000-000000000000";
  s.step = "C5";
  s.kind = EvidenceKind::kE6;
  s.command = {"measure", "--x"};
  s.producer = "ann";
  s.tool_version = "tare 0.1.0";
  s.identity_path = "C5/01890000-0000-7000-8000-000000000001/identity.json";
  s.identity_sha256 = std::string(64, 'b');
  s.inputs = {{DependencyType::kCode, "src/a.cc", std::string(64, 'c')}};
  s.started = "2026-01-02T03:04:05.000000006Z";
  s.finished = "2026-01-02T03:04:06.000000006Z";
  return s;
}

TEST(Sidecar, HasOneSpelling) {
  const std::string line = *EncodeSidecar(Example());
  auto back = ParseSidecar(line);
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(*EncodeSidecar(*back), line);
  EXPECT_EQ(back->inputs, Example().inputs);
  EXPECT_EQ(back->identity_sha256, std::string(64, 'b'));
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = line;
    text.replace(text.find(from), from.size(), to);
    return text;
  };
  for (const std::string& bad :
       {std::string(), std::string("\n"), line.substr(0, line.size() - 1), line + line,
        fmt::format(" {}", line), with("Statement/v1", "Statement/v0.1"), with("\"E6\"", "\"E11\""),
        with("\"raw\"", "\"rawer\""), with("\"C5\"}", "\"C55\"}"),
        with("{\"_type\"", "{\"extra\":1,\"_type\""), with("/out/", "/../"),
        with(std::string(64, 'a'), std::string(64, 'A')), with("[\"measure\"", "[1,\"measure\""),
        with("\"subject\":[", "\"subject\":[],\"x\":["),
        fmt::format("{}\n", std::string(100000, '[')), std::string("{\"_type\":\"\xff\"}\n")}) {
    auto result = ParseSidecar(bad);
    EXPECT_FALSE(result.ok()) << Printable(bad.substr(0, 100));
  }
}

TEST(Sidecar, TheInTotoPackageReadsIt) {
  const char* python = std::getenv("TARE_TEST_PYTHON");
  const std::string command = fmt::format("{} {}/tests/in_toto_check.py",
                                          python == nullptr ? "python3" : python, TARE_SOURCE_DIR);
  const int without = std::system((command + " 2>/dev/null").c_str());
  if (WIFEXITED(without) && WEXITSTATUS(without) == 77) {
    GTEST_SKIP()
        << "the Python package in-toto-attestation is not installed (scripts/pip-test.txt)";
  }
  TempDir dir;
  TestEnv env;
  BuildSmallTask(&env, dir / "t");
  auto view = ReadTask(&env, dir / "t");
  std::string arguments, expected;
  for (const ArtifactRecord& a : view->state.artifacts) {
    arguments += fmt::format(" {}/t/{}.intoto.jsonl", dir.path(), a.path);
    expected += a.sha256 + "\n";
  }
  FILE* pipe = ::popen((command + arguments).c_str(), "r");
  std::string out;
  char buffer[4096];
  while (const size_t n = std::fread(buffer, 1, sizeof(buffer), pipe)) out.append(buffer, n);
  EXPECT_EQ(::pclose(pipe), 0);
  EXPECT_EQ(out, expected);
}

}  // namespace
}  // namespace tare::workflow
