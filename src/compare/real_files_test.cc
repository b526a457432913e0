// The comparison on outputs of real systems, against facts computed by independent code
// (tests/data/real/README.md).

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "base/env.h"
#include "base/json.h"
#include "compare/open.h"

namespace tare::compare {
namespace {

const std::string kReal = TARE_SOURCE_DIR "/tests/data/real/";

Json ReadFacts(const std::string& name) {
  return ParseJson(Env::Real()->ReadFile(kReal + name).value()).value();
}

std::string ArmPath(const std::string& arm) {
  const bool rollout = arm.rfind("bi0", 0) == 0;
  return kReal + (rollout ? "rollouts/" : "trainer/") + arm + ".safetensors";
}

// All 406 pairs of 29 arms: vLLM rollouts, transformers and verl.
TEST(RealFiles, LogprobsOfEveryPairOfArmsMatchTheFacts) {
  ThreadPool pool(2);
  std::map<std::string, Input> inputs;
  const Json facts = ReadFacts("logprob_facts.json");
  for (const auto& [arm, unused] : facts["arms"].items()) {
    inputs.emplace(arm, OpenInput(Env::Real(), ArmPath(arm)).value());
    ASSERT_EQ(inputs.at(arm).kind, InputKind::kLogprobs);
  }
  int pairs = 0;
  for (const Json& fact : facts["pairs"]) {
    const std::string a = fact["a"], b = fact["b"];
    SCOPED_TRACE(a + " against " + b);
    const Report r = DiffInputs(inputs.at(a), inputs.at(b), {.pool = &pool}).value();
    const int64_t n = fact["n"], equal = fact["bit_equal"];
    ASSERT_EQ(r.paired_tokens, n);
    ASSERT_EQ(r.totals.compared, n);
    ASSERT_EQ(r.totals.mismatches, n - equal);
    ASSERT_EQ(r.totals.max_ulp, fact["max_ulp"].get<uint64_t>());
    ASSERT_EQ(r.totals.max_abs, fact["max_abs"].get<double>());
    ASSERT_NEAR(r.totals.sum_abs / static_cast<double>(n), fact["mean_abs"].get<double>(), 1e-12);
    ASSERT_EQ(r.same_sequences, fact["sequences_same_tokens"].get<int64_t>());
    const bool same_tokens = r.same_sequences == 16;
    ASSERT_EQ(r.verdict, equal == n && same_tokens ? Verdict::kPass : Verdict::kFail);
    ASSERT_EQ(r.unpaired.empty(), same_tokens);
    ASSERT_EQ(r.units.at(0).counts.first.index, fact["first_unequal_index"].is_null()
                                                    ? -1
                                                    : fact["first_unequal_index"].get<int64_t>());
    const Json parts = fact.value("token_divergence", Json::array());
    ASSERT_EQ(r.divergences.size(), parts.size());
    for (size_t i = 0; i < parts.size(); ++i) {
      EXPECT_EQ(r.divergences[i].sequence, std::to_string(parts[i][0].get<int>()));
      EXPECT_EQ(r.divergences[i].index, parts[i][1].get<int64_t>());
    }
    ++pairs;
  }
  EXPECT_EQ(pairs, 406);
}

// Tokens that only one side has may be declared out of scope; then the paired ones decide.
TEST(RealFiles, UnpairedTokensFailUnlessTheyAreScope) {
  ThreadPool pool(1);
  const Input a = OpenInput(Env::Real(), ArmPath("bi0.batch1")).value();
  const Input b = OpenInput(Env::Real(), ArmPath("bi0.decode_batch1")).value();
  Report r = DiffInputs(a, b, {.pool = &pool}).value();
  EXPECT_EQ(r.verdict, Verdict::kFail);
  EXPECT_EQ(r.reason, "unpaired-tokens");
  r = DiffInputs(a, b, {.paired_only = true, .pool = &pool}).value();
  EXPECT_EQ(r.verdict, Verdict::kPass);
  EXPECT_TRUE(r.scope.paired_only);
  EXPECT_EQ(r.totals.compared, 557);
}

TEST(RealFiles, LayerTensorsMatchTheFacts) {
  ThreadPool pool(2);
  const Json facts = ReadFacts("layers/facts.json");
  int bitwise = 0, rounded = 0, sliced = 0;
  for (const Json& fact : facts["pairs"]) {
    const std::string a = fact["a"], b = fact["b"], how = fact["compared"];
    SCOPED_TRACE(a + " against " + b);
    Input x = OpenInput(Env::Real(), kReal + "layers/" + a + ".safetensors").value();
    Input y = OpenInput(Env::Real(), kReal + "layers/" + b + ".safetensors").value();
    const bool round = how.find("rounded") != std::string::npos;
    if (how.find("last row") != std::string::npos) {
      std::vector<std::pair<std::string, Tensor>> last;
      for (size_t i = 0; i < x.tensors->entries().size(); ++i) {
        const Tensor t = x.tensors->Load(i).value();
        last.emplace_back(x.tensors->entries()[i].name, t.Slice(t.dim(0) - 1, t.dim(0)).value());
      }
      x.tensors = std::make_unique<MemorySource>("last row", std::move(last));
      ++sliced;
    } else {
      ++(round ? rounded : bitwise);
    }
    const Report r = DiffInputs(x, y, {.round = round, .pool = &pool}).value();
    std::map<std::string, const Unit*> units;
    for (const Unit& u : r.units) units[u.name] = &u;
    std::string first;
    for (const Json& t : fact["tensors"]) {
      SCOPED_TRACE(t["name"].get<std::string>());
      const Unit& u = *units.at(t["name"]);
      const BitCounts& c = round ? u.diagnosis_counts : u.counts;
      EXPECT_EQ(c.compared, t["elements"].get<int64_t>());
      EXPECT_EQ(c.mismatches, t["unequal"].get<int64_t>());
      EXPECT_EQ(c.max_ulp, t["max_ulp"].get<uint64_t>());
      EXPECT_EQ(c.max_abs, t["max_abs"].get<double>());
      if (!round && t.contains("first_index")) {
        EXPECT_EQ(u.first_coordinate, t["first_index"].get<std::vector<int64_t>>());
      }
    }
    if (round) {
      // A conversion is a diagnosis: the verdict stays with the bits.
      EXPECT_EQ(r.verdict, Verdict::kInconclusive);
      EXPECT_EQ(r.reason, "dtype-differs");
    } else {
      EXPECT_EQ(r.differing_units, fact["unequal_tensors"].get<int64_t>());
      EXPECT_EQ(r.verdict, r.differing_units == 0 ? Verdict::kPass : Verdict::kFail);
      EXPECT_EQ(r.first_failing,
                fact["first_unequal"].is_null() ? "" : fact["first_unequal"].get<std::string>());
    }
  }
  EXPECT_EQ(bitwise, 4);
  EXPECT_EQ(rounded, 1);
  EXPECT_EQ(sliced, 1);
}

TEST(RealFiles, GradientsOfShardingAndOfBatchCuts) {
  ThreadPool pool(2);
  const auto open = [](const std::string& arm) {
    return OpenInput(Env::Real(), kReal + "fsdp/grad1." + arm + ".safetensors").value();
  };
  const Report same = DiffInputs(open("accum_2x2"), open("fsdp2_fp32"), {.pool = &pool}).value();
  EXPECT_EQ(same.verdict, Verdict::kPass);
  EXPECT_EQ(same.totals.compared, 192 * 576 + 576);
  const Report cut = DiffInputs(open("one_batch"), open("fsdp2_fp32"), {.pool = &pool}).value();
  EXPECT_EQ(cut.verdict, Verdict::kFail);
  for (const Unit& u : cut.units) {
    if (u.name != "model.layers.0.self_attn.k_proj.weight") continue;
    EXPECT_EQ(u.counts.compared - u.counts.mismatches, 8945);
    EXPECT_NEAR(u.counts.max_abs, 5.24e-9, 0.005e-9);
  }
}

}  // namespace
}  // namespace tare::compare
