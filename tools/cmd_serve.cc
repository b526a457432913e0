// `tare serve MODEL`: the serving engine behind an OpenAI-compatible server, with vLLM's option
// names.

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <mutex>
#include <string>

#include <thread>

#include "base/env.h"
#include "base/fault.h"
#include "engine/serving.h"
#include "tensor/dump.h"
#include "tensor/replay_command.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  engine::ServingConfig serving;
  std::string profile = "ieee-f32";
  std::string logprobs_mode = "raw_logprobs";
  std::string port_file;
  std::string faults;
  double stop_seconds = 30;
  int64_t kv_cache_mib = 1024;
  std::string dump;
  int64_t dump_frames = 0;
};

// Hands the first frames on to a dump and drops the others.
class FirstFrames : public Tap {
 public:
  FirstFrames(std::unique_ptr<DumpWriter> writer, int64_t frames)
      : writer_(std::move(writer)), left_(frames) {}
  void BeginFrame(const TapFrame& frame) override {
    open_ = left_ > 0;
    if (open_) writer_->BeginFrame(frame);
  }
  void Emit(const TapPoint& point, const Tensor& value) override {
    if (open_) writer_->Emit(point, value);
  }
  void EndFrame() override {
    if (!open_) return;
    writer_->EndFrame();
    if (--left_ == 0) status_ = writer_->Finish();
  }
  // After the last call of the engine.
  Status Finish() { return left_ > 0 ? writer_->Finish() : status_; }

 private:
  std::unique_ptr<DumpWriter> writer_;
  int64_t left_;
  bool open_ = false;
  Status status_;
};

int Run(Options& o) {
  if (const Status s = fault::Select(o.faults); !s.ok()) return ReportError(s);
  const Result<engine::Switch> bi = engine::ReadSwitch();
  if (!bi.ok()) return ReportError(bi.status());
  const std::optional<Profile> profile = ParseProfile(o.profile);
  if (!profile)
    return ReportError(InvalidArgument("--profile {}: ieee-f32 or sm90-mma", o.profile));
  if (o.logprobs_mode != "raw_logprobs" && o.logprobs_mode != "processed_logprobs") {
    return ReportError(
        InvalidArgument("--logprobs-mode {}: raw_logprobs or processed_logprobs", o.logprobs_mode));
  }
  engine::ServingConfig& c = o.serving;
  c.engine.batch_invariant = *bi;
  c.engine.profile = *profile;
  c.engine.kv_cache_bytes = o.kv_cache_mib << 20;
  c.processed_logprobs = o.logprobs_mode == "processed_logprobs";

  // Signals are taken by a thread of their own: nothing runs in a handler.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  const pid_t self = ::getpid();
  c.shutdown = [self] { ::kill(self, SIGTERM); };

  Result<std::unique_ptr<engine::Serving>> serving = engine::Serving::Start(c);
  if (!serving.ok()) return ReportError(serving.status());
  engine::Serving& s = **serving;
  std::unique_ptr<FirstFrames> tap;
  if (!o.dump.empty()) {
    DumpOptions options;
    options.manifest.side = "rollout";
    options.sync = false;
    const Result<std::string> weights = s.engine().WeightHash();
    if (!weights.ok()) return ReportError(weights.status());
    const Result<Sha256Digest> digest = ParseSha256(*weights);
    if (!digest.ok()) return ReportError(digest.status());
    const std::string version = fmt::format("theta{}", c.engine.weight_version);
    options.manifest.weights.push_back({version, *digest});
    const bool native = bi->effective != ops::BatchInvariance::kOn;
    // Token by token through a paged cache, as decode computes it.
    options.manifest.identity =
        Json{{"command", "tare serve"},
             {"profile", o.profile},
             {"faults", fault::Selected()},
             {"batch_invariance", native ? "off" : "on"},
             {"replay", ReplayArguments({.model = c.model_path,
                                         .profile = o.profile,
                                         .side = "rollout",
                                         .faults = fault::Selected(),
                                         .weight_version = version,
                                         .chunk = 1,
                                         .page_size = s.engine().config().scheduler.block_size,
                                         .native = native})}};
    Result<std::unique_ptr<DumpWriter>> writer =
        DumpWriter::Create(Env::Real(), o.dump, std::move(options));
    if (!writer.ok()) return ReportError(writer.status());
    tap = std::make_unique<FirstFrames>(*std::move(writer),
                                        o.dump_frames > 0 ? o.dump_frames : INT64_MAX);
    s.engine().SetTap(tap.get());
  }
  std::fprintf(
      stderr,
      "tare: serving %s on http://%s:%d  batch invariant: %s  profile: %s  blocks: %lld of %lld\n",
      s.model_name().c_str(), c.http.host.c_str(), s.port(),
      bi->effective == ops::BatchInvariance::kOn ? "on" : "off (native arm)", o.profile.c_str(),
      static_cast<long long>(s.engine().config().scheduler.num_blocks),
      static_cast<long long>(s.engine().config().scheduler.block_size));
  if (!o.port_file.empty()) {
    const Status written = Env::Real()->WriteFileAtomic(o.port_file, fmt::format("{}\n", s.port()));
    if (!written.ok()) return ReportError(written);
  }
  int signal = 0;
  sigwait(&signals, &signal);
  std::fprintf(stderr, "tare: stopping; requests in flight get up to %.0f s\n", o.stop_seconds);
  s.Stop(o.stop_seconds);
  if (tap != nullptr) {
    if (const Status dumped = tap->Finish(); !dumped.ok()) return ReportError(dumped);
  }
  return 0;
}

}  // namespace

TARE_COMMAND(serve, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "serve", "serve a model over HTTP, as vLLM does, with exact logprob bits");
  auto o = std::make_shared<Options>();
  engine::ServingConfig& c = o->serving;
  app->add_option("model", c.model_path, "checkpoint: a Hugging Face directory or a GGUF file")
      ->required();
  app->add_option("--host", c.http.host, "address to listen on")->capture_default_str();
  c.http.port = 8000;
  app->add_option("--port", c.http.port, "port; 0 takes a free one")->capture_default_str();
  app->add_option("--port-file", o->port_file, "write the port here once it serves");
  app->add_option("--served-model-name", c.served_model_name,
                  "name for clients (default: the last part of the path)");
  app->add_option("--api-key", c.api_key, "ask every request for `Authorization: Bearer KEY`")
      ->envname("VLLM_API_KEY");
  app->add_option("--max-model-len", c.engine.scheduler.max_model_len,
                  "longest sequence (default: the model's)");
  app->add_option("--max-num-seqs", c.engine.scheduler.max_num_seqs, "sequences in a step")
      ->capture_default_str();
  app->add_option("--max-num-batched-tokens", c.engine.scheduler.max_num_batched_tokens,
                  "tokens in a step")
      ->capture_default_str();
  app->add_option("--block-size", c.engine.scheduler.block_size, "tokens in a KV block")
      ->capture_default_str();
  app->add_option("--num-blocks", c.engine.scheduler.num_blocks,
                  "KV blocks (default: from --kv-cache-mib)");
  app->add_option("--kv-cache-mib", o->kv_cache_mib, "memory for the KV cache")
      ->capture_default_str();
  app->add_flag("--enable-prefix-caching,!--no-enable-prefix-caching",
                c.engine.scheduler.prefix_caching, "reuse blocks of equal prefixes")
      ->capture_default_str();
  app->add_flag("--enable-chunked-prefill,!--no-enable-chunked-prefill",
                c.engine.scheduler.chunked_prefill, "cut long prompts")
      ->capture_default_str();
  app->add_option("--max-queued", c.engine.max_queued, "sequences that may wait")
      ->capture_default_str();
  app->add_option("--threads", c.engine.threads, "compute threads (0: the CPUs of this process)")
      ->capture_default_str();
  app->add_option("--profile", o->profile, "contraction profile: ieee-f32 or sm90-mma")
      ->capture_default_str();
  app->add_option("--logprobs-mode", o->logprobs_mode, "raw_logprobs or processed_logprobs")
      ->capture_default_str();
  app->add_option("--weight-version", c.engine.weight_version, "version of the weights at start")
      ->capture_default_str();
  app->add_option("--fault", o->faults, "planted faults, name@rollout,...");
  app->add_option("--dump", o->dump, "write every tensor of every step to this new dump");
  app->add_option("--dump-frames", o->dump_frames, "of the first steps only (0: all)")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--stop-seconds", o->stop_seconds, "time for requests in flight at the end")
      ->capture_default_str();
  app->footer(
      "VLLM_BATCH_INVARIANT=1 selects the batch-invariant arm; unset or 0 the native arm. Read "
      "once at start.");
  app->callback([o] { SetExit(Run(*o)); });
});

}  // namespace tare
