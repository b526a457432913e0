#include "workflow/event.h"

#include <algorithm>
#include <charconv>

#include "base/sha256.h"
#include "workflow/uuid.h"

namespace tare::workflow {

const std::string kNoPrevious(64, '0');

namespace {

// `,"self":"<64>"}` and `,"prev":"<64>"`: fixed lengths, so the chain needs no JSON parser.
constexpr std::string_view kSelfKey = ",\"self\":\"";
constexpr std::string_view kPrevKey = ",\"prev\":\"";
constexpr size_t kSelfBytes = kSelfKey.size() + 64 + 2;
constexpr size_t kPrevBytes = kPrevKey.size() + 64 + 1;

bool IsHex64(std::string_view text) {
  return text.size() == 64 && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

bool IsTime(std::string_view t) {
  constexpr std::string_view kShape = "dddd-dd-ddTdd:dd:dd.dddddddddZ";
  if (t.size() != kShape.size()) return false;
  for (size_t i = 0; i < t.size(); ++i) {
    if (kShape[i] == 'd' ? (t[i] < '0' || t[i] > '9') : t[i] != kShape[i]) return false;
  }
  return true;
}

bool IsType(std::string_view t) {
  return !t.empty() && t.size() <= 64 &&
         std::all_of(t.begin(), t.end(), [](char c) { return (c >= 'a' && c <= 'z') || c == '-'; });
}

bool IsActor(std::string_view a) {
  return !a.empty() && a.size() <= 256 && a.find_first_of("\"\\") == std::string_view::npos &&
         Printable(a) == a;
}

// Takes `key"value"` off the front of `rest`; false when it is not there.
bool TakeString(std::string_view& rest, std::string_view key, std::string_view& value) {
  if (!rest.starts_with(key)) return false;
  const size_t end = rest.find('"', key.size());
  if (end == std::string_view::npos) return false;
  value = rest.substr(key.size(), end - key.size());
  rest.remove_prefix(end + 1);
  return true;
}

// The number after {"seq": and what follows it; false unless it is spelled canonically.
bool TakeSeq(std::string_view& rest, uint64_t& seq) {
  constexpr std::string_view kKey = "{\"seq\":";
  if (!rest.starts_with(kKey)) return false;
  rest.remove_prefix(kKey.size());
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), seq);
  if (error != std::errc() || end == rest.data()) return false;
  const size_t digits = static_cast<size_t>(end - rest.data());
  if (digits > 1 && rest[0] == '0') return false;
  rest.remove_prefix(digits);
  return true;
}

}  // namespace

std::string LineHash(std::string_view line) { return Hex(Sha256Of(line)); }

Result<std::string> EncodeEvent(const Event& event) {
  if (!IsTime(event.time)) {
    return InvalidArgument("event time `{}` is not RFC 3339 UTC with nine decimals", event.time);
  }
  if (!IsRunId(event.run_id))
    return InvalidArgument("event run_id `{}` is no UUIDv7", event.run_id);
  if (!IsType(event.type)) return InvalidArgument("event type `{}` is not [a-z-]+", event.type);
  if (!IsActor(event.actor)) {
    return InvalidArgument(
        "event actor `{}`: 1 to 256 printable bytes without quotes or backslashes",
        Printable(event.actor));
  }
  if (!IsHex64(event.prev)) return InvalidArgument("event prev is not 64 hex digits");
  if (!event.data.is_object()) return InvalidArgument("event data is not an object");
  TARE_ASSIGN_OR_RETURN(const std::string data, CanonicalJson(event.data));
  std::string line = fmt::format(
      "{{\"seq\":{},\"time\":\"{}\",\"run_id\":\"{}\",\"type\":\"{}\",\"actor\":\"{}\",\"data\":{}"
      ",\"prev\":\"{}\"",
      event.seq, event.time, event.run_id, event.type, event.actor, data, event.prev);
  const std::string self = Hex(Sha256Of(line));
  line += kSelfKey;
  line += self;
  line += "\"}";
  if (line.size() > kMaxEventBytes) {
    return Error(Code::kExhausted, "an event of {} bytes; at most {} fit in one line", line.size(),
                 kMaxEventBytes);
  }
  return line;
}

Result<Event> ParseEvent(std::string_view line, bool check_canonical) {
  const auto bad = [](std::string_view what) { return DataLoss("event: {}", what); };
  if (line.size() > kMaxEventBytes) return bad("the line is longer than an event may be");
  if (line.size() < kSelfBytes + kPrevBytes + 20)
    return bad("the line is too short to be an event");
  const std::string_view tail = line.substr(line.size() - kSelfBytes);
  if (!tail.starts_with(kSelfKey) || !tail.ends_with("\"}") ||
      !IsHex64(tail.substr(kSelfKey.size(), 64))) {
    return bad("the line does not end with a `self` of 64 hex digits");
  }
  const std::string_view before = line.substr(0, line.size() - kSelfBytes);
  Event event;
  event.self = tail.substr(kSelfKey.size(), 64);
  if (Hex(Sha256Of(before)) != event.self)
    return bad("`self` does not match the bytes of the line");
  const std::string_view prev = before.substr(before.size() - kPrevBytes);
  if (!prev.starts_with(kPrevKey) || prev.back() != '"' ||
      !IsHex64(prev.substr(kPrevKey.size(), 64))) {
    return bad("`prev` of 64 hex digits must stand before `self`");
  }
  event.prev = prev.substr(kPrevKey.size(), 64);
  std::string_view rest = before.substr(0, before.size() - kPrevBytes);
  if (!TakeSeq(rest, event.seq)) return bad("must begin with {\"seq\":NUMBER");
  std::string_view time, run_id, type, actor;
  if (!TakeString(rest, ",\"time\":\"", time) || !IsTime(time)) return bad("`time` is malformed");
  if (!TakeString(rest, ",\"run_id\":\"", run_id) || !IsRunId(run_id)) {
    return bad("`run_id` is not a UUIDv7");
  }
  if (!TakeString(rest, ",\"type\":\"", type) || !IsType(type)) return bad("`type` is malformed");
  if (!TakeString(rest, ",\"actor\":\"", actor) || !IsActor(actor))
    return bad("`actor` is malformed");
  constexpr std::string_view kData = ",\"data\":";
  if (!rest.starts_with(kData)) return bad("`data` must follow `actor`");
  rest.remove_prefix(kData.size());
  auto data = ParseJson(rest);
  if (!data.ok()) return data.status().Annotate("event data");
  event.data = std::move(data).value();
  if (!event.data.is_object()) return bad("`data` is not an object");
  if (check_canonical) {
    auto canonical = CanonicalJson(event.data);
    if (!canonical.ok()) return canonical.status().Annotate("event data");
    if (*canonical != rest) return bad("`data` is not spelled canonically");
  }
  event.time = time;
  event.run_id = run_id;
  event.type = type;
  event.actor = actor;
  return event;
}

LogScan ScanLog(std::string_view bytes) {
  LogScan scan;
  scan.head = kNoPrevious;
  size_t begin = 0;
  while (begin < bytes.size()) {
    const size_t newline = bytes.find('\n', begin);
    const std::string_view rest = bytes.substr(begin);
    if (newline == std::string_view::npos) {
      if (rest.size() > kMaxEventBytes) {
        scan.broken = DataLoss("line {}: {} bytes without a newline; no event is that long",
                               scan.lines.size(), rest.size());
      } else {
        scan.torn = rest;
      }
      return scan;
    }
    const std::string_view line = bytes.substr(begin, newline - begin);
    const size_t seq = scan.lines.size();
    std::string why;
    if (line.size() < kSelfBytes + kPrevBytes + 20 || line.size() > kMaxEventBytes) {
      why = fmt::format("is {} bytes long, which no event is", line.size());
    } else {
      const std::string_view before = line.substr(0, line.size() - kSelfBytes);
      const std::string_view self = line.substr(before.size() + kSelfKey.size(), 64);
      const std::string_view prev = before.substr(before.size() - kPrevBytes + kPrevKey.size(), 64);
      const std::string_view self_key = line.substr(before.size(), kSelfKey.size());
      const std::string_view prev_key = before.substr(before.size() - kPrevBytes, kPrevKey.size());
      std::string_view front = line;
      uint64_t number = 0;
      if (self_key != kSelfKey || prev_key != kPrevKey || !line.ends_with("\"}") ||
          before.back() != '"') {
        why = "does not end with `prev` and `self`";
      } else if (Hex(Sha256Of(before)) != self) {
        why = "was changed: `self` does not match its bytes";
      } else if (!TakeSeq(front, number) || number != seq) {
        why = fmt::format("has another number in `seq`; {} was due (deleted, added or moved line)",
                          seq);
      } else if (prev != scan.head) {
        why = "does not follow the line before it: `prev` differs";
      }
    }
    if (!why.empty()) {
      // Pages that never reached the disk read as NUL; an event never holds one.
      const bool last = newline + 1 == bytes.size();
      if (last && line.find('\0') != std::string_view::npos && line.size() <= kMaxEventBytes) {
        scan.torn = rest;
      } else {
        scan.broken = DataLoss("line {} {}", seq, why);
      }
      return scan;
    }
    scan.lines.push_back(line);
    scan.head = LineHash(line);
    begin = newline + 1;
    scan.good_bytes = begin;
  }
  return scan;
}

std::string EncodeCheckpoint(const Checkpoint& checkpoint) {
  return fmt::format("{}\n{}\n{}\n", checkpoint.origin, checkpoint.size, checkpoint.head);
}

Result<Checkpoint> ParseCheckpoint(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty() && lines.size() < 4) {
    const size_t end = std::min(text.find('\n'), text.size());
    lines.push_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  Checkpoint out;
  if (lines.size() != 3 || !text.empty()) {
    return InvalidArgument(
        "checkpoint: three lines are needed: task ID, number of events, head hash");
  }
  if (!IsRunId(lines[0])) return InvalidArgument("checkpoint line 1: a task ID (UUIDv7) is needed");
  const auto [end, error] =
      std::from_chars(lines[1].data(), lines[1].data() + lines[1].size(), out.size);
  if (error != std::errc() || end != lines[1].data() + lines[1].size() || out.size == 0 ||
      lines[1][0] == '0') {
    return InvalidArgument("checkpoint line 2: a number of events, 1 or more, is needed");
  }
  if (!IsHex64(lines[2])) return InvalidArgument("checkpoint line 3: 64 hex digits are needed");
  out.origin = lines[0];
  out.head = lines[2];
  return out;
}

}  // namespace tare::workflow
