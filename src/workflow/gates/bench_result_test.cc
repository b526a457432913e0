// Results of real vLLM clients, good and bad, and planted faults: the right verdict for each.

#include "workflow/gates/bench_result.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace tare::workflow {
namespace {

const std::string kDir = TARE_SOURCE_DIR "/tests/data/real/serving/";

std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  EXPECT_TRUE(in.good()) << path;
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

BenchResult Load(const std::string& name) {
  auto r = ParseBenchResult(ReadAll(kDir + name + ".json"));
  EXPECT_TRUE(r.ok()) << name << ": " << r.status().ToString();
  r->name = name;
  return *r;
}

CacheCounters Counters(const std::string& name) {
  auto c = ParseCacheCounters(ReadAll(kDir + "metrics_" + name + ".txt"));
  EXPECT_TRUE(c.ok()) << name << ": " << c.status().ToString();
  return *c;
}

BenchVerdict Judge(const std::vector<std::string>& names, const char* before, const char* after,
                   const BenchRequirement& requirement) {
  std::vector<BenchResult> results;
  for (const auto& name : names) results.push_back(Load(name));
  return JudgeBench(results, Counters(before), Counters(after), requirement);
}

#define EXPECT_SHOWS(judged, wanted, code)                               \
  do {                                                                   \
    const BenchVerdict judged_ = (judged);                               \
    EXPECT_EQ(VerdictName(judged_.verdict), wanted) << judged_.ToJson(); \
    EXPECT_EQ(judged_.reason, code) << judged_.ToJson();                 \
  } while (false)

const BenchRequirement kLong{256, 32, {}, 2, 32};

// C1-10, C10-10: the clean runs of both clients pass, the harmless look-alike too: it repeats its
// prompts, but no cache block is short enough to be hit.
TEST(BenchResultTest, CleanRunsPass) {
  EXPECT_SHOWS(Judge({"good_c1", "good_c2", "good_c4"}, "0_start", "1_after_good",
                     {64, 32, {1, 2, 4}, 2, 32}),
               "pass", "");
  EXPECT_SHOWS(Judge({"good_long_c2"}, "1_after_good", "2_after_long", kLong), "pass", "");
  EXPECT_SHOWS(Judge({"same_prompts_b128_first"}, "b128_0_start", "b128_1_after_first",
                     {64, 32, {}, 2, 128}),
               "pass", "");
  EXPECT_SHOWS(Judge({"same_prompts_b128_second"}, "b128_1_after_first", "b128_2_after_second",
                     {64, 32, {}, 2, 128}),
               "pass", "");
  EXPECT_SHOWS(Judge({"rust_good_c1", "rust_good_c2"}, "rust_0", "rust_1", {64, 32, {1, 2}, 0, 0}),
               "pass", "");
}

// C1-10: nothing in these result files shows the warm cache; the counters do.
TEST(BenchResultTest, WarmCacheIsRefused) {
  EXPECT_SHOWS(Judge({"bad_warm_prefix"}, "2_after_long", "3_after_warm", kLong), "refused",
               "warm-cache");
  EXPECT_SHOWS(Judge({"rust_bad_warm_c2"}, "rust_1", "rust_2", {64, 32, {}, 0, 0}), "refused",
               "warm-cache");
  // Undeclared warm-ups: the same hits and look-ups have no explanation.
  EXPECT_SHOWS(Judge({"good_long_c2"}, "1_after_good", "2_after_long", {256, 32, {}, 0, 0}),
               "refused", "warm-cache");
}

// C1-10: outputs fall short of the request because end-of-sequence was honoured.
TEST(BenchResultTest, ShortOutputsAreRefused) {
  const auto shown =
      Judge({"bad_eos_not_ignored"}, "3_after_warm", "4_after_eos", {0, 32, {}, 0, 0});
  EXPECT_SHOWS(shown, "refused", "wrong-length");
  ASSERT_EQ(shown.findings.size(), 2u);
  EXPECT_NE(shown.findings[0].detail.find("8 of 24 requests"), std::string::npos)
      << shown.findings[0].detail;
  EXPECT_EQ(shown.findings[1].reason, "warm-cache");
  EXPECT_SHOWS(Judge({"rust_good_c2", "rust_good_c1"}, "rust_0", "rust_1", {8192, 1024, {}, 0, 0}),
               "refused", "wrong-length");
}

TEST(BenchResultTest, GapsAreNoPass) {
  EXPECT_SHOWS(
      Judge({"rust_good_c1", "rust_good_c2"}, "rust_0", "rust_1", {64, 32, {1, 2, 4}, 0, 0}),
      "not-covered", "point-missing");
  EXPECT_SHOWS(Judge({"rust_good_c2"}, "rust_0", "rust_1", {64, 32, {}, 0, 0}), "inconclusive",
               "counters-disagree");
  EXPECT_SHOWS(Judge({"rust_good_c2"}, "rust_2", "rust_1", {64, 32, {}, 0, 0}), "inconclusive",
               "counters-disagree");
  const std::vector<BenchResult> one = {Load("rust_good_c1")};
  EXPECT_SHOWS(JudgeBench(one, std::nullopt, std::nullopt, {64, 32, {}, 0, 0}), "inconclusive",
               "counters-missing");
  const std::vector<BenchResult> twice = {one[0], one[0]};
  EXPECT_SHOWS(JudgeBench(twice, Counters("rust_0"), Counters("rust_1"), {64, 32, {}, 0, 0}),
               "refused", "duplicate-name");
}

// One planted change each in a clean result, counters as they were.
TEST(BenchResultTest, EditedResultsAreCaught) {
  const auto shows = [](const auto& change, std::string_view code) {
    std::vector<BenchResult> results = {Load("rust_good_c1"), Load("rust_good_c2")};
    change(results[0]);
    const auto shown =
        JudgeBench(results, Counters("rust_0"), Counters("rust_1"), {0, 0, {}, 0, 0});
    EXPECT_NE(shown.verdict, Verdict::kPass) << code;
    EXPECT_TRUE(std::any_of(shown.findings.begin(), shown.findings.end(),
                            [&](const BenchFinding& f) { return f.reason == code; }))
        << code << ": " << shown.ToJson();
  };
  shows([](BenchResult& r) { r.output_lens[3] = 31; }, "result-inconsistent");
  shows([](BenchResult& r) { r.total_input_tokens += 64; }, "result-inconsistent");
  shows([](BenchResult& r) { r.output_throughput *= 1.01; }, "result-inconsistent");
  shows([](BenchResult& r) { r.mean_ttft_ms *= 0.99; }, "result-inconsistent");
  shows([](BenchResult& r) { r.mean_e2el_ms *= 0.99; }, "result-inconsistent");
  shows([](BenchResult& r) { r.ttfts.pop_back(); }, "result-inconsistent");
  shows([](BenchResult& r) { r.failed = 1; }, "requests-failed");
  shows([](BenchResult& r) { r.completed = 15; }, "requests-failed");
  shows([](BenchResult& r) { r.errors = 1; }, "requests-failed");
  shows([](BenchResult& r) { r.num_prompts = 0; }, "nothing-compared");
  shows(
      [](BenchResult& r) {
        r.input_lens.clear();
        r.output_lens.clear();
        r.ttfts.clear();
      },
      "no-detail");
}

TEST(BenchResultTest, HostileFilesAreErrors) {
  for (const char* text : {"", "[]", "{}", "{\"backend\":1}",
                           "{\"backend\":\"x\",\"model_id\":\"m\",\"num_prompts\":-1}"}) {
    EXPECT_FALSE(ParseBenchResult(text).ok()) << text;
  }
  auto root = ParseJson(ReadAll(kDir + "rust_good_c1.json"));
  ASSERT_TRUE(root.ok());
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, Json>>{{"duration", 0},
                                                 {"duration", "1"},
                                                 {"completed", 1.5},
                                                 {"output_lens", Json::array({-1})},
                                                 {"input_lens", Json::array({1e30})},
                                                 {"ttfts", Json::array({"fast"})},
                                                 {"errors", Json::array({1})}}) {
    Json changed = *root;
    changed[key] = value;
    auto r = ParseBenchResult(changed.dump());
    EXPECT_EQ(r.status().code(), Code::kInvalidArgument) << key << value;
    EXPECT_NE(r.status().message().find(key), std::string::npos) << r.status().message();
  }
  const std::string q = "vllm:prefix_cache_queries_total{e=\"0\"} 8.0\n";
  const std::string h = "vllm:prefix_cache_hits_total{e=\"0\"} 4.0\n";
  EXPECT_TRUE(ParseCacheCounters(q + h).ok());
  EXPECT_FALSE(ParseCacheCounters(q).ok());
  EXPECT_FALSE(ParseCacheCounters(h).ok());
  EXPECT_FALSE(ParseCacheCounters(q + h + q).ok()) << "one series twice";
  for (const char* value : {"nan", "-1", "0.5", "1e300", "8 ", "x", ""}) {
    EXPECT_FALSE(ParseCacheCounters(q + "vllm:prefix_cache_hits_total " + value).ok()) << value;
  }
}

ArmRecord Arm(const char* value, std::vector<std::string> kernels) {
  return {std::string("BI=") + value,
          "VLLM_BATCH_INVARIANT",
          value,
          std::move(kernels),
          "sha256:1",
          {{"vllm", "a1"}},
          "w1"};
}

// H20, GEN-29: the pair is judged by what the arms resolved to; their labels count for nothing.
TEST(BenchPairTest, RepeatedArmIsNoPair) {
  const BenchResult a = Load("same_prompts_b128_first"), b = Load("same_prompts_b128_second");
  ArmRecord off = Arm("0", {"gemm"}), on = Arm("1", {"gemm_bi"});
  const auto valid = JudgePair(off, a, on, b);
  EXPECT_SHOWS(valid, "pass", "");
  ASSERT_TRUE(valid.ratio.has_value());
  EXPECT_DOUBLE_EQ(*valid.ratio, b.output_throughput / a.output_throughput);

  ArmRecord labelled = off;
  labelled.label = "BI=1";
  const auto repeated = JudgePair(off, a, labelled, b);
  EXPECT_SHOWS(repeated, "refused", "pair-invalid");
  EXPECT_FALSE(repeated.ratio.has_value());
  EXPECT_EQ(repeated.findings.size(), 2u) << "the switch and the kernels";

  const auto invalid = [&](const auto& change) {
    ArmRecord other = on;
    BenchResult result = b;
    change(other, result);
    const auto shown = JudgePair(off, a, other, result);
    EXPECT_SHOWS(shown, "refused", "pair-invalid");
    EXPECT_FALSE(shown.ratio.has_value());
  };
  invalid([](ArmRecord& r, BenchResult&) { r.kernels = {"gemm"}; });
  invalid([](ArmRecord& r, BenchResult&) { r.switch_value = "0"; });
  invalid([](ArmRecord& r, BenchResult&) { r.switch_name = "OTHER"; });
  invalid([](ArmRecord& r, BenchResult&) { r.image = "sha256:2"; });
  invalid([](ArmRecord& r, BenchResult&) { r.commits["vllm"] = "a2"; });
  invalid([](ArmRecord& r, BenchResult&) { r.workload = "w2"; });
  invalid([](ArmRecord&, BenchResult& r) { r.max_concurrency = 4; });
  invalid([&](ArmRecord&, BenchResult& r) { r = a; });
}

TEST(BenchPairTest, ArmRecordsAreReadInFull) {
  const std::string good =
      R"({"schema":"tare.arm/1","label":"BI=0","switch":"VLLM_BATCH_INVARIANT","value":"0",)"
      R"("kernels":["b","a","a"],"image":"sha256:1","commits":{"vllm":"a1"},"workload":"w"})";
  auto arm = ParseArmRecord(good);
  ASSERT_TRUE(arm.ok()) << arm.status().ToString();
  EXPECT_EQ(arm->kernels, (std::vector<std::string>{"a", "b"}));
  auto root = ParseJson(good);
  ASSERT_TRUE(root.ok());
  for (const auto& [key, value] : root->items()) {
    for (const Json& wrong : {Json(), Json(""), Json(7), Json::array({""}), Json::object()}) {
      Json changed = *root;
      changed[key] = wrong;
      EXPECT_FALSE(ParseArmRecord(changed.dump()).ok()) << key << " " << wrong;
    }
    Json changed = *root;
    changed.erase(key);
    EXPECT_FALSE(ParseArmRecord(changed.dump()).ok()) << key;
  }
  (*root)["force"] = true;
  EXPECT_FALSE(ParseArmRecord(root->dump()).ok());
}

}  // namespace
}  // namespace tare::workflow
