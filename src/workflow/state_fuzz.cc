// A log whose chain holds but whose events say anything: lines `TYPE RUN DATA`, with RUN a digit
// for one of ten run IDs and DATA the event's JSON. Whatever the state takes in, a refused event
// leaves it as it was, and rebuilding it from the accepted events gives the live state.

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "workflow/evidence.h"
#include "workflow/index.h"
#include "workflow/staleness.h"
#include "workflow/state.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tare;
  using namespace tare::workflow;
  std::string_view text(reinterpret_cast<const char*>(data), size);
  State state;
  std::vector<Event> accepted;
  std::string prev = kNoPrevious, before = state.ToJson().dump();
  for (int lines = 0; !text.empty() && lines < 64; ++lines) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t space = line.find(' ');
    if (space == std::string_view::npos || space + 3 > line.size()) continue;
    Event event;
    event.seq = accepted.size();
    event.time = "2026-11-29T00:00:00.000000000Z";
    event.type = line.substr(0, space);
    event.actor = "ann";
    event.run_id = "01920000-0000-7000-8000-00000000000";
    event.run_id += static_cast<char>('0' + static_cast<unsigned char>(line[space + 1]) % 10);
    event.prev = prev;
    Result<Json> parsed = ParseJson(line.substr(space + 3));
    if (!parsed.ok()) continue;
    event.data = *std::move(parsed);
    const Result<std::string> encoded = EncodeEvent(event);
    if (!encoded.ok()) continue;
    const Result<Event> back = ParseEvent(*encoded);
    TARE_CHECK(back.ok()) << back.status().ToString();
    if (state.Accept(*back).ok()) {
      accepted.push_back(*back);
      prev = LineHash(*encoded);
      before = state.ToJson().dump();
    } else {
      TARE_CHECK(state.ToJson().dump() == before) << "a refused event changed the state";
    }
  }
  State rebuilt;
  for (const Event& event : accepted) rebuilt.Apply(event);
  TARE_CHECK(rebuilt.ToJson().dump() == before);
  TARE_CHECK(rebuilt.problems.empty());
  Staleness staleness(state);
  (void)Board(state, &staleness);
  for (const RunRecord& run : state.runs) (void)AssessRun(state, &staleness, run);
  return 0;
}
