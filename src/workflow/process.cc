#include "workflow/process.h"

#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>

#include "workflow/layout.h"

namespace tare::workflow {
namespace {

std::string Slurp(const std::string& path) {
  std::ifstream in(path);
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

}  // namespace

std::optional<uint64_t> ProcessStart(int64_t pid) {
  const std::string stat = Slurp(fmt::format("/proc/{}/stat", pid));
  // Field 2 is the name in brackets and may hold anything; fields count from after it.
  const size_t close = stat.rfind(')');
  if (close == std::string::npos) return std::nullopt;
  std::istringstream fields(stat.substr(close + 1));
  std::string field;
  for (int number = 3; fields >> field; ++number) {
    if (number == 3 && (field == "Z" || field == "X")) return std::nullopt;
    if (number == 22) return std::strtoull(field.c_str(), nullptr, 10);
  }
  return std::nullopt;
}

ProcessIdentity ThisProcess() {
  ProcessIdentity out;
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) == 0) out.host = Printable(name);
  out.boot_id = Slurp("/proc/sys/kernel/random/boot_id");
  char space[64] = {};
  if (::readlink("/proc/self/ns/pid", space, sizeof(space) - 1) > 0) {
    out.boot_id += fmt::format(" {}", space);
  }
  out.pid = ::getpid();
  out.start_ticks = ProcessStart(out.pid).value_or(0);
  return out;
}

LivenessReport CheckLiveness(Env* env, const RunRecord& run, const std::string& run_dir) {
  if (run.ended) return {Liveness::kEnded, "it ended"};
  if (run.lost) return {Liveness::kLost, "it was recorded as lost"};
  const ProcessIdentity self = ThisProcess();
  const auto boot = [](const std::string& id) { return id.substr(0, id.find(' ')); };
  const bool same_boot = run.host == self.host && boot(run.boot_id) == boot(self.boot_id);
  const bool has_space = run.boot_id.find(' ') != std::string::npos;
  if (same_boot && (!has_space || run.boot_id == self.boot_id)) {
    const auto start = ProcessStart(run.pid);
    if (!start) return {Liveness::kLost, fmt::format("process {} is gone", run.pid)};
    if (*start != run.pid_start) {
      return {Liveness::kLost, fmt::format("process {} is another one by now", run.pid)};
    }
    return {Liveness::kRunning, fmt::format("process {} is alive", run.pid)};
  }
  // Its process cannot be seen from here, or its number means another one.
  const std::string where = run.host != self.host ? fmt::format("host {}", run.host)
                            : same_boot           ? std::string("another PID namespace")
                                                  : std::string("another boot of this host");
  auto info = env->Stat(JoinPath(run_dir, kHeartbeatFile));
  if (!info.ok()) return {Liveness::kLost, where + ": it left no heartbeat"};
  const int64_t age_s = (env->NowNs() - info->modified_ns) / 1'000'000'000;
  if (age_s / 3 > run.heartbeat_s || age_s > 3 * std::min<int64_t>(run.heartbeat_s, 86400)) {
    return {Liveness::kLost, fmt::format("{}: last heartbeat {} s ago", where, age_s)};
  }
  return {Liveness::kRunning, fmt::format("{}: heartbeat {} s ago", where, age_s)};
}

std::string CurrentActor() {
  const passwd* entry = ::getpwuid(::getuid());
  std::string name = entry != nullptr && entry->pw_name[0] != '\0'
                         ? entry->pw_name
                         : fmt::format("uid-{}", ::getuid());
  name = Printable(name);
  std::erase_if(name, [](char c) { return c == '"' || c == '\\'; });
  return name;
}

}  // namespace tare::workflow
