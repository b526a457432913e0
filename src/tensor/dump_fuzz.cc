// Lines of records.jsonl from anywhere: an error or a checked record, never a crash. What is
// accepted must satisfy what readers rely on.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "tensor/dump.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string_view text(reinterpret_cast<const char*>(data), size);
  tare::DumpIndex index;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (!index.AddLine(text.substr(0, end)).ok() || end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  for (const tare::DumpRecord& r : index.records()) {
    const tare::Result<int64_t> elements = tare::ElementCount(r.shape);
    if (!elements.ok() || r.frame >= static_cast<int64_t>(index.frames().size())) std::abort();
    if (r.shard >= 0 && r.offset % tare::SizeOf(r.dtype) != 0) std::abort();
    if (r.point.per_row && r.shape.empty()) std::abort();
  }
  index.CutAt(index.lines() / 2);
  for (const tare::DumpRecord& r : index.records()) {
    if (r.frame >= static_cast<int64_t>(index.frames().size())) std::abort();
  }
  return 0;
}
