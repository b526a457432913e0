#pragma once

// Child processes of the loop: started with their own environment and log file, ended by their own
// exit, and waited for with a limit.

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace tare::rl {

struct Exit {
  int64_t peak_rss_bytes = 0;  // the kernel's figure, when the process has been waited for
  bool ended = false;          // false: it was still running at the limit and was killed
  int code = -1;               // when it exited
  int signal = 0;              // when a signal ended it
  bool normal() const { return ended && signal == 0 && code == 0; }
};

class Process {
 public:
  // Looks `argv[0]` up as a path. `environment` is put over the parent's; an empty value removes
  // the variable. Output and errors go to `log`.
  static Result<Process> Start(const std::string& name, std::vector<std::string> argv,
                               const std::vector<std::pair<std::string, std::string>>& environment,
                               const std::string& log);
  Process(Process&& other) noexcept;
  Process& operator=(Process&&) = delete;
  ~Process();  // kills it when it still runs

  // Whether it has ended by now.
  bool Poll();
  // Waits up to `seconds`, then kills.
  Exit Wait(double seconds);
  void Kill();
  // Whether a signal has stopped it; Continue lets it go on.
  bool Stopped() const;
  void Continue();
  // Resident bytes now; 0 when it has ended.
  int64_t RssBytes() const;
  // Path and SHA-256 of every executable file that is mapped into it now (its own and the libraries
  // it has really loaded); empty when it has ended.
  Json LoadedFiles() const;
  pid_t pid() const { return pid_; }
  const Exit& exit() const { return exit_; }
  Json ToJson() const;  // name, pid, command, ended, code, signal, peak_rss_bytes

 private:
  Process() = default;
  std::string name_, log_;
  std::vector<std::string> argv_;
  pid_t pid_ = -1;
  bool reaped_ = false;
  Exit exit_;
};

}  // namespace tare::rl
