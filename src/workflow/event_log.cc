#include "workflow/event_log.h"

#include "base/sha256.h"
#include "workflow/layout.h"
#include "workflow/uuid.h"

namespace tare::workflow {
namespace {

// A link in place of the log or its lock would let a write land outside the task.
Status CheckPlain(Env* env, const std::string& path) {
  auto info = env->Stat(path);
  if (!info.ok()) return info.status().code() == Code::kNotFound ? Ok() : info.status();
  if (info->kind != FileInfo::Kind::kFile) {
    return Error(Code::kPrecondition, "{}: not a plain file; a link or device is never followed",
                 Printable(path));
  }
  return Ok();
}

// A torn line that was set aside. Anything else of that prefix is none of ours: it is neither
// followed nor recorded, and `tare verify` lists it as a file that no event names.
bool IsAside(Env* env, const std::string& dir, const std::string& name) {
  if (!name.starts_with(kTornPrefix)) return false;
  const std::string_view rest = std::string_view(name).substr(kTornPrefix.size());
  const size_t dash = rest.find('-');
  const auto all = [](std::string_view text, std::string_view of) {
    return !text.empty() && text.find_first_not_of(of) == std::string_view::npos;
  };
  if (dash > 20 || rest.size() - dash != 9 ||  // no dash is beyond all
      !all(rest.substr(0, dash), "0123456789") || !all(rest.substr(dash + 1), "0123456789abcdef")) {
    return false;
  }
  return CheckPlain(env, JoinPath(dir, name)).ok();
}

Result<std::unique_ptr<FileLock>> TakeLock(Env* env, const std::string& dir) {
  const std::string path = JoinPath(dir, kLockFile);
  TARE_RETURN_IF_ERROR(CheckPlain(env, path));
  return env->Lock(path);
}

}  // namespace

Result<LogView> ReadLog(Env* env, const std::string& task_dir) {
  const std::string path = JoinPath(task_dir, kLogFile);
  TARE_RETURN_IF_ERROR(CheckPlain(env, path));
  TARE_ASSIGN_OR_RETURN(std::unique_ptr<ReadableFile> file, env->OpenReadable(path));
  LogView view;
  view.file = std::move(file);
  view.scan = ScanLog(view.file->bytes());
  return view;
}

Result<std::unique_ptr<EventLog>> EventLog::Create(Env* env, const std::string& task_dir,
                                                   std::string actor) {
  std::unique_ptr<EventLog> log(new EventLog());
  log->env_ = env;
  log->dir_ = task_dir;
  log->actor_ = std::move(actor);
  log->head_ = kNoPrevious;
  TARE_ASSIGN_OR_RETURN(log->lock_, TakeLock(env, task_dir));
  const std::string path = JoinPath(task_dir, kLogFile);
  TARE_ASSIGN_OR_RETURN(log->file_, env->OpenWritable(path, Env::Mode::kExclusive));
  TARE_RETURN_IF_ERROR(log->file_->Sync());
  TARE_RETURN_IF_ERROR(env->SyncDir(task_dir));
  return log;
}

Result<std::unique_ptr<EventLog>> EventLog::Open(Env* env, const std::string& task_dir,
                                                 std::string actor) {
  std::unique_ptr<EventLog> log(new EventLog());
  log->env_ = env;
  log->dir_ = task_dir;
  log->actor_ = std::move(actor);
  TARE_ASSIGN_OR_RETURN(log->lock_, TakeLock(env, task_dir));
  TARE_ASSIGN_OR_RETURN(log->view_, ReadLog(env, task_dir));
  const LogScan& scan = log->view_.scan;
  if (!scan.broken.ok()) return scan.broken.Annotate(std::string(kLogFile));
  log->next_seq_ = scan.lines.size();
  log->head_ = scan.head;
  log->size_bytes_ = scan.good_bytes;
  const bool torn = !scan.torn.empty();
  std::string aside;
  const std::string tail(scan.torn);
  if (torn) {
    // First the copy, then the cut: a crash between the two leaves both.
    aside = fmt::format("{}{}-{}", kTornPrefix, log->next_seq_, Hex(Sha256Of(tail)).substr(0, 8));
    // What may lie there, a link too, is replaced by the file and not followed.
    TARE_RETURN_IF_ERROR(env->WriteFileAtomic(JoinPath(task_dir, aside), tail));
    TARE_RETURN_IF_ERROR(env->Truncate(JoinPath(task_dir, kLogFile), log->size_bytes_));
    log->view_.scan.torn = {};  // those bytes are no longer mapped
  }
  TARE_ASSIGN_OR_RETURN(log->file_,
                        env->OpenWritable(JoinPath(task_dir, kLogFile), Env::Mode::kAppend));
  if (torn) TARE_RETURN_IF_ERROR(log->file_->Sync());
  TARE_RETURN_IF_ERROR(log->SetAside());
  return log;
}

// Records every torn line that lies aside without an event naming it: the present one, and one
// whose recovery was itself cut short.
Status EventLog::SetAside() {
  TARE_ASSIGN_OR_RETURN(const std::vector<std::string> names, env_->List(dir_));
  for (const std::string& name : names) {
    if (!IsAside(env_, dir_, name)) continue;
    const auto file = env_->ReadFile(JoinPath(dir_, name));
    if (!file.ok()) continue;
    const std::string& bytes = *file;
    const std::string digest = Hex(Sha256Of(bytes));
    const std::string needle = "\"sha256\":\"" + digest + "\"";
    bool known = false;
    for (const std::string_view line : view_.scan.lines) {
      if (line.find("\"type\":\"recovered\"") != std::string_view::npos &&
          line.find(needle) != std::string_view::npos &&
          line.find("\"" + name + "\"") != std::string_view::npos) {
        known = true;
        break;
      }
    }
    if (known) continue;
    EventDraft draft;
    draft.run_id = NewRunId(env_);
    draft.type = "recovered";
    draft.data = {{"path", name}, {"sha256", digest}, {"bytes", bytes.size()}};
    TARE_ASSIGN_OR_RETURN(Event event, Append(draft));
    recovery_.push_back(std::move(event));
  }
  return Ok();
}

Result<Event> EventLog::Append(const EventDraft& draft,
                               const std::function<Status(const Event&)>& check) {
  if (!failed_.ok()) return failed_.Annotate("an append failed before; open the log again");
  Event event;
  event.seq = next_seq_;
  event.time = FormatUtc(env_->NowNs());
  event.run_id = draft.run_id;
  event.type = draft.type;
  event.actor = actor_;
  event.data = draft.data;
  event.prev = head_;
  TARE_ASSIGN_OR_RETURN(std::string line, EncodeEvent(event));
  if (check) TARE_RETURN_IF_ERROR(check(event));
  const std::string hash = LineHash(line);
  event.self = line.substr(line.size() - 66, 64);
  line += '\n';
  Status written = file_->Append(line);
  if (written.ok()) written = file_->Sync();
  if (!written.ok()) {
    // What was not acknowledged must not count: take it back while we still can.
    failed_ = written;
    const std::string path = JoinPath(dir_, kLogFile);
    if (env_->Truncate(path, size_bytes_).ok()) {
      // A fresh handle: one that failed may not be trusted to sync.
      auto fresh = env_->OpenWritable(path, Env::Mode::kAppend);
      if (fresh.ok()) (void)(*fresh)->Sync();
    }
    return written.Annotate("append to the event log");
  }
  size_bytes_ += line.size();
  head_ = hash;
  ++next_seq_;
  return event;
}

}  // namespace tare::workflow
