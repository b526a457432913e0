#pragma once

// Who runs a run: pid, its start time and the boot make a process unmistakable, so that lost,
// failed and running are told apart also after the pid was given to someone else.

#include <cstdint>
#include <optional>
#include <string>

#include "base/env.h"
#include "workflow/state.h"

namespace tare::workflow {

struct ProcessIdentity {
  std::string host;
  std::string boot_id;  // of the boot and of the PID namespace: "<uuid> pid:[<number>]"
  int64_t pid = 0;
  uint64_t start_ticks = 0;
};
ProcessIdentity ThisProcess();
// Start time in clock ticks since boot; nothing when there is no such process (or only a zombie).
std::optional<uint64_t> ProcessStart(int64_t pid);

enum class Liveness { kEnded, kRunning, kLost };
struct LivenessReport {
  Liveness liveness = Liveness::kLost;
  std::string why;
};
// On this host, boot and PID namespace the process itself decides; elsewhere the heartbeat file in
// `run_dir`, which must be younger than three periods. Runs of older logs name no namespace.
LivenessReport CheckLiveness(Env* env, const RunRecord& run, const std::string& run_dir);

// "ann": the account that runs this program, made safe for the log.
std::string CurrentActor();

}  // namespace tare::workflow
