// What holds for every judge: the honest document passes with a scope, and whatever is missing,
// unknown or mistyped in it is refused with its path.

#include "workflow/gates/judge.h"

#include <gtest/gtest.h>

#include "workflow/gates/table.h"
#include "workflow/gates/testing_evidence_c0_c4.h"

namespace tare::workflow {
namespace {

std::vector<std::string> Judged() {
  std::vector<std::string> out;
  for (const std::string_view gate : kGateIds) {
    if (FindJudge(gate) == nullptr) continue;
    std::ifstream in(TARE_SOURCE_DIR "/tests/data/gates/" + std::string(gate) + ".json");
    if (in.good()) out.emplace_back(gate);
  }
  return out;
}

// Every place of a document, as JSON pointers.
void Places(const Json& value, const std::string& at, std::vector<std::string>* out) {
  if (!at.empty()) out->push_back(at);
  const auto escape = [](std::string key) {
    std::string text;
    for (const char c : key) text += c == '~' ? "~0" : c == '/' ? "~1" : std::string(1, c);
    return text;
  };
  if (value.is_object()) {
    for (const auto& [key, item] : value.items()) Places(item, at + "/" + escape(key), out);
  } else if (value.is_array()) {
    for (size_t i = 0; i < value.size(); ++i) Places(value[i], fmt::format("{}/{}", at, i), out);
  }
}

TEST(JudgeTest, HonestEvidencePassesWithAScope) {
  ASSERT_FALSE(Judged().empty());
  for (const std::string& gate : Judged()) {
    const GateJudgement got = FindJudge(gate)(HonestEvidence(gate));
    EXPECT_EQ(got.verdict, Verdict::kPass) << got.ToJson().dump(1);
    EXPECT_EQ(got.gate, gate);
    EXPECT_TRUE(got.reason.empty());
    EXPECT_FALSE(got.findings.empty());
    const Result<Scope> scope = Scope::FromJson(got.scope.at("covers"));
    ASSERT_TRUE(scope.ok()) << gate << " " << scope.status().ToString();
    EXPECT_FALSE(scope->empty()) << gate;
    for (const GateFinding& f : got.findings) EXPECT_FALSE(f.row.empty() || f.detail.empty());
  }
}

// Each key taken away, each replaced by a value of another type: never a pass, never a crash.
TEST(JudgeTest, NoKeyMayBeMissingOrMistyped) {
  for (const std::string& gate : Judged()) {
    const GateJudge judge = FindJudge(gate);
    const Json honest = HonestEvidence(gate);
    std::vector<std::string> places;
    Places(honest, "", &places);
    EXPECT_GT(places.size(), 20u) << gate;
    for (const std::string& place : places) {
      if (std::isdigit(static_cast<unsigned char>(place.back())) == 0) {
        const GateJudgement got = judge(Without(honest, place));
        // A member of a map of names may go, if the gate asks for no particular one.
        if (got.verdict == Verdict::kPass) {
          const Json& parent = honest[Json::json_pointer(place).parent_pointer()];
          EXPECT_TRUE(parent.is_object()) << gate << " " << place;
          EXPECT_TRUE(parent.begin()->is_string() || parent.begin()->is_number())
              << gate << " passes without " << place;
        }
      }
      const bool object = honest[Json::json_pointer(place)].is_object();
      for (const Json& wrong : {Json(), Json::object({{"x", 1}}), Json::array({Json::array()})}) {
        if (object && wrong.is_object()) continue;  // may be a map of names
        const GateJudgement got = judge(With(honest, place, wrong));
        EXPECT_EQ(got.verdict, Verdict::kRefused) << gate << " " << place << " " << wrong;
        EXPECT_EQ(got.reason, "malformed-evidence") << gate << " " << place << " " << wrong;
      }
    }
  }
}

TEST(JudgeTest, AnUnknownKeyIsRefusedByItsPath) {
  for (const std::string& gate : Judged()) {
    const Json honest = HonestEvidence(gate);
    std::vector<std::string> places = {""};
    Places(honest, "", &places);
    for (const std::string& place : places) {
      if (!honest[Json::json_pointer(place)].is_object()) continue;
      Json doc = honest;
      doc[Json::json_pointer(place)]["force_pass"] = true;
      const GateJudgement got = FindJudge(gate)(doc);
      EXPECT_EQ(got.verdict, Verdict::kRefused) << gate << " " << place;
      EXPECT_EQ(got.reason, "malformed-evidence") << gate << " " << place;
      EXPECT_NE(got.findings[0].detail.find("force_pass"), std::string::npos)
          << got.findings[0].detail;
    }
  }
}

TEST(JudgeTest, OtherDocumentsAreRefused) {
  for (const std::string& gate : Judged()) {
    for (const Json& doc :
         {Json(), Json(1), Json("x"), Json::array(), Json::object(),
          Json{{"schema", "tare.gate." + gate + "/v2"}}, Json{{"schema", "tare.gate.C99/v1"}}}) {
      const GateJudgement got = FindJudge(gate)(doc);
      EXPECT_EQ(got.verdict, Verdict::kRefused) << gate << " " << doc;
      EXPECT_EQ(got.reason, "malformed-evidence") << gate << " " << doc;
    }
  }
  EXPECT_EQ(FindJudge("C11"), nullptr);
  EXPECT_EQ(FindJudge(""), nullptr);
}

// The pieces, on a judge made here.
GateJudgement Small(const Json& doc) {
  Judging j("X", doc);
  const Field f = j.root().At("body");
  const int64_t n = f.At("n").Int(1, 9);
  f.At("time").Time();
  f.At("bits").Bits32();
  f.At("names").StringSet(1);
  f.At("free").Any();
  if (!j.WellFormed()) return j.Finish();
  j.Require("X-01", n > 1, reason::kNoValidTokens, "n is 1");
  j.Require("X-02", n > 2, reason::kBitMismatch, "n is not above 2");
  j.Cover({{"s"}, {"t"}, {"d"}, {"m"}, {"p"}, {}});
  return j.Finish();
}
Json SmallDoc(const Json& n = 3) {
  return {{"schema", "tare.gate.X/v1"},
          {"body",
           {{"n", n},
            {"time", "2026-11-29T10:00:00.25Z"},
            {"bits", "0x3f800000"},
            {"names", {"a", "b"}},
            {"free", {{"anything", {1, {{"deep", nullptr}}}}}}}}};
}

TEST(JudgeTest, TheGravestFindingDecides) {
  EXPECT_EQ(Small(SmallDoc()).verdict, Verdict::kPass);
  EXPECT_EQ(Small(SmallDoc()).findings.size(), 2u);
  const GateJudgement two = Small(SmallDoc(2));
  EXPECT_EQ(two.verdict, Verdict::kFail);
  EXPECT_EQ(two.reason, "bit-mismatch");
  const GateJudgement one = Small(SmallDoc(1));  // inconclusive and fail
  EXPECT_EQ(one.verdict, Verdict::kFail);
  EXPECT_EQ(one.findings.size(), 2u);
  EXPECT_EQ(one.findings[0].reason, "no-valid-tokens");
  EXPECT_TRUE(one.scope.at("covers").empty());
}

TEST(JudgeTest, ReadersNameWhatIsWrong) {
  const auto detail = [](const char* pointer, Json value) {
    const GateJudgement got = Small(With(SmallDoc(), pointer, std::move(value)));
    EXPECT_EQ(got.reason, "malformed-evidence");
    return got.findings[0].detail;
  };
  EXPECT_EQ(detail("/body/n", 10), "evidence.body.n: is not a whole number from 1 to 9");
  EXPECT_EQ(detail("/body/n", 2.0), "evidence.body.n: is not a whole number from 1 to 9");
  EXPECT_EQ(detail("/body/n", UINT64_MAX), "evidence.body.n: is not a whole number from 1 to 9");
  EXPECT_EQ(detail("/body/names", {"a", "a"}), "evidence.body.names[1]: stands in the list twice");
  EXPECT_EQ(detail("/body/names", Json::array()),
            "evidence.body.names: has 0 entries, not 1 to 1048576");
  for (const char* time : {"", "2026-11-29", "2026-13-29T10:00:00Z", "2026-02-30T10:00:00Z",
                           "2026-11-29T24:00:00Z", "2026-11-29T10:00:00", "2026-11-29T10:00:00.Z",
                           "2026-11-29T10:00:00+01:00", "2026-11-29 10:00:00Z"}) {
    EXPECT_EQ(detail("/body/time", time),
              "evidence.body.time: is not a UTC time like 2026-11-29T10:00:00Z");
  }
  for (const char* bits : {"3f800000", "0x3F800000", "0x3f8000000", "0x"}) {
    EXPECT_EQ(detail("/body/bits", bits),
              "evidence.body.bits: is not 0x and 8 lower-case hex digits");
  }
  EXPECT_EQ(detail("/body", Json::array()), "evidence.body: is not an object");
}

TEST(JudgeTest, NothingCheckedIsNoPass) {
  const Json doc = {{"schema", "tare.gate.X/v1"}};
  Judging nothing("X", doc);
  ASSERT_TRUE(nothing.WellFormed());
  EXPECT_EQ(nothing.Finish().reason, "nothing-compared");
  Judging no_scope("X", doc);
  ASSERT_TRUE(no_scope.WellFormed());
  no_scope.Pass("X-01", "seen");
  EXPECT_EQ(no_scope.Finish().verdict, Verdict::kInconclusive);
  Judging half_scope("X", doc);
  ASSERT_TRUE(half_scope.WellFormed());
  half_scope.Pass("X-01", "seen");
  half_scope.Cover(
      {.shape = {"s"}, .topology = {}, .dtype = {}, .model = {}, .path = {}, .contracts = {}});
  EXPECT_EQ(half_scope.Finish().reason, "nothing-compared");
}

}  // namespace
}  // namespace tare::workflow
