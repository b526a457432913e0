// `tare bench closed MODEL`: a short closed-loop measurement of our own engine, in this process:
// waves of c requests, exact lengths, end-of-sequence ignored, prompts that share nothing. It has
// no HTTP in it and says nothing about a server; gate C1 uses it for its declared short workload.

#include <sys/times.h>

#include <algorithm>
#include <condition_variable>
#include <fstream>
#include <memory>
#include <mutex>
#include <set>

#include "base/env.h"
#include "base/sha256.h"
#include "engine/serving.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string model, arm = "native", profile = "ieee-f32";
  std::vector<int> concurrency = {1, 2};
  int input = 32, output = 16, rounds = 3, waves = 2, threads = 0;
  uint32_t salt = 0;
  int64_t max_num_batched_tokens = 2048, max_model_len = 1024;
  bool json = false;
};

struct Wave {
  std::mutex mutex;
  std::condition_variable done;
  int open = 0;
  std::vector<int64_t> output_tokens;
  std::string error;
};

// One wave: `c` requests at once, until all have ended. Counted tokens go into `wave`.
Status RunWave(engine::Engine* engine, const Options& o, int c, uint32_t salt, Wave* wave) {
  wave->open = c;
  wave->output_tokens.assign(static_cast<size_t>(c), 0);
  for (int i = 0; i < c; ++i) {
    engine::Request r;
    r.id = fmt::format("closed-{}-{}", salt, i);
    uint32_t x = salt * 2654435761u + static_cast<uint32_t>(i) * 40503u + 1;
    for (int t = 0; t < o.input; ++t) {
      x = x * 1664525u + 1013904223u;
      r.prompt.push_back(static_cast<int32_t>((x >> 8) % engine->model_config().vocab));
    }
    r.params.max_tokens = o.output;
    r.params.seed = salt + static_cast<uint32_t>(i);
    r.params.ignore_eos = true;
    r.callback = [wave, i](const engine::SequenceEvent& event) {
      std::lock_guard lock(wave->mutex);
      wave->output_tokens[static_cast<size_t>(i)] += static_cast<int64_t>(event.tokens.size());
      if (!event.finish) return;
      if (*event.finish == engine::FinishReason::kError) wave->error = event.error;
      if (--wave->open == 0) wave->done.notify_all();
    };
    TARE_RETURN_IF_ERROR(engine->Submit(std::move(r)));
  }
  std::unique_lock lock(wave->mutex);
  wave->done.wait(lock, [&] { return wave->open == 0; });
  return wave->error.empty() ? Ok() : Error(Code::kAborted, "a request failed: {}", wave->error);
}

// Processor time in clock ticks: of the whole machine, and of this process.
struct Ticks {
  int64_t busy = 0, all = 0, own = 0;
};
Ticks Now() {
  Ticks t;
  std::ifstream in("/proc/stat");
  std::string cpu;
  in >> cpu;
  for (int i = 0; i < 8; ++i) {
    int64_t n = 0;
    in >> n;
    t.all += n;
    if (i != 3 && i != 4) t.busy += n;  // idle and waiting for a disk are free
  }
  tms own{};
  ::times(&own);
  t.own = own.tms_utime + own.tms_stime;
  return t;
}
// Others took more than a tenth of the machine meanwhile.
bool ForeignLoad(const Ticks& a, const Ticks& b) {
  return (b.busy - a.busy) - (b.own - a.own) > std::max<int64_t>(2, (b.all - a.all) / 10);
}

Result<Json> Measure(const Options& o) {
  engine::ServingConfig config;
  config.model_path = o.model;
  const std::optional<Profile> profile = ParseProfile(o.profile);
  if (!profile) return InvalidArgument("--profile {}", Printable(o.profile));
  config.engine.profile = *profile;
  config.engine.threads = o.threads;
  config.engine.kv_cache_bytes = int64_t{256} << 20;
  config.engine.scheduler.max_model_len = o.max_model_len;
  config.engine.scheduler.max_num_batched_tokens = o.max_num_batched_tokens;
  config.engine.batch_invariant.effective =
      o.arm == "native" ? ops::BatchInvariance::kOff : ops::BatchInvariance::kOn;
  TARE_ASSIGN_OR_RETURN(const auto serving, engine::Serving::Start(config));
  engine::Engine& engine = serving->engine();
  // Requests of their own for every salt, the same for both arms.
  uint32_t salt = 1 + o.salt * 1000u;
  const std::string workload = fmt::format("salt {} first {} input {} output {} waves {} rounds {}",
                                           o.salt, salt, o.input, o.output, o.waves, o.rounds);
  Wave warm;
  TARE_RETURN_IF_ERROR(RunWave(&engine, o, 1, salt++, &warm));
  (void)engine.TakeLaunches();
  constexpr int64_t kWarm = 1;  // served by every fresh engine of both arms, shares no prompt
  int64_t served = 0;
  Json rounds = Json::array();
  for (int round = 0; round < o.rounds; ++round) {
    for (const int c : o.concurrency) {  // points interleaved, so that drift meets all of them
      std::vector<int64_t> inputs, outputs;
      const Ticks before = Now();
      const int64_t begin = Env::Real()->MonotonicNs();
      for (int w = 0; w < o.waves; ++w) {
        Wave wave;
        TARE_RETURN_IF_ERROR(RunWave(&engine, o, c, salt++, &wave));
        for (const int64_t n : wave.output_tokens) {
          inputs.push_back(o.input);
          outputs.push_back(n);
          ++served;
        }
      }
      const double seconds = static_cast<double>(Env::Real()->MonotonicNs() - begin) * 1e-9;
      int64_t total = 0;
      for (const int64_t n : outputs) total += n;
      rounds.push_back(Json{{"round", round},
                            {"concurrency", c},
                            {"seconds", seconds},
                            {"foreign_load", ForeignLoad(before, Now())},
                            {"output_throughput", static_cast<double>(total) / seconds},
                            {"input_tokens", inputs},
                            {"output_tokens", outputs}});
    }
  }
  std::set<std::string> kernels;
  for (const ops::Launch& l : engine.TakeLaunches()) kernels.insert(l.kernel);
  const engine::Stats stats = engine.GetStats();
  TARE_ASSIGN_OR_RETURN(const std::string weights, engine.WeightHash());
  return Json{{"schema", "tare.bench.closed/1"},
              {"arm", o.arm},
              {"weights_sha256", weights},
              {"kernels", kernels},
              {"prefix_hits", stats.scheduler.prefix_hits},
              {"workload_sha256", Hex(Sha256Of(workload))},
              // Beside the one warm-up request.
              {"served_before", stats.finished_length + stats.finished_stop - served - kWarm},
              {"max_model_len", o.max_model_len},
              {"execution",
               Json{{"block_size", std::to_string(stats.block_size)},
                    {"graph", "none"},
                    {"max_num_batched_tokens",
                     std::to_string(engine.config().scheduler.max_num_batched_tokens)},
                    {"prefix_cache", engine.config().scheduler.prefix_caching ? "true" : "false"},
                    {"batch_invariant", o.arm == "native" ? "0" : "1"}}},
              {"kv_dtype", DTypeName(engine.model_config().dtype)},
              {"weights_dtype", DTypeName(engine.model_config().dtype)},
              {"activations_dtype", DTypeName(engine.model_config().dtype)},
              {"rounds", rounds}};
}

int Run(const Options& o) {
  const Result<Json> out = Measure(o);
  if (!out.ok()) return ReportError(out.status());
  if (o.json) {
    fmt::print("{}\n", out->dump(1));
    return 0;
  }
  for (const Json& r : out->at("rounds")) {
    fmt::print("round {} concurrency {:3}: {:9.1f} output tokens/s\n", r["round"].get<int>(),
               r["concurrency"].get<int>(), r["output_throughput"].get<double>());
  }
  return 0;
}

}  // namespace

TARE_COMMAND(bench_closed, [](CLI::App& root) {
  CLI::App* bench = Group(root, "bench", "measure, and judge what was measured");
  CLI::App* app = bench->add_subcommand("closed", "a short closed loop on our own engine");
  auto o = std::make_shared<Options>();
  app->add_option("model", o->model, "a Hugging Face directory or a GGUF file")->required();
  app->add_option("--arm", o->arm, "native or invariant")
      ->check(CLI::IsMember({"native", "invariant"}))
      ->capture_default_str();
  app->add_option("--profile", o->profile, "ieee-f32 or sm90-mma")->capture_default_str();
  app->add_option("--concurrency", o->concurrency, "requests at once, for each point")
      ->delimiter(',')
      ->check(CLI::Range(1, 64));
  app->add_option("--input-len", o->input, "tokens of every prompt")->check(CLI::Range(1, 65536));
  app->add_option("--output-len", o->output, "tokens of every output")->check(CLI::Range(1, 65536));
  app->add_option("--salt", o->salt, "another number, other prompts");
  app->add_option("--rounds", o->rounds, "of every point")->check(CLI::Range(1, 1000));
  app->add_option("--waves", o->waves, "waves of requests in a round")->check(CLI::Range(1, 1000));
  app->add_option("--max-num-batched-tokens", o->max_num_batched_tokens, "of one engine step")
      ->check(CLI::Range(1, 1 << 20));
  app->add_option("--max-model-len", o->max_model_len, "longest sequence");
  app->add_option("--threads", o->threads, "0: the CPUs of the affinity mask");
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] { SetExit(Run(*o)); });
});

}  // namespace tare
