#include "rl/launch.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "base/env.h"
#include "engine/client/client.h"
#include "rl/process.h"

namespace tare::rl {
namespace {

Result<std::string> SelfPath() {
  char buffer[4096];
  const ssize_t n = ::readlink("/proc/self/exe", buffer, sizeof buffer);
  if (n <= 0 || n == static_cast<ssize_t>(sizeof buffer))
    return Error(Code::kIo, "the path of this executable is unknown");
  return std::string(buffer, static_cast<size_t>(n));
}

Json ReadJson(const std::string& path) {
  const Result<std::string> text = Env::Real()->ReadFile(path);
  if (!text.ok()) return nullptr;
  const Result<Json> json = ParseJson(*text);
  return json.ok() ? *json : Json(nullptr);
}

// Waits until the server has written its port, or ends.
uint16_t WaitForPort(Process* rollout, const std::string& file, double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < deadline && !rollout->Poll()) {
    if (const Result<std::string> text = Env::Real()->ReadFile(file); text.ok()) {
      unsigned port = 0;
      const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), port);
      if (error == std::errc() && port > 0 && port < 65536) return static_cast<uint16_t>(port);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return 0;
}

}  // namespace

Result<LaunchResult> RunLoop(const LoopConfig& config, const LaunchOptions& options) {
  TARE_RETURN_IF_ERROR(CheckConfig(config));
  Env* env = Env::Real();
  const int64_t begin = env->MonotonicNs();
  std::string tare = options.executable;
  if (tare.empty()) {
    TARE_ASSIGN_OR_RETURN(tare, SelfPath());
  }
  if (env->Exists(options.out + "/receipt.json")) {
    return Error(Code::kAlreadyExists, "{}/receipt.json exists; name a new directory", options.out);
  }
  TARE_RETURN_IF_ERROR(env->CreateDirs(options.out));
  const std::string started = FormatUtc(env->NowNs());
  TARE_RETURN_IF_ERROR(
      env->WriteFileAtomic(options.out + "/config.json", config.ToJson().dump(1) + "\n"));

  const std::string port_file = options.out + "/port";
  std::vector<std::string> serve = {
      tare,
      "serve",
      config.model,
      "--port",
      "0",
      "--port-file",
      port_file,
      "--profile",
      config.profile,
      "--threads",
      fmt::format("{}", config.threads),
      "--kv-cache-mib",
      "256",
      "--weight-version",
      "0",
      "--stop-seconds",
      "10",
      config.prefix_caching ? "--enable-prefix-caching" : "--no-enable-prefix-caching"};
  if (!config.faults.empty()) serve.insert(serve.end(), {"--fault", config.faults});
  if (config.probe) {
    // One prefill and a decode step for every further token of the probe.
    serve.insert(serve.end(), {"--dump", options.out + "/probe.rollout.dump", "--dump-frames",
                               fmt::format("{}", std::min<int64_t>(config.max_tokens, 8))});
  }
  serve.insert(serve.end(), options.serve_arguments.begin(), options.serve_arguments.end());
  TARE_ASSIGN_OR_RETURN(
      Process rollout,
      Process::Start("rollout", serve, options.rollout_environment, options.out + "/rollout.log"));
  const uint16_t port = WaitForPort(&rollout, port_file, 300);

  Json processes = Json::array();
  Json trainer_json{{"name", "trainer"}, {"pid", -1},  {"command", Json::array()},
                    {"ended", false},    {"code", -1}, {"signal", 0}};
  if (port != 0) {
    std::vector<std::string> worker = {
        tare,    "rl-worker", "--config", options.out + "/config.json",
        "--out", options.out, "--port",   fmt::format("{}", port)};
    if (config.probe) worker.push_back("--probe");
    TARE_ASSIGN_OR_RETURN(Process trainer,
                          Process::Start("trainer", worker, options.trainer_environment,
                                         options.out + "/trainer.log"));
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::duration<double>(options.limit_seconds);
    size_t shown = 0;
    while (!trainer.Poll() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      if (!options.quiet) {
        // The worker's log is its progress.
        if (const Result<std::string> log = env->ReadFile(options.out + "/trainer.log");
            log.ok() && log->size() > shown) {
          const size_t end = log->rfind('\n');
          if (end != std::string::npos && end + 1 > shown) {
            std::fprintf(stderr, "%s", log->substr(shown, end + 1 - shown).c_str());
            shown = end + 1;
          }
        }
      }
      if (options.kill_rollout_after_rounds >= 0) {
        const Json seen = ReadJson(options.out + "/rounds.json");
        if (seen.is_object() && static_cast<int64_t>(seen.value("rounds", Json::array()).size()) >=
                                    options.kill_rollout_after_rounds) {
          rollout.Kill();
        }
      }
    }
    trainer.Wait(0);
    trainer_json = trainer.ToJson();
  }
  if (port != 0 && !rollout.Poll()) {
    engine::client::Endpoint endpoint;
    endpoint.port = port;
    endpoint.timeout_seconds = 10;
    (void)engine::client::SendJson(endpoint, "POST", "/shutdown", Json::object())
        .ok();  // its exit tells
  }
  rollout.Wait(60);
  processes.push_back(rollout.ToJson());
  processes.push_back(trainer_json);

  const Json rounds = ReadJson(options.out + "/rounds.json");
  const auto part = [&](const char* key, const Json& otherwise) {
    return rounds.is_object() && rounds.contains(key) ? rounds.at(key) : otherwise;
  };
  LaunchResult result;
  result.receipt =
      Json{{"schema", "tare.receipt/1"},
           {"started", started},
           {"ended", FormatUtc(env->NowNs())},
           {"scope",
            "bitwise agreement of rollout and training logprobs over real updates, on this model, "
            "machine and configuration; no claim about other systems or about quality"},
           {"config", config.ToJson()},
           {"identities", Json{{"rollout", part("rollout_identity", nullptr)},
                               {"trainer", part("identity", nullptr)}}},
           {"processes", processes},
           {"events", part("events", Json::array())},
           {"rounds", part("rounds", Json::array())},
           {"updates", part("updates", Json::array())}};
  TARE_RETURN_IF_ERROR(env->WriteFileAtomic(
      options.out + "/receipt.json",
      result.receipt.dump(1, ' ', false, Json::error_handler_t::replace) + "\n"));
  result.judgement = Judge(env, result.receipt, options.out);
  TARE_RETURN_IF_ERROR(env->WriteFileAtomic(options.out + "/verdict.json",
                                            result.judgement.ToJson().dump(1) + "\n"));
  result.seconds = static_cast<double>(env->MonotonicNs() - begin) * 1e-9;
  return result;
}

}  // namespace tare::rl
