#pragma once

// Honest evidence of the gates C0 to C4 and what tests do to it. The documents lie in
// tests/data/gates/; each is complete, and its judge passes it.

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "workflow/gates/judge.h"
#include "workflow/testing_json.h"

namespace tare::workflow {

inline Json HonestEvidence(const std::string& gate) {
  std::ifstream in(TARE_SOURCE_DIR "/tests/data/gates/" + gate + ".json", std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  Result<Json> json = ParseJson(text);
  EXPECT_TRUE(json.ok()) << gate << ": " << json.status().ToString();
  return json.ok() ? *std::move(json) : Json();
}
inline Json HonestC0() { return HonestEvidence("C0"); }
inline Json HonestC1() { return HonestEvidence("C1"); }
inline Json HonestC2() { return HonestEvidence("C2"); }
inline Json HonestC3() { return HonestEvidence("C3"); }
inline Json HonestC4() { return HonestEvidence("C4"); }

// The judgement has `verdict`, and a finding of `row` with `reason`, which is the gravest.
inline void ExpectFinding(const Json& doc, Verdict verdict, std::string_view reason,
                          std::string_view row) {
  const std::string schema = doc.value("schema", "");
  const std::string gate = schema.substr(10, schema.find('/') - 10);
  const GateJudge judge = FindJudge(gate);
  ASSERT_NE(judge, nullptr) << schema;
  const GateJudgement got = judge(doc);
  EXPECT_EQ(got.verdict, verdict) << got.ToJson().dump(1);
  EXPECT_EQ(got.reason, reason) << got.ToJson().dump(1);
  bool found = false;
  for (const GateFinding& f : got.findings) {
    found |= f.row == row && f.reason == reason;
    if (f.verdict != Verdict::kPass) {
      EXPECT_FALSE(f.detail.empty() || f.next.empty()) << f.row;
    }
  }
  EXPECT_TRUE(found) << row << " is not among " << got.ToJson().dump(1);
}
inline void ExpectPass(const Json& doc) {
  const std::string schema = doc.value("schema", "");
  const GateJudge judge = FindJudge(schema.substr(10, schema.find('/') - 10));
  ASSERT_NE(judge, nullptr) << schema;
  const GateJudgement got = judge(doc);
  EXPECT_EQ(got.verdict, Verdict::kPass) << got.ToJson().dump(1);
}

}  // namespace tare::workflow
