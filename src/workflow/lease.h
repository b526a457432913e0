#pragma once

// One device, one job at a time, also from two tracks (TRACK-10). Waiters take numbered tickets and
// are served in that order. A ticket is a file that its process holds locked: when the process goes
// away, however it does, the kernel drops the lock, and the next waiter takes the ticket away. So
// nothing is left behind that would have to be cleaned up, and no process is ever killed.
//
//   <dir>/<device>.lock            held for moments, while tickets are looked at
//   <dir>/<device>.<16 digits>     a ticket; its text says who waits

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/env.h"

namespace tare::workflow {

class Lease {
 public:
  // Waits up to `wait_s` seconds for the device. `dir` must exist and be on one machine's own file
  // system; `device` is a name of letters, digits, '-', '_' and ':'. kExhausted when the time is
  // over: who is ahead stands in the message.
  static Result<std::unique_ptr<Lease>> Acquire(Env* env, const std::string& dir,
                                                const std::string& device, const std::string& who,
                                                double wait_s);
  // Gives it back. A ticket file that cannot be removed is taken away by the next waiter.
  ~Lease();
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  uint64_t ticket() const { return ticket_; }

 private:
  Lease() = default;
  Env* env_ = nullptr;
  std::string dir_, device_, path_;
  uint64_t ticket_ = 0;
  std::unique_ptr<FileLock> held_;
};

struct LeaseLine {
  std::string device, who;
  uint64_t ticket = 0;
  bool holds = false;  // else it waits
};
// Living tickets of all devices in `dir`, the holder of each device first.
Result<std::vector<LeaseLine>> Leases(Env* env, const std::string& dir);

}  // namespace tare::workflow
