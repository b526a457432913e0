// Any JSON as evidence of any gate: every judge answers, and passes nothing that it says covers
// nothing.

#include <cstdint>

#include "base/check.h"
#include "workflow/gates/judge.h"
#include "workflow/gates/table.h"
#include "workflow/gates/task_judge.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tare::workflow;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto json = tare::ParseJson(bytes, {.max_bytes = size_t{1} << 20, .max_depth = 32});
  if (!json.ok()) return 0;
  std::map<std::string, tare::Json> documents;
  for (const std::string_view gate : kGateIds) {
    const GateJudge judge = FindJudge(gate);
    if (judge == nullptr) continue;
    const GateJudgement judged = judge(*json);
    TARE_CHECK(judged.verdict != tare::Verdict::kPass || !judged.scope.at("covers").empty());
    TARE_CHECK((judged.verdict == tare::Verdict::kPass) == judged.reason.empty());
    documents.emplace(gate, *json);
  }
  (void)JudgeDocuments(documents, {}).ToJson();
  return 0;
}
