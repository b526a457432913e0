#include "workflow/identity.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "workflow/process.h"
#include "workflow/record.h"
#include "workflow/spawn.h"

extern char** environ;

namespace tare::workflow {
namespace {

std::string Utf8(std::string_view text) {
  return IsUtf8(text) ? std::string(text) : Printable(text);
}

}  // namespace

Json ExecutionIdentity(Env* env, const std::vector<std::string>& command,
                       const std::vector<std::string>& libraries) {
  Json out = {{"schema", "tare-identity-1"}};
  const ProcessIdentity self = ThisProcess();
  out["host"] = self.host;
  utsname name = {};
  ::uname(&name);
  out["kernel"] = fmt::format("{} {} {}", name.sysname, name.release, name.machine);
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (line.starts_with("model name") && !out.contains("cpu"))
      out["cpu"] = Utf8(line.substr(colon + 2));
    if (line.starts_with("flags")) {
      out["cpu_features"] = Utf8(line.substr(colon + 2));
      break;
    }
  }
  out["cpus"] = static_cast<uint64_t>(std::thread::hardware_concurrency());
  Json devices = Json::array();
  for (const char* folder : {"/proc/driver/nvidia/gpus"}) {
    auto names = env->List(folder);
    if (!names.ok()) continue;
    for (const std::string& gpu : *names) {
      auto text = env->ReadFile(fmt::format("{}/{}/information", folder, gpu));
      if (text.ok()) devices.push_back(Utf8(*text));
    }
  }
  auto driver = env->ReadFile("/proc/driver/nvidia/version");
  out["driver"] = driver.ok() ? Utf8(*driver) : "none";
  out["devices"] = std::move(devices);
  char cwd[4096];
  if (::getcwd(cwd, sizeof(cwd)) != nullptr) out["working_directory"] = Utf8(cwd);
  if (!command.empty()) {
    const std::string executable = FindExecutable(command[0]);
    char resolved[PATH_MAX];
    if (!executable.empty() && ::realpath(executable.c_str(), resolved) != nullptr) {
      auto digest = HashPath(env, resolved);
      out["executable"] = {{"path", Utf8(resolved)}, {"sha256", digest.ok() ? *digest : "unknown"}};
    }
  }
  Json hashed = Json::array();
  for (const std::string& path : libraries) {
    auto digest = HashPath(env, path);
    hashed.push_back({{"path", Utf8(path)}, {"sha256", digest.ok() ? *digest : "unknown"}});
  }
  out["libraries"] = std::move(hashed);
  // Names of all variables; values only of those known to move arithmetic, as others hold secrets.
  Json values = Json::object(), names = Json::array();
  for (char** e = environ; *e != nullptr; ++e) {
    const std::string_view entry = *e;
    const size_t equals = entry.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string key(entry.substr(0, equals));
    bool keep = key == "PATH" || key == "LD_LIBRARY_PATH" || key == "LD_PRELOAD";
    for (const char* prefix :
         {"TARE_", "CUDA_", "NCCL_", "OMP_", "MKL_", "VLLM_", "SGLANG_", "TORCH_", "PYTORCH_",
          "CUBLAS_", "NVTE_", "OPENBLAS_", "HIP_", "TRITON_"}) {
      keep = keep || key.starts_with(prefix);
    }
    for (const char* secret : {"TOKEN", "KEY", "SECRET", "PASS", "AUTH", "CRED"}) {
      if (key.find(secret) != std::string::npos) keep = false;
    }
    if (keep) {
      values[Printable(key)] = Printable(entry.substr(equals + 1));
    } else {
      names.push_back(Printable(key));
    }
  }
  std::sort(names.begin(), names.end());
  out["environment"] = std::move(values);
  out["environment_names"] = std::move(names);
  return out;
}

}  // namespace tare::workflow
