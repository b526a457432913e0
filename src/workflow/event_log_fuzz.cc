// Any bytes as an event log: the scan stays inside them, and what it accepts as an event has
// exactly that one spelling.

#include <cstdint>
#include <string>

#include "base/check.h"
#include "workflow/event.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tare::workflow;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const LogScan scan = ScanLog(bytes);
  TARE_CHECK(scan.good_bytes <= size);
  std::string kept;
  for (const std::string_view line : scan.lines) {
    kept += line;
    kept += '\n';
    auto event = ParseEvent(line);
    if (!event.ok()) continue;  // the chain holds, the content need not
    auto again = EncodeEvent(*event);
    TARE_CHECK(again.ok() && *again == line);
  }
  TARE_CHECK(kept == bytes.substr(0, scan.good_bytes));
  (void)ParseCheckpoint(bytes);
  // Sealing what the fuzzer made lets it past the hash, into the fields.
  auto event = ParseEvent(bytes);
  if (event.ok()) TARE_CHECK(*EncodeEvent(*event) == bytes);
  return 0;
}
