// GEN-14: the event log is a hash chain; deleting, editing or reordering any record is detected,
// and what a crash leaves is recovered without losing anything acknowledged.

#include "workflow/event.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "base/sha256.h"
#include "workflow/event_log.h"
#include "workflow/layout.h"
#include "workflow/testing.h"
#include "workflow/uuid.h"

namespace tare::workflow {
namespace {

EventDraft Draft(const std::string& text) {
  EventDraft draft;
  draft.run_id = "01890000-0000-7000-8000-000000000001";
  draft.type = "observed";
  draft.data = {{"text", text}, {"n", 3}};
  return draft;
}

// A log of `n` events and its bytes.
std::string MakeLog(TestEnv* env, const std::string& dir, int n) {
  auto log = EventLog::Create(env, dir, "tester");
  EXPECT_TRUE(log.ok()) << log.status().ToString();
  for (int i = 0; i < n; ++i) {
    auto event = (*log)->Append(Draft(fmt::format("event {}", i)));
    EXPECT_TRUE(event.ok()) << event.status().ToString();
  }
  return *env->ReadFile(JoinPath(dir, kLogFile));
}

void WriteLog(TestEnv* env, const std::string& dir, std::string_view bytes) {
  auto file = env->OpenWritable(JoinPath(dir, kLogFile), Env::Mode::kTruncate);
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Append(bytes).ok());
}

TEST(RunId, IsUuid7AndSorts) {
  TestEnv env;
  env.now_ns = 1'700'000'000'000'000'000;
  std::string last;
  for (int i = 0; i < 10000; ++i) {
    if (i == 5000) env.now_ns -= 3'600'000'000'000;  // the clock steps back an hour
    const std::string id = NewRunId(&env);
    ASSERT_TRUE(IsRunId(id)) << id;
    ASSERT_LT(last, id);
    last = id;
  }
  EXPECT_FALSE(IsRunId("01890000-0000-4000-8000-000000000001"));  // version 4
  EXPECT_FALSE(IsRunId("01890000-0000-7000-c000-000000000001"));  // another variant
  EXPECT_FALSE(IsRunId("01890000-0000-7000-8000-00000000000A"));
}

TEST(Event, EncodesAndParsesBack) {
  Event event;
  event.seq = 7;
  event.time = "2026-01-02T03:04:05.000000006Z";
  event.run_id = "01890000-0000-7000-8000-000000000001";
  event.type = "observed";
  event.actor = "ann";
  event.data = {{"z", 1}, {"a", "quote \" and \n"}};
  event.prev = kNoPrevious;
  auto line = EncodeEvent(event);
  ASSERT_TRUE(line.ok()) << line.status().ToString();
  EXPECT_LT(line->find("\"a\""), line->find("\"z\""));  // keys of data are sorted
  auto back = ParseEvent(*line);
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(back->seq, 7u);
  EXPECT_EQ(back->data.at("a"), "quote \" and \n");
  EXPECT_EQ(*EncodeEvent(*back), *line);
  // The chain's rule as the format page states it.
  const size_t self_at = line->rfind(",\"self\":");
  EXPECT_EQ(back->self, Hex(Sha256Of(std::string_view(*line).substr(0, self_at))));
}

TEST(Event, RefusesFieldsWithoutCanonicalSpelling) {
  Event event;
  event.time = "2026-01-02T03:04:05.000000006Z";
  event.run_id = "01890000-0000-7000-8000-000000000001";
  event.type = "observed";
  event.actor = "ann";
  event.data = Json::object();
  event.prev = kNoPrevious;
  ASSERT_TRUE(EncodeEvent(event).ok());
  for (const auto& change : std::vector<std::function<void(Event&)>>{
           [](Event& e) { e.time = "2026-01-02T03:04:05Z"; }, [](Event& e) { e.actor = "a\"b"; },
           [](Event& e) { e.actor = "a\x1b[31m"; }, [](Event& e) { e.actor = ""; },
           [](Event& e) { e.type = "No Such"; }, [](Event& e) { e.run_id = "x"; },
           [](Event& e) {
             e.data = {{"x", 0.5}};
           },
           [](Event& e) { e.data = Json::array(); },
           [](Event& e) {
             e.data = {{"x", std::string(5 << 20, 'a')}};
           },
           [](Event& e) { e.prev = "00"; }}) {
    Event bad = event;
    change(bad);
    EXPECT_FALSE(EncodeEvent(bad).ok());
  }
}

TEST(EventLog, EveryByteFlippedIsFound) {
  TempDir dir;
  TestEnv env;
  const std::string good = MakeLog(&env, dir.path(), 4);
  ASSERT_TRUE(ScanLog(good).broken.ok());
  ASSERT_EQ(ScanLog(good).lines.size(), 4u);
  for (size_t i = 0; i < good.size(); ++i) {
    for (const int mask : {0x01, 0x20, 0x80, 0xff}) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ mask);
      const LogScan scan = ScanLog(bad);
      EXPECT_TRUE(!scan.broken.ok() || !scan.torn.empty()) << "byte " << i << " mask " << mask;
      EXPECT_LT(scan.lines.size(), 4u);
    }
  }
}

TEST(EventLog, DeletedDuplicatedMovedLinesAreFound) {
  TempDir dir;
  TestEnv env;
  const std::string good = MakeLog(&env, dir.path(), 5);
  const LogScan scan = ScanLog(good);
  std::vector<std::string> lines(scan.lines.begin(), scan.lines.end());
  const auto join = [](const std::vector<std::string>& parts) {
    std::string out;
    for (const std::string& p : parts) out += p + "\n";
    return out;
  };
  for (size_t i = 0; i < lines.size(); ++i) {
    std::vector<std::string> changed = lines;
    changed.insert(changed.begin() + i, lines[i]);
    EXPECT_FALSE(ScanLog(join(changed)).broken.ok()) << "duplicated " << i;
    for (size_t k = 0; k < lines.size(); ++k) {
      if (k == i) continue;
      changed = lines;
      std::swap(changed[i], changed[k]);
      EXPECT_FALSE(ScanLog(join(changed)).broken.ok()) << "swapped " << i << " and " << k;
    }
    if (i + 1 == lines.size()) continue;
    changed = lines;
    changed.erase(changed.begin() + i);
    EXPECT_FALSE(ScanLog(join(changed)).broken.ok()) << "deleted " << i;
  }
  // The one thing the chain alone cannot show: the last lines cut off. A checkpoint does.
  lines.pop_back();
  EXPECT_TRUE(ScanLog(join(lines)).broken.ok());
}

TEST(EventLog, CutAtEveryByteRecoversEveryAcknowledgedEvent) {
  TempDir dir;
  TestEnv env;
  const std::string good = MakeLog(&env, dir.path(), 4);
  std::vector<size_t> ends;
  for (size_t i = 0; i < good.size(); ++i) {
    if (good[i] == '\n') ends.push_back(i + 1);
  }
  for (size_t cut = 0; cut <= good.size(); ++cut) {
    TempDir at;
    WriteLog(&env, at.path(), std::string_view(good).substr(0, cut));
    const size_t whole = static_cast<size_t>(
        std::count_if(ends.begin(), ends.end(), [&](size_t e) { return e <= cut; }));
    const bool torn = whole == 0 ? cut > 0 : cut > ends[whole - 1];
    auto log = EventLog::Open(&env, at.path(), "tester");
    ASSERT_TRUE(log.ok()) << cut << ": " << log.status().ToString();
    EXPECT_EQ((*log)->opened().scan.lines.size(), whole);
    EXPECT_EQ((*log)->recovery_events().size(), torn ? 1u : 0u);
    ASSERT_TRUE((*log)->Append(Draft("after")).ok());
    log->reset();
    const std::string after = *env.ReadFile(JoinPath(at.path(), kLogFile));
    const size_t kept = whole == 0 ? 0 : ends[whole - 1];
    EXPECT_EQ(after.substr(0, kept), good.substr(0, kept));
    const LogScan scan = ScanLog(after);
    EXPECT_TRUE(scan.broken.ok());
    EXPECT_EQ(scan.lines.size(), whole + (torn ? 2 : 1));
    if (torn) {  // the torn bytes lie aside, and their digest is in the log
      auto event = ParseEvent(scan.lines[whole]);
      ASSERT_TRUE(event.ok());
      EXPECT_EQ(event->type, "recovered");
      const std::string aside = *env.ReadFile(at / event->data.at("path").get<std::string>());
      EXPECT_EQ(aside, good.substr(kept, cut - kept));
      EXPECT_EQ(Hex(Sha256Of(aside)), event->data.at("sha256").get<std::string>());
    }
  }
}

TEST(EventLog, NulPagesAtTheEndAreATearAndABreakInsideStops) {
  TempDir dir;
  TestEnv env;
  std::string bytes = MakeLog(&env, dir.path(), 3);
  const size_t last = bytes.rfind('\n', bytes.size() - 2) + 1;
  std::string holes = bytes;
  for (size_t i = last + 10; i < bytes.size() - 5; ++i) holes[i] = '\0';
  WriteLog(&env, dir.path(), holes);
  {
    auto log = EventLog::Open(&env, dir.path(), "tester");
    ASSERT_TRUE(log.ok()) << log.status().ToString();
    EXPECT_EQ((*log)->opened().scan.lines.size(), 2u);
    EXPECT_EQ((*log)->recovery_events().size(), 1u);
  }
  std::string edited = bytes;
  edited[20] ^= 1;
  WriteLog(&env, dir.path(), edited);
  auto log = EventLog::Open(&env, dir.path(), "tester");
  ASSERT_FALSE(log.ok());
  EXPECT_EQ(log.status().code(), Code::kDataLoss);
  EXPECT_NE(log.status().message().find("line 0"), std::string::npos) << log.status().message();
  EXPECT_EQ(*env.ReadFile(JoinPath(dir.path(), kLogFile)), edited);  // nothing was "repaired"
}

TEST(EventLog, DiskFullTakesTheUnacknowledgedLineBack) {
  TempDir dir;
  TestEnv env;
  const std::string before = MakeLog(&env, dir.path(), 2);
  auto log = EventLog::Open(&env, dir.path(), "tester");
  ASSERT_TRUE(log.ok());
  env.next_append = Error(Code::kExhausted, "disk full");
  auto event = (*log)->Append(Draft("lost"));
  ASSERT_FALSE(event.ok());
  EXPECT_EQ(event.status().code(), Code::kExhausted);
  EXPECT_EQ(*env.ReadFile(JoinPath(dir.path(), kLogFile)), before);
  EXPECT_FALSE((*log)->Append(Draft("also refused")).ok());
  log->reset();
  log = EventLog::Open(&env, dir.path(), "tester");
  ASSERT_TRUE(log.ok());
  EXPECT_TRUE((*log)->Append(Draft("works again")).ok());
}

TEST(EventLog, OneWriterAndNoSecondLog) {
  TempDir dir;
  TestEnv env;
  MakeLog(&env, dir.path(), 1);
  auto first = EventLog::Open(&env, dir.path(), "tester");
  ASSERT_TRUE(first.ok());
  auto second = EventLog::Open(&env, dir.path(), "tester");
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), Code::kPrecondition);
  first->reset();
  auto again = EventLog::Create(&env, dir.path(), "tester");
  ASSERT_FALSE(again.ok());
  EXPECT_EQ(again.status().code(), Code::kAlreadyExists);
}

TEST(EventLog, ALinkInPlaceOfTheLogOrLockIsRefused) {
  TempDir dir;
  TempDir elsewhere;
  TestEnv env;
  const std::string bytes = MakeLog(&env, elsewhere.path(), 2);
  std::filesystem::create_symlink(elsewhere / "events.jsonl", dir / "events.jsonl");
  EXPECT_FALSE(ReadLog(&env, dir.path()).ok());
  EXPECT_FALSE(EventLog::Open(&env, dir.path(), "tester").ok());
  std::filesystem::remove(dir / "events.jsonl");
  std::filesystem::remove(dir / "events.lock");
  std::filesystem::copy_file(elsewhere / "events.jsonl", dir / "events.jsonl");
  std::filesystem::create_symlink(elsewhere / "new-file", dir / "events.lock");
  EXPECT_FALSE(EventLog::Open(&env, dir.path(), "tester").ok());
  EXPECT_FALSE(env.Exists(elsewhere / "new-file"));
}

TEST(EventLog, SyncsBeforeItAcknowledges) {
  TempDir dir;
  TestEnv env;
  auto log = EventLog::Create(&env, dir.path(), "tester");
  ASSERT_TRUE(log.ok());
  EXPECT_GE(env.syncs, 2);  // file and directory
  const int64_t before = env.syncs;
  ASSERT_TRUE((*log)->Append(Draft("x")).ok());
  EXPECT_EQ(env.syncs, before + 1);
}

TEST(Checkpoint, ThreeLinesAndNothingElse) {
  const Checkpoint c{"01890000-0000-7000-8000-000000000001", 12, std::string(64, 'a')};
  auto back = ParseCheckpoint(EncodeCheckpoint(c));
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(back->origin, c.origin);
  EXPECT_EQ(back->size, 12u);
  EXPECT_EQ(back->head, c.head);
  const std::string text = EncodeCheckpoint(c);
  for (const std::string& bad :
       {std::string(), text + "x\n", text.substr(0, 40), fmt::format("x{}", text),
        std::string("\n\n\n"), "01890000-0000-7000-8000-000000000001\n012\n" + c.head + "\n",
        "01890000-0000-7000-8000-000000000001\n-1\n" + c.head + "\n"}) {
    EXPECT_FALSE(ParseCheckpoint(bad).ok()) << bad;
  }
}

TEST(Layout, HostileNamesAreRefused) {
  EXPECT_TRUE(CheckRelativePath("C5/a b/ü.json").ok());
  for (const std::string bad :
       {"", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".", "a\\b", "a\nb", "a\x1b[31mb",
        "a\x7f", "\xff\xfe", "a\u202eb", "\xc0\xaf"}) {
    EXPECT_FALSE(CheckRelativePath(bad).ok()) << Printable(bad);
  }
  EXPECT_FALSE(CheckRelativePath(std::string("a\0b", 3)).ok());
  EXPECT_FALSE(CheckRelativePath(std::string(201, 'a')).ok());
  const std::string run = "01890000-0000-7000-8000-000000000001";
  ASSERT_TRUE(ParseArtifactPath("C5/" + run + "/out/x.bin").ok());
  EXPECT_EQ(LogicalName(*ParseArtifactPath("C5/" + run + "/out/x.bin")), "C5/out/x.bin");
  for (const char* bad : {"C11/{}/x", "C5/x", "C5/notarun/x", "C5/{}", "C5/{}/x.intoto.jsonl",
                          "C5/{}/heartbeat", "C5/{}/../x"}) {
    const std::string path = fmt::format(fmt::runtime(bad), run);
    EXPECT_FALSE(ParseArtifactPath(path).ok()) << path;
  }
}

}  // namespace
}  // namespace tare::workflow
