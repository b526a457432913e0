#pragma once

// Runs the command of a run and reads its output, while the run's heartbeat beats.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"

namespace tare::workflow {

// The file `heartbeat` of an open run, written anew every `period_s` seconds.
class Heartbeat {
 public:
  Heartbeat(Env* env, std::string run_dir, int64_t period_s)
      : env_(env), run_dir_(std::move(run_dir)), period_ns_(period_s * 1'000'000'000) {}
  // Writes it when it is due. A link in its place is replaced, never followed; one that cannot be
  // written is left out.
  void Beat();
  int64_t next_ns() const { return next_ns_; }

 private:
  Env* env_;
  std::string run_dir_;
  int64_t period_ns_;
  int64_t next_ns_ = 0;
};

// How long output is still read after the command itself has ended: a process that it left behind
// may hold the pipes open for ever. A fifth of a second's silence ends it sooner.
inline constexpr int64_t kLingerNs = 2'000'000'000;

struct SpawnOptions {
  std::vector<std::string> command;
  std::vector<std::string> variables;  // "NAME=VALUE", in place of what the environment holds
  bool quiet = false;                  // do not pass the output on
};
struct Spawned {
  std::optional<int64_t> exit_code;
  int64_t signal = 0;
  std::vector<std::string> libraries;  // files mapped as code
  bool cut_off = false;                // kLingerNs were over and somebody still wrote
  Status output;                       // not ok: its output could not be written down whole
};
// Writes stdout.txt and stderr.txt into `run_dir`, which must not hold them. An error means that
// the command never ran; once it runs, its end is always told.
Result<Spawned> Spawn(Env* env, const SpawnOptions& options, const std::string& run_dir,
                      Heartbeat* heartbeat);

std::string AbsolutePath(const std::string& path);
// The file that execvp would run, or empty.
std::string FindExecutable(const std::string& name);

}  // namespace tare::workflow
