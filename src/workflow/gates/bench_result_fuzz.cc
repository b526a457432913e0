// Results, counters and arm records of a server, read and judged: any bytes give an answer.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "workflow/gates/bench_result.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tare::workflow;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto result = ParseBenchResult(text);
  const auto counters = ParseCacheCounters(text);
  const auto arm = ParseArmRecord(text);
  if (result.ok()) {
    const BenchResult results[] = {*result};
    BenchRequirement need;
    need.input_len = 64;
    need.concurrencies = {1};
    std::optional<CacheCounters> none;
    const BenchVerdict verdict = JudgeBench(results, none, none, need);
    if (verdict.verdict == tare::Verdict::kPass) __builtin_trap();  // no counters: never a pass
    (void)verdict.ToJson().dump(-1, ' ', false, tare::Json::error_handler_t::replace);
    // Against itself nothing is a pair.
    if (arm.ok() && JudgePair(*arm, *result, *arm, *result).verdict == tare::Verdict::kPass) {
      __builtin_trap();
    }
  }
  if (counters.ok() && counters->queries < 0) __builtin_trap();
  return 0;
}
