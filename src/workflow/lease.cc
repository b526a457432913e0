#include "workflow/lease.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/json.h"
#include "workflow/layout.h"

namespace tare::workflow {
namespace {

constexpr size_t kDigits = 16;

Status CheckDevice(const std::string& device) {
  const bool right = !device.empty() && device.size() <= 64 &&
                     std::all_of(device.begin(), device.end(), [](char c) {
                       return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                              (c >= '0' && c <= '9') || c == '-' || c == '_' || c == ':';
                     });
  if (right) return Ok();
  return InvalidArgument("`{}` is no device name: 1 to 64 of letters, digits, '-', '_' and ':'",
                         Printable(device.substr(0, 80)));
}

// The number of a ticket of the device, or 0.
uint64_t TicketOf(const std::string& name, const std::string& device) {
  if (name.size() != device.size() + 1 + kDigits || !name.starts_with(device + ".")) return 0;
  uint64_t number = 0;
  for (size_t i = device.size() + 1; i < name.size(); ++i) {
    if (name[i] < '0' || name[i] > '9') return 0;
    number = number * 10 + static_cast<uint64_t>(name[i] - '0');
  }
  return number;
}

// What its process wrote into a ticket: who waits.
std::string Who(Env* env, const std::string& path) {
  const Result<std::string> text = env->ReadFile(path);
  return text.ok() ? text->substr(0, text->find('\n')) : std::string("?");
}

// Held for moments only, so waiting for it is short.
Result<std::unique_ptr<FileLock>> Door(Env* env, const std::string& dir,
                                       const std::string& device) {
  const int64_t end = env->MonotonicNs() + 60'000'000'000;
  while (true) {
    auto lock = env->Lock(JoinPath(dir, device + ".lock"));
    if (lock.ok() || lock.status().code() != Code::kPrecondition || env->MonotonicNs() > end)
      return lock;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// Living tickets below `below`, lowest first; dead ones are taken away. Needs the door.
Result<std::vector<std::pair<uint64_t, std::string>>> Living(Env* env, const std::string& dir,
                                                             const std::string& device,
                                                             uint64_t below) {
  TARE_ASSIGN_OR_RETURN(const std::vector<std::string> names, env->List(dir));
  std::vector<std::pair<uint64_t, std::string>> out;
  for (const std::string& name : names) {
    const uint64_t number = TicketOf(name, device);
    if (number == 0 || number >= below) continue;
    const std::string path = JoinPath(dir, name);
    auto lock = env->Lock(path);
    if (lock.ok()) {
      TARE_RETURN_IF_ERROR(env->Remove(path));  // its process is gone
    } else if (lock.status().code() == Code::kPrecondition) {
      out.emplace_back(number, path);
    } else {
      return lock.status();
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace

Result<std::unique_ptr<Lease>> Lease::Acquire(Env* env, const std::string& dir,
                                              const std::string& device, const std::string& who,
                                              double wait_s) {
  TARE_RETURN_IF_ERROR(CheckDevice(device));
  std::unique_ptr<Lease> lease(new Lease);
  lease->env_ = env;
  lease->dir_ = dir;
  lease->device_ = device;
  {
    TARE_ASSIGN_OR_RETURN(const auto door, Door(env, dir, device));
    TARE_ASSIGN_OR_RETURN(const auto living, Living(env, dir, device, UINT64_MAX));
    lease->ticket_ = living.empty() ? 1 : living.back().first + 1;
    lease->path_ = JoinPath(dir, fmt::format("{}.{:0{}}", device, lease->ticket_, kDigits));
    TARE_ASSIGN_OR_RETURN(auto file, env->OpenWritable(lease->path_, Env::Mode::kTruncate));
    TARE_RETURN_IF_ERROR(file->Append(Printable(who.substr(0, 200)) + "\n"));
    TARE_RETURN_IF_ERROR(file->Close());
    TARE_ASSIGN_OR_RETURN(lease->held_, env->Lock(lease->path_));
  }
  const int64_t end = env->MonotonicNs() + static_cast<int64_t>(wait_s * 1e9);
  while (true) {
    std::string ahead;
    {
      TARE_ASSIGN_OR_RETURN(const auto door, Door(env, dir, device));
      TARE_ASSIGN_OR_RETURN(const auto living, Living(env, dir, device, lease->ticket_));
      if (living.empty()) return lease;
      ahead = Who(env, living.front().second);
    }
    if (env->MonotonicNs() >= end) {
      return Error(Code::kExhausted, "{} is held by {}", device, Printable(ahead));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

Lease::~Lease() {
  if (held_ == nullptr) return;
  auto door = Door(env_, dir_, device_);
  if (door.ok()) (void)env_->Remove(path_);
}

Result<std::vector<LeaseLine>> Leases(Env* env, const std::string& dir) {
  TARE_ASSIGN_OR_RETURN(const std::vector<std::string> names, env->List(dir));
  std::vector<LeaseLine> out;
  for (const std::string& name : names) {
    if (!name.ends_with(".lock")) continue;
    const std::string device = name.substr(0, name.size() - 5);
    if (!CheckDevice(device).ok()) continue;
    TARE_ASSIGN_OR_RETURN(const auto door, Door(env, dir, device));
    TARE_ASSIGN_OR_RETURN(const auto living, Living(env, dir, device, UINT64_MAX));
    for (size_t i = 0; i < living.size(); ++i) {
      out.push_back({device, Who(env, living[i].second), living[i].first, i == 0});
    }
  }
  return out;
}

}  // namespace tare::workflow
