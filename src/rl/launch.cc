#include "rl/launch.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <string_view>
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

// What a phase costs against another, for the guess of the time left: of a run of SmolLM2 on two
// cores. Only the ratios count.
double Weight(std::string_view event) {
  if (event == "rollout") return 1;
  if (event == "compare") return 2;
  if (event == "update") return 6;
  if (event == "publish") return 2;
  return 0.5;  // start, end
}

// Reads the phases that the worker's log tells, and what is left.
class Watch {
 public:
  Watch(int64_t steps, const LaunchOptions& options)
      : options_(options), begin_(Env::Real()->MonotonicNs()) {
    phases_.push_back("start");
    for (int64_t v = 0; v <= steps; ++v) {
      phases_.push_back("rollout");
      phases_.push_back("compare");
      if (v < steps) phases_.insert(phases_.end(), {"update", "publish"});
    }
    phases_.push_back("end");
  }
  // Phases that the worker has begun; shows each new one.
  int64_t Read(const std::string& log) {
    const Result<std::string> text = Env::Real()->ReadFile(log);
    if (!text.ok()) return begun_;
    for (size_t end; (end = text->find('\n', shown_)) != std::string::npos; shown_ = end + 1) {
      const std::string line = text->substr(shown_, end - shown_);
      const std::string word = line.substr(0, line.find(' '));
      if (begun_ + 1 < static_cast<int64_t>(phases_.size()) &&
          word == phases_[static_cast<size_t>(begun_ + 1)] && line.find(" theta") == word.size()) {
        ++begun_;
        Show(line);
      } else {
        Show(line, /*phase=*/false);
      }
    }
    return begun_;
  }
  void Show(const std::string& what, bool phase = true) {
    if (options_.progress == nullptr) return;
    Progress p;
    p.what = what;
    p.all = static_cast<int64_t>(phases_.size());
    p.done = begun_;
    p.seconds = static_cast<double>(Env::Real()->MonotonicNs() - begin_) * 1e-9;
    double done = 0, left = 0;
    for (int64_t i = 0; i < p.all; ++i)
      (i < begun_ ? done : left) += Weight(phases_[static_cast<size_t>(i)]);
    if (phase && begun_ > 1) p.left = p.seconds / done * left;
    options_.progress(p);
  }

 private:
  const LaunchOptions& options_;
  int64_t begin_;
  std::vector<std::string> phases_;
  int64_t begun_ = 0;
  size_t shown_ = 0;
};

}  // namespace

Status CheckTwoStepsFirst(const LoopConfig& config, const LaunchOptions& options) {
  if (config.steps <= 2) return Ok();
  if (options.after.empty()) {
    return Error(Code::kPrecondition,
                 "{} steps without a receipt of two: run the same with --steps 2, then name its "
                 "receipt with --after",
                 config.steps);
  }
  TARE_ASSIGN_OR_RETURN(const std::string text, Env::Real()->ReadFile(options.after));
  TARE_ASSIGN_OR_RETURN(const Json receipt, ParseJson(text));
  const size_t slash = options.after.rfind('/');
  const Judgement j = Judge(Env::Real(), receipt,
                            slash == std::string::npos ? "." : options.after.substr(0, slash));
  if (j.verdict != Verdict::kPass) {
    return Error(Code::kPrecondition, "{}: {} {}; a pass is needed", options.after,
                 VerdictName(j.verdict), j.reason);
  }
  TARE_ASSIGN_OR_RETURN(const LoopConfig was, LoopConfig::FromJson(receipt.at("config")));
  const Json a = Recipe(was), b = Recipe(config);
  for (const auto& [key, value] : a.items()) {
    if (b.at(key) != value) {
      return Error(Code::kPrecondition, "{}: another recipe: {} was {}, is {}", options.after, key,
                   value.dump(), b.at(key).dump());
    }
  }
  return Ok();
}

Result<LaunchResult> RunLoop(const LoopConfig& asked, const LaunchOptions& options) {
  TARE_RETURN_IF_ERROR(CheckConfig(asked));
  TARE_RETURN_IF_ERROR(CheckTwoStepsFirst(asked, options));
  LoopConfig config = asked;
  config.stop_at_event = std::max(options.kill_rollout_at_event, options.kill_trainer_at_event);
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
      "64",
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
  Watch watch(config.steps, options);
  watch.Show("start");
  const uint16_t port = WaitForPort(&rollout, port_file, 300);

  Json processes = Json::array(), rollout_files = Json::object(), trainer_files = Json::object();
  Json trainer_json{{"name", "trainer"}, {"pid", -1},  {"command", Json::array()},
                    {"ended", false},    {"code", -1}, {"signal", 0}};
  int64_t peak = 0;
  if (port != 0) {
    std::vector<std::string> worker = {
        tare,    "rl-worker", "--config", options.out + "/config.json",
        "--out", options.out, "--port",   fmt::format("{}", port)};
    if (config.probe) worker.push_back("--probe");
    TARE_ASSIGN_OR_RETURN(Process trainer,
                          Process::Start("trainer", worker, options.trainer_environment,
                                         options.out + "/trainer.log"));
    auto stop_by =
        std::chrono::steady_clock::now() + std::chrono::duration<double>(options.limit_seconds);
    bool looked = false, ending = false;
    while (!trainer.Poll() && std::chrono::steady_clock::now() < stop_by) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      peak = std::max(peak, rollout.RssBytes() + trainer.RssBytes());
      const int64_t begun = watch.Read(options.out + "/trainer.log");
      if (config.stop_at_event >= 0 && trainer.Stopped()) {
        // The worker has stopped itself where it was told to: no race decides what is killed when.
        if (options.kill_rollout_at_event >= 0) rollout.Kill();
        if (options.kill_trainer_at_event >= 0) trainer.Kill();
        trainer.Continue();
        config.stop_at_event = -1;
      }
      if (begun >= 1 && !looked) {
        // Both run: what each has really loaded.
        looked = true;
        rollout_files = rollout.LoadedFiles();
        trainer_files = trainer.LoadedFiles();
      }
      // After its last phase it has no more to do than to end.
      if (begun == 4 * config.steps + 3 && !ending) {
        ending = true;
        const auto by =
            std::chrono::steady_clock::now() + std::chrono::duration<double>(options.stop_seconds);
        if (by < stop_by) stop_by = by;
      }
    }
    trainer.Wait(0);
    trainer_json = trainer.ToJson();
  }
  watch.Show("stop");
  if (port != 0 && !rollout.Poll()) {
    engine::client::Endpoint endpoint;
    endpoint.port = port;
    endpoint.timeout_seconds = 10;
    (void)engine::client::SendJson(endpoint, "POST", "/shutdown", Json::object())
        .ok();  // its exit tells
  }
  rollout.Wait(options.stop_seconds);
  processes.push_back(rollout.ToJson());
  processes.push_back(trainer_json);
  processes[0]["loaded_files"] = rollout_files;
  processes[1]["loaded_files"] = trainer_files;

  const Json rounds = ReadJson(options.out + "/rounds.json");
  const auto part = [&](const char* key, const Json& otherwise) {
    return rounds.is_object() && rounds.contains(key) ? rounds.at(key) : otherwise;
  };
  LaunchResult result;
  result.receipt = Json{
      {"schema", "tare.receipt/1"},
      {"started", started},
      {"ended", FormatUtc(env->NowNs())},
      {"scope",
       "bitwise agreement of rollout and training logprobs over real updates, on this model, "
       "machine and configuration; no claim about other systems or about quality"},
      {"config", config.ToJson()},
      {"identities", Json{{"rollout", part("rollout_identity", nullptr)},
                          {"trainer", part("identity", nullptr)}}},
      {"processes", processes},
      // The largest sum of both processes' resident bytes at one moment, looked at every 10 ms.
      {"peak_rss_bytes", peak},
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
