#pragma once

// The event log as a file: one writer, an append acknowledged only when it is on the device, and
// recovery of what a crash leaves (docs/formats/events.md).
//
// Promise: an append that returned ok is there after any crash. An append that returned an error,
// or never returned, is there whole or not at all, and never half. Not promised: that a log cut
// back to an earlier whole line is noticed without an outside checkpoint.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"
#include "workflow/event.h"

namespace tare::workflow {

// A log read without writing: every event before a tear or break is given, whatever follows.
struct LogView {
  std::shared_ptr<ReadableFile> file;  // keeps the bytes that `scan` points into
  LogScan scan;
};
Result<LogView> ReadLog(Env* env, const std::string& task_dir);

// What a new event says; seq, time, prev and self are the log's.
struct EventDraft {
  std::string run_id;
  std::string type;
  Json data = Json::object();
};

class EventLog {
 public:
  // Creates a new log in an existing directory: kAlreadyExists when there is one. Holds the lock.
  static Result<std::unique_ptr<EventLog>> Create(Env* env, const std::string& task_dir,
                                                  std::string actor);
  // Opens for writing. Takes the writer lock (kPrecondition while another holds it); sets a torn
  // last line aside as events.torn-* and says so in an event `recovered`; a break inside is
  // kDataLoss.
  static Result<std::unique_ptr<EventLog>> Open(Env* env, const std::string& task_dir,
                                                std::string actor);

  // Returns the event as written, after fsync. After a failed append the log refuses further ones:
  // open it again, which finds out what the device holds.
  // `check`, when given, sees the finished event first; its error is returned and nothing is
  // written.
  Result<Event> Append(const EventDraft& draft,
                       const std::function<Status(const Event&)>& check = nullptr);

  const LogView& opened() const { return view_; }  // what Open found before any append
  // Events that Open itself appended (recovery), in order.
  const std::vector<Event>& recovery_events() const { return recovery_; }
  uint64_t size() const { return next_seq_; }
  const std::string& head() const { return head_; }

 private:
  EventLog() = default;
  Status SetAside();

  Env* env_ = nullptr;
  std::string dir_;
  std::string actor_;
  std::unique_ptr<FileLock> lock_;
  std::unique_ptr<WritableFile> file_;
  LogView view_;
  std::vector<Event> recovery_;
  uint64_t next_seq_ = 0;
  uint64_t size_bytes_ = 0;
  std::string head_;
  Status failed_;
};

}  // namespace tare::workflow
