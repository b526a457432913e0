// GEN-07, GEN-23, GEN-31, RL-10, SHAPE-07, DOC-10: the report says what the log shows, apart for
// the four acceptances, with its source beside every number, and nothing a hand added passes lint.

#include "workflow/report/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/json.h"
#include "workflow/claims/claim.h"
#include "workflow/testing_task.h"

namespace tare::workflow {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class ReportTest : public ::testing::Test {
 protected:
  TaskReport Collect() {
    view_ = *ReadTask(&env_, dir_ / "t");
    auto report = CollectReport(&env_, view_);
    EXPECT_TRUE(report.ok()) << report.status().ToString();
    return *std::move(report);
  }
  static RunSpec Pass(const std::string& step, EvidenceKind kind) {
    RunSpec spec;
    spec.step = step;
    spec.kind = kind;
    return spec;
  }

  TestEnv env_;
  TempDir dir_;
  TaskView view_;
};

size_t Count(std::string_view text, std::string_view what) {
  size_t count = 0;
  for (size_t at = text.find(what); at != std::string_view::npos; at = text.find(what, at + 1)) {
    ++count;
  }
  return count;
}

// GEN-07: all sixteen combinations of present and absent give exactly those four states.
TEST_F(ReportTest, SixteenCombinationsGiveFourStatesAndNoFifth) {
  for (int bits = 0; bits < 16; ++bits) {
    const TempDir here;
    const std::string path = here / "t";
    {
      auto task = InitTask(&env_, path);
      if ((bits & 1) != 0) {
        AddRun(task.get(), Pass("C3", EvidenceKind::kE5));
        AddRun(task.get(), Pass("C5", EvidenceKind::kE6));
      }
      if ((bits & 2) != 0) AddRun(task.get(), Pass("C7", EvidenceKind::kE7));
      if ((bits & 4) != 0) AddRun(task.get(), Pass("C8", EvidenceKind::kE9));
      if ((bits & 8) != 0) AddRun(task.get(), Pass("C10", EvidenceKind::kE10));
    }
    const TaskView view = *ReadTask(&env_, path);
    const TaskReport report = *CollectReport(&env_, view);
    ASSERT_EQ(report.acceptances.size(), 4u);
    for (int i = 0; i < 4; ++i) {
      const Acceptance& a = report.acceptances[static_cast<size_t>(i)];
      EXPECT_EQ(a.verdict, (bits >> i & 1) != 0 ? Verdict::kPass : Verdict::kNotCovered)
          << bits << " " << a.name << ": " << a.detail;
    }
    for (const std::string& text : {ReportMarkdown(report, ""), ReportHtml(report, "")}) {
      EXPECT_THAT(text, Not(HasSubstr("overall")));
      EXPECT_THAT(text, Not(HasSubstr("all green")));
    }
    EXPECT_THAT(LintReport(ReportMarkdown(report, ""), view.state), IsEmpty()) << bits;
  }
}

TEST_F(ReportTest, HalfOfAnAcceptanceIsNotIt) {
  {
    auto task = InitTask(&env_, dir_ / "t");
    AddRun(task.get(), Pass("C5", EvidenceKind::kE6));
    // A quality run filed as performance evidence at C10 is E9, not E10.
    AddRun(task.get(), Pass("C10", EvidenceKind::kE9));
  }
  const TaskReport report = Collect();
  EXPECT_EQ(report.acceptances[0].verdict, Verdict::kNotCovered);  // C3 is missing
  EXPECT_THAT(report.acceptances[0].detail, HasSubstr("E5 at C3"));
  EXPECT_EQ(report.acceptances[2].verdict, Verdict::kPass);
  EXPECT_EQ(report.acceptances[3].verdict, Verdict::kNotCovered);
}

TEST_F(ReportTest, ALaterFailureClosesAnAcceptanceAndStaysVisible) {
  {
    auto task = InitTask(&env_, dir_ / "t");
    AddRun(task.get(), Pass("C7", EvidenceKind::kE7));
    RunSpec bad = Pass("C7", EvidenceKind::kE7);
    bad.conclusion = FailConclusion();
    bad.candidate = "tile-64";
    AddRun(task.get(), bad);
  }
  const TaskReport report = Collect();
  EXPECT_EQ(report.acceptances[1].verdict, Verdict::kFail);
  EXPECT_EQ(report.acceptances[1].reason, "bit-mismatch");
  ASSERT_EQ(report.failed.size(), 1u);
  EXPECT_THAT(report.failed[0].first, HasSubstr("candidate tile-64"));
}

// Numbers from a comparison, a receipt and bench results, each with its artifact.
TEST_F(ReportTest, NumbersComeFromArtifactsAndLinkToThem) {
  const std::string diff =
      R"({"schema":"tare.diff/1","a":"A","b":"B","verdict":"fail","reason":"bit-mismatch",)"
      R"("why":"3 of 8 differ","totals":{"compared":8,"mismatches":3},)"
      R"("tensors":[{"name":"logprobs","verdict":"fail","reason":"bit-mismatch",)"
      R"("counts":{"compared":8,"mismatches":3},"first_at":"0 token 4",)"
      R"("first_mismatch":{"a":"bf800000","b":"bf800001","index":4}}],)"
      R"("by_position":[{"begin":0,"end":1,"compared":4,"mismatches":0,"max_abs":0.0},)"
      R"({"begin":1,"end":2,"compared":4,"mismatches":3,"max_abs":1.2e-7}]})";
  const std::string receipt =
      R"({"schema":"tare.receipt/1","rounds":[{"reward":{"mean":0.25},"rollout":{"started_ns":0,)"
      R"("ended_ns":2000000000}},{"reward":{"mean":0.5},"rollout":{}}],)"
      R"("updates":[{"gradient_norm":1.5,"started_ns":0,"ended_ns":1000000000}]})";
  const std::string judged =
      R"({"schema":"tare.gate_judgement/1","gate":"C5","verdict":"fail","reason":"path-missing",)"
      R"("findings":[{"row":"C5-04","verdict":"pass","reason":"","detail":"x"},)"
      R"({"row":"C5-09","verdict":"fail","reason":"path-missing","detail":"train is missing"}],)"
      R"("scope":{"not_covered":[{"row":"C5-11","what":"tp2","next":""}]}})";
  {
    auto task = InitTask(&env_, dir_ / "t");
    RunSpec spec = Pass("C5", EvidenceKind::kE6);
    spec.raw = {{"diff.json", diff}, {"loop/receipt.json", receipt}, {"judgement.json", judged}};
    AddRun(task.get(), spec);
    RunSpec bench = Pass("C10", EvidenceKind::kE10);
    bench.candidate = "invariant";
    for (const char* name : {"good_c1.json", "good_c2.json", "good_c4.json"}) {
      bench.raw.emplace_back(name, *Env::Real()->ReadFile(std::string(TARE_SOURCE_DIR) +
                                                          "/tests/data/real/serving/" + name));
    }
    AddRun(task.get(), bench);
  }
  const TaskReport report = Collect();
  ASSERT_EQ(report.mismatches.size(), 2u);
  EXPECT_EQ(report.mismatches[0].compared, 8);
  EXPECT_EQ(report.mismatches[1].mismatches, 3);
  EXPECT_EQ(report.mismatches[1].first, "0 token 4: bf800000 / bf800001");
  std::vector<std::string> titles;
  for (const Plot& p : report.plots) titles.push_back(p.title);
  EXPECT_THAT(titles,
              ::testing::UnorderedElementsAre("Logprob difference by position",
                                              "Mean reward by version", "Gradient norm by update",
                                              "Time by version", "Throughput over concurrency"));
  const Plot& throughput = report.plots.back();
  ASSERT_EQ(throughput.series.size(), 1u);
  EXPECT_EQ(throughput.series[0].name, "invariant");
  ASSERT_EQ(throughput.series[0].points.size(), 3u);
  EXPECT_EQ(throughput.series[0].points[2].first, 4);
  ASSERT_EQ(report.judgements.size(), 1u);
  EXPECT_EQ(report.judgements[0].passed, 1);
  EXPECT_THAT(report.not_covered, Contains("C5 C5-11: tp2"));

  const std::string markdown = ReportMarkdown(report, "../t/"), html = ReportHtml(report, "../t/");
  EXPECT_THAT(LintReport(markdown, view_.state), IsEmpty());
  // Every link leads to an artifact of the log.
  size_t links = 0;
  for (size_t at = html.find("href=\"../t/"); at != std::string::npos;
       at = html.find("href=\"../t/", at + 1)) {
    const size_t begin = at + 11;
    EXPECT_NE(view_.state.FindArtifact(html.substr(begin, html.find('"', begin) - begin)), nullptr);
    ++links;
  }
  EXPECT_GE(links, 12u);
  for (const char* outside : {"<script", "http:", "https:", "@import", "url("}) {
    EXPECT_THAT(html, Not(HasSubstr(outside)));
  }
  EXPECT_EQ(Count(html, "<svg"), 5u);
}

TEST_F(ReportTest, AChangedArtifactContributesNothing) {
  std::string path;
  {
    auto task = InitTask(&env_, dir_ / "t");
    RunSpec spec = Pass("C5", EvidenceKind::kE6);
    spec.raw = {
        {"diff.json", R"({"schema":"tare.diff/1","totals":{"compared":8,"mismatches":0}})"}};
    const std::string id = AddRun(task.get(), spec);
    path = dir_ / ("t/C5/" + id + "/diff.json");
  }
  EXPECT_EQ(Collect().mismatches.size(), 1u);
  ASSERT_TRUE(env_.WriteFileAtomic(
                      path, R"({"schema":"tare.diff/1","totals":{"compared":9,"mismatches":0}})")
                  .ok());
  const TaskReport report = Collect();
  EXPECT_THAT(report.mismatches, IsEmpty());
  ASSERT_EQ(report.skipped.size(), 1u);
  EXPECT_THAT(report.skipped[0], HasSubstr("not those of the log"));
}

TEST_F(ReportTest, HostileNamesStayText) {
  {
    auto task = InitTask(&env_, dir_ / "t");
    RunSpec bad = Pass("C3", EvidenceKind::kE5);
    bad.conclusion = FailConclusion();
    bad.candidate = "<img src=x onerror=alert(1)> | [x](http://e)";
    AddRun(task.get(), bad);
  }
  const TaskReport report = Collect();
  const std::string html = ReportHtml(report, ""), markdown = ReportMarkdown(report, "");
  EXPECT_THAT(html, Not(HasSubstr("<img")));
  EXPECT_THAT(html, HasSubstr("&lt;img"));
  EXPECT_THAT(markdown, Not(HasSubstr("[x](")));
  EXPECT_THAT(LintReport(markdown, view_.state), IsEmpty());
}

// DOC-10, RL-10, SHAPE-07: what a hand adds is found, with the footer as it was and made again.
TEST_F(ReportTest, LintFindsWhatAHandAdded) {
  {
    auto task = InitTask(&env_, dir_ / "t");
    AddRun(task.get(), Pass("C3", EvidenceKind::kE5));
  }
  const TaskReport report = Collect();
  const std::string markdown = ReportMarkdown(report, "");
  ASSERT_THAT(LintReport(markdown, view_.state), IsEmpty());
  const std::string body = SplitFooter(markdown)->first;
  const std::string unknown = "run 01890000-0000-7000-8000-000000000000";
  const auto after = [&](const std::string& heading, const std::string& line) {
    std::string text = body;
    const size_t at = text.find("## " + heading + "\n\n");
    EXPECT_NE(at, std::string::npos) << heading;
    text.insert(at + heading.size() + 5, line + "\n");
    return text;
  };
  const auto without = [&](const std::string& heading) {
    std::string text = body;
    const size_t at = text.find("## " + heading);
    return text.erase(at, text.find("\n## ", at) + 1 - at);
  };
  const std::vector<std::pair<std::string, std::string>> edits = {
      {after("Scope", "- E5 at C3: shape 8192; everything"), "without a run"},
      {after("Scope", "- E5 at C3: shape 8192; " + unknown), "without a run"},
      {after("Evidence by kind", "| E9 | quality | C8 | pass | | | | good |"), "without a run"},
      {after("Curves", "- it got faster"), "without a run"},
      {after("Acceptances", "Everything passed."), "neither a list item"},
      {after("Acceptances", "| Training quality | x | pass | | | - |"), "without a run"},
      {after("Limits", "- The engine is batch-invariant."), "more than runs can show"},
      {after("Limits", "- RL requires bitwise equality."), "more than runs can show"},
      {after("Limits", "## Summary"), "no section"},
      {"All good.\n" + body, "before the first section"},
      {without("Not covered"), "\"Not covered\" is missing"},
      {without("Limits\n"), "missing"},
      {without("Failed, stale"), "missing"},
  };
  for (const auto& [text, what] : edits) {
    const std::string sealed = WithFooter(text, {report.events, report.head});
    EXPECT_THAT(LintReport(sealed, view_.state), Contains(HasSubstr(what))) << text.substr(0, 400);
  }
  std::string unsealed = markdown;
  unsealed.replace(unsealed.find("pass"), 4, "fail");
  EXPECT_THAT(LintReport(unsealed, view_.state), Contains(HasSubstr("SHA-256 in its footer")));
}

// BASE-03, BASE-05: after a change of contracts no number of before is shown for after, a hand that
// copies one forward is found, and the report says that old outputs are not promised.
TEST_F(ReportTest, NumbersOfAnEarlierArithmeticDoNotCarryOver) {
  std::string before;
  {
    auto task = InitTask(&env_, dir_ / "t");
    for (const char* contracts : {"1", "2"}) {
      RunSpec spec = Pass("C5", EvidenceKind::kE6);
      spec.raw = {{"diff.json", fmt::format(R"({{"schema":"tare.diff/1","a":"A{0}","b":"B",)"
                                            R"("totals":{{"compared":{0}00,"mismatches":0}}}})",
                                            contracts)},
                  {"evidence.json", "{\"schema\":\"x\"}\n"}};
      spec.dependencies = {{DependencyType::kContract, "all", std::string(64, contracts[0])}};
      const std::string run = AddRun(task.get(), spec);
      if (before.empty()) {
        before = run;
        const TaskReport alone = Collect();
        EXPECT_EQ(alone.mismatches.size(), 1u);
        EXPECT_THAT(alone.not_covered, Not(Contains(kChangeSentence)));
      }
    }
  }
  const TaskReport report = Collect();
  ASSERT_EQ(report.mismatches.size(), 1u);
  EXPECT_EQ(report.mismatches[0].compared, 200);
  EXPECT_THAT(report.not_covered, Contains(kChangeSentence));
  const std::string markdown = ReportMarkdown(report, "");
  EXPECT_THAT(LintReport(markdown, view_.state), IsEmpty());
  std::string copied = SplitFooter(markdown)->first;
  const std::string heading = "## Comparisons\n\n";
  copied.insert(copied.find(heading) + heading.size(),
                "| A1 against B | 100 | 0 |  | pass | run " + before + " |\n");
  EXPECT_THAT(LintReport(WithFooter(copied, {report.events, report.head}), view_.state),
              Contains(HasSubstr("earlier arithmetic")));
}

// GEN-23.
TEST_F(ReportTest, InferenceOnlySaysThatTheTrainingLoopIsNotAccepted) {
  std::string toml = TestToml();
  toml.replace(toml.find("name = \"small\"\n"), 15,
               "name = \"small\"\nscope = \"inference-only\"\n");
  InitTask(&env_, dir_ / "t", toml);
  const TaskReport report = Collect();
  EXPECT_TRUE(report.inference_only);
  EXPECT_THAT(ReportMarkdown(report, ""), HasSubstr("training loop not accepted"));
}

}  // namespace
}  // namespace tare::workflow
