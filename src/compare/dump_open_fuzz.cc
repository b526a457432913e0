// A whole dump from anywhere, its files joined by lines `====`: manifest.json, records.jsonl, then
// shards. An error or a dump; what opens can be read to its last payload, and compared with itself
// it never differs in a bit.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/fault_env.h"
#include "compare/dump_diff.h"
#include "compare/locate.h"
#include "tensor/dump.h"

namespace {

constexpr std::string_view kCut = "====\n";

bool Put(tare::Env* env, const std::string& path, std::string_view bytes) {
  auto file = env->OpenWritable(path, tare::Env::Mode::kTruncate);
  return file.ok() && (*file)->Append(bytes).ok() && (*file)->Close().ok();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tare;
  std::string_view text(reinterpret_cast<const char*>(data), size);
  FaultEnv env;
  if (!env.CreateDir("d").ok()) std::abort();
  for (int part = 0; part < 6; ++part) {
    const size_t end = text.find(kCut);
    const std::string name = part == 0   ? "d/manifest.json"
                             : part == 1 ? "d/records.jsonl"
                                         : "d/" + DumpShardName(part - 2);
    if (!Put(&env, name, text.substr(0, end))) std::abort();
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + kCut.size());
  }
  const Result<Dump> dump = Dump::Open(&env, "d");
  if (!dump.ok()) {
    if (dump.status().message().empty()) std::abort();
    return 0;
  }
  for (const DumpRecord& r : dump->records()) {
    if (r.shard < 0) continue;
    if (!dump->Payload(r).ok()) std::abort();
    (void)dump->Verify(r).ok();
  }
  static ThreadPool pool(1);
  compare::DiffOptions options;
  options.pool = &pool;
  const auto report = compare::DiffDumps(*dump, *dump, options);
  if (report.ok() && (report->totals.mismatches != 0 || !report->unpaired.empty())) std::abort();
  (void)compare::Locate(*dump, *dump, options, nullptr);
  return 0;
}
