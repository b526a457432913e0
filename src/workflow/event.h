#pragma once

// One line of the event log and the hash chain over all of them: pure functions over bytes, no
// files. The format page is docs/formats/events.md.
//
//   {"seq":0,"time":"...Z","run_id":"...","type":"...","actor":"...","data":{...},"prev":"...","self":"..."}
//
// `self` is the SHA-256 of the line's bytes before `,"self":`; `prev` that of the whole previous
// line without its newline (64 zeros for the first). The encoding is canonical: an event has
// exactly one spelling, so a parser that accepts a line accepts no second one for the same event.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace tare::workflow {

inline constexpr size_t kMaxEventBytes = size_t{4} << 20;
extern const std::string kNoPrevious;  // 64 zeros

struct Event {
  uint64_t seq = 0;
  std::string time;    // RFC 3339 UTC with nine decimals
  std::string run_id;  // UUIDv7
  std::string type;    // [a-z-]+
  std::string actor;   // who wrote it; printable, without quotes and backslashes
  Json data;           // object, canonical when encoded
  std::string prev;
  std::string self;
};

// The line without newline, `self` computed. kInvalidArgument for a field that has no canonical
// spelling, kExhausted when the line would be longer than kMaxEventBytes.
Result<std::string> EncodeEvent(const Event& event);

// Parses one line without newline and checks `self` (not `prev`: that is the chain's).
// `check_canonical` also requires `data` to be spelled canonically; a reader that only wants speed
// over a log it has verified before may leave it out.
Result<Event> ParseEvent(std::string_view line, bool check_canonical = true);

// SHA-256 of a line without newline, as hex: the `prev` of the next one.
std::string LineHash(std::string_view line);

// What a whole log file holds.
struct LogScan {
  std::vector<std::string_view> lines;  // views into the scanned bytes, without newlines
  std::string head;                     // hash of the last good line, kNoPrevious when none
  size_t good_bytes = 0;                // up to and including the newline of the last good line
  std::string_view torn;                // bytes after that which a crash can have left; else empty
  Status broken;                        // not ok: a break that no crash explains; says where
};

// Checks seq, prev and self of every line without parsing `data`. A tail without newline, or one
// that holds NUL bytes (pages never written), is torn; anything else that does not fit is broken.
LogScan ScanLog(std::string_view bytes);

// Three lines that, kept outside the task, show a later truncation or rewriting.
struct Checkpoint {
  std::string origin;  // the task's ID
  uint64_t size = 0;   // number of events
  std::string head;    // hash of event size-1
};
std::string EncodeCheckpoint(const Checkpoint& checkpoint);
Result<Checkpoint> ParseCheckpoint(std::string_view text);

}  // namespace tare::workflow
