// A receipt that `tare rl run` really wrote, brought into the form that C8 judges (C8-11): it
// passes, and each fault planted in its files or fields gets the verdict it has from `tare rl
// verify`.

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <iterator>

#include "base/sha256.h"
#include "workflow/gates/loop_check.h"

namespace tare::workflow {
namespace {

const std::string kDir = TARE_SOURCE_DIR "/tests/data/loop/";

std::string ReadAll(const std::string& name) {
  std::ifstream in(kDir + name, std::ios::binary);
  EXPECT_TRUE(in.good()) << name;
  return std::string((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
}

struct Receipt {
  Json json;
  std::map<std::string, std::string> files;
};
Receipt Load() {
  Receipt r;
  r.json = *ParseJson(ReadAll("receipt.json"));
  for (const Json& round : r.json.at("rounds")) {
    for (const auto& [name, path] : round.at("paths").items()) {
      const std::string file = path.at("file");
      r.files[file] = ReadAll(file);
    }
  }
  return r;
}

// Digests of the files again, as a forger would make them.
void Seal(Receipt* r) {
  for (Json& round : r->json["rounds"]) {
    for (auto& [name, path] : round["paths"].items())
      path["sha256"] = Hex(Sha256Of(r->files.at(path.at("file").get<std::string>())));
  }
}

GateJudgement Judge(const Receipt& r) {
  const Json runtime = {
      {"interpreter", "none"}, {"packages", "none"},      {"libraries", Json::object()},
      {"driver", "none"},      {"topology", "1 process"}, {"contracts", Hex(Sha256Of("contracts"))},
      {"vocabulary", 512}};
  Result<Json> loop = LoopFromReceipt(r.json, r.files, runtime);
  EXPECT_TRUE(loop.ok()) << loop.status().ToString();
  if (!loop.ok()) return {};
  const std::string binary = r.json.at("identities").at("rollout").at("binary_sha256");
  const Json doc = {{"schema", "tare.gate.C8/v1"},
                    {"subject",
                     {{"model", "mini"},
                      {"weights", r.json.at("identities").at("rollout").at("weights_at_start")},
                      {"recipe", Hex(Sha256Of("recipe"))},
                      {"image", "sha256:" + binary},
                      {"contracts", Hex(Sha256Of("contracts"))}}},
                    {"kind", "E8"},
                    {"task_scope", "loop"},
                    {"plan", Json::array({"two-step loop"})},
                    {"loop", *loop}};
  return JudgeC8(doc);
}

std::string Faults(const GateJudgement& judged) {
  std::string out;
  for (const GateFinding& f : judged.findings) {
    if (f.verdict != Verdict::kPass) out += fmt::format("{} {}: {}\n", f.row, f.reason, f.detail);
  }
  return out;
}

TEST(LoopReceiptTest, ARealReceiptPasses) {
  const GateJudgement judged = Judge(Load());
  EXPECT_EQ(judged.verdict, Verdict::kPass) << Faults(judged);
  // The moments are not in this receipt, and the judgement says so.
  EXPECT_EQ(judged.scope.at("not_covered").size(), 1u) << judged.scope.dump(1);
  EXPECT_EQ(judged.scope.at("covers").size(), 6u);
}

TEST(LoopReceiptTest, PlantedFaultsGetTheirVerdict) {
  struct Case {
    const char* name;
    std::function<void(Receipt*)> change;
    Verdict verdict;
    std::string_view reason;
  };
  const Case cases[] = {
      {"one bit of the grad-enabled path",
       [](Receipt* r) {
         std::string& text = r->files.at("theta1.train.jsonl");
         char& digit = text[text.find("\"bits\":[\"") + 9 + 7];
         digit = digit == '0' ? '1' : '0';
         Seal(r);
       },
       Verdict::kFail, reason::kBitMismatch},
      {"the same without sealing",
       [](Receipt* r) {
         std::string& text = r->files.at("theta1.train.jsonl");
         char& digit = text[text.find("\"bits\":[\"") + 9 + 7];
         digit = digit == '0' ? '1' : '0';
       },
       Verdict::kFail, reason::kBitMismatch},
      {"T-02 no trainer forward",
       [](Receipt* r) { r->json["rounds"][0]["paths"]["score"]["launches"] = 0; },
       Verdict::kRefused, reason::kPathUnexecuted},
      {"T-10 the engine holds theta0",
       [](Receipt* r) {
         r->json["rounds"][1]["weights"]["engine_held"] =
             r->json["rounds"][0]["weights"]["engine_held"];
       },
       Verdict::kRefused, reason::kWeightHashMismatch},
      {"T-12 the switch reached the trainer only",
       [](Receipt* r) { r->json["identities"]["rollout"]["switch"]["effective"] = 0; },
       Verdict::kRefused, reason::kSwitchNotEffective},
      {"C8-01 the last compare is missing",
       [](Receipt* r) { r->json["events"].erase(r->json["events"].size() - 2); }, Verdict::kRefused,
       reason::kLoopIncomplete},
      {"C8-05 the trainer exits with an error",
       [](Receipt* r) { r->json["processes"][1]["code"] = 3; }, Verdict::kRefused,
       reason::kProcessExit},
      {"C8-06 a file is labelled with another version",
       [](Receipt* r) {
         std::string& text = r->files.at("theta2.score.jsonl");
         text.replace(text.find("theta2"), 6, "theta1");
         Seal(r);
       },
       Verdict::kRefused, reason::kVersionContradiction},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    Receipt r = Load();
    c.change(&r);
    const GateJudgement judged = Judge(r);
    EXPECT_EQ(judged.verdict, c.verdict) << Faults(judged);
    EXPECT_EQ(judged.reason, c.reason) << Faults(judged);
  }
}

TEST(LoopReceiptTest, WhatIsNoReceiptIsAnError) {
  const Receipt honest = Load();
  EXPECT_FALSE(LoopFromReceipt(Json::object(), honest.files, Json::object()).ok());
  EXPECT_FALSE(LoopFromReceipt(honest.json, {}, Json::object()).ok());
  Json other = honest.json;
  other["schema"] = "tare.receipt/2";
  EXPECT_FALSE(LoopFromReceipt(other, honest.files, Json::object()).ok());
}

}  // namespace
}  // namespace tare::workflow
