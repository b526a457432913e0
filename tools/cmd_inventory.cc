// `tare inventory MODEL`: what a checkpoint holds and what really runs for it, from traces of the
// engine and of a training step: the raw material of gates C0 and C4. Judges nothing.
//
// --subject: only what every gate says of its subject. --profile: launches at N, 2N and 4N tokens.

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "base/env.h"
#include "base/sha256.h"
#include "engine/serving.h"
#include "models/forward.h"
#include "ops/registry.h"
#include "tensor/weight_hash.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string model, trainer, profile = "ieee-f32";
  bool subject = false, profiles = false, json = false;
  int threads = 0;
};

struct Module {
  const char* id;
  const char* name;
  std::vector<const char*> tensors;  // parts of a tensor's name
  std::vector<const char*> values;   // parts of a traced value's name
  std::vector<const char*> ops;      // launched operators that belong to it
};

// Which module a thing belongs to is read from its name; whatever has no match is left without a
// row, and the judge refuses it. The first match counts.
const std::vector<Module>& Modules() {
  static const std::vector<Module> modules = {
      {"M01", "embedding", {"embed_tokens"}, {"embed."}, {"embedding"}},
      {"M02", "q/k norm", {"q_norm", "k_norm"}, {"q_norm", "k_norm"}, {"headnorm"}},
      {"M03",
       "norm and residual",
       {"layernorm", "model.norm"},
       {"layernorm", ".mid", "layers.*.out", "norm.out"},
       {"rmsnorm"}},
      {"M04", "rope", {}, {".rope"}, {"rope"}},
      {"M05",
       "attention projections",
       {"q_proj", "k_proj", "v_proj", "o_proj"},
       {"q_proj", "k_proj", "v_proj", "o_proj"},
       {}},
      {"M06", "attention", {"sinks"}, {"attn.out"}, {"attention", "kv_cache"}},
      {"M07", "router", {"mlp.gate.", "router"}, {"router"}, {"router"}},
      {"M08",
       "mlp and experts",
       {"mlp."},
       {"mlp."},
       {"gate", "grouped_linear", "dispatch", "combine", "linear"}},
      {"M09",
       "head and logprob",
       {"lm_head"},
       {"logit", "logprob", "entropy"},
       {"head_logprob", "logprob"}},
      {"M10", "sampling", {}, {"sampl"}, {"sampling"}},
      {"M11", "casts", {}, {}, {"cast", "quantize"}}};
  return modules;
}

const Module* Find(const std::string& name, std::vector<const char*> Module::*parts) {
  for (const Module& m : Modules()) {
    for (const char* part : m.*parts) {
      if (name.find(part) != std::string::npos) return &m;
    }
  }
  return nullptr;
}
const Module* OfOp(const std::string& op) {
  for (const Module& m : Modules()) {
    if (std::any_of(m.ops.begin(), m.ops.end(), [&](const char* o) { return op == o; })) return &m;
  }
  return nullptr;
}

// "layers.12.mid" -> "layers.*.mid"
std::string AnyLayer(const std::string& name) {
  if (!name.starts_with("layers.")) return name;
  const size_t dot = name.find('.', 7);
  return dot == std::string::npos ? name : "layers.*" + name.substr(dot);
}

// Names of everything that a forward reports.
class NameTap : public Tap {
 public:
  void BeginFrame(const TapFrame&) override {}
  void Emit(const TapPoint& point, const Tensor&) override {
    std::lock_guard lock(mutex_);
    values_[AnyLayer(point.name)] = point.op;
    ops_.insert(point.op.substr(0, point.op.find('.')));
  }
  void EndFrame() override {}
  std::map<std::string, std::string> values() {
    std::lock_guard lock(mutex_);
    return values_;
  }
  // Of every value: one name may be made by several, as a layer's output is.
  std::set<std::string> ops() {
    std::lock_guard lock(mutex_);
    return ops_;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
  std::set<std::string> ops_;
};

using Launches = std::vector<ops::Launch>;

// One request through the engine, until it has ended.
Status Ask(engine::Engine* engine, int64_t prompt, int max_tokens) {
  std::mutex mutex;
  std::condition_variable done;
  bool open = true;
  std::string error;
  engine::Request r;
  r.id = fmt::format("inventory-{}-{}", prompt, max_tokens);
  for (int64_t i = 0; i < prompt; ++i) {
    r.prompt.push_back(static_cast<int32_t>((i * 7 + 3) % engine->model_config().vocab));
  }
  r.params.max_tokens = max_tokens;
  r.params.seed = 1;
  r.params.top_p = 0.9f;
  r.params.top_k = 20;
  r.params.ignore_eos = true;
  r.callback = [&](const engine::SequenceEvent& event) {
    std::lock_guard lock(mutex);
    if (!event.finish) return;
    if (*event.finish == engine::FinishReason::kError) error = event.error;
    open = false;
    done.notify_all();
  };
  TARE_RETURN_IF_ERROR(engine->Submit(std::move(r)));
  std::unique_lock lock(mutex);
  done.wait(lock, [&] { return !open; });
  if (!error.empty()) return Error(Code::kAborted, "{}", error);
  // The step that gave the last token is booked a moment later.
  lock.unlock();
  for (int i = 0; i < 1000 && engine->GetStats().running > 0; ++i) ::usleep(1000);
  return Ok();
}

struct Traces {
  std::map<std::string, Launches> phases;  // by phase, or "prefill/64" of a profile
  std::map<std::string, std::string> values;
  std::set<std::string> ops;
  std::map<std::string, int64_t> chunks;
  int64_t scratch_growth = 0;
};

// What one decode step launches: the run with one token more, less the run before it. The engine is
// deterministic, so the longer run begins with the shorter one.
Status TraceEngine(const Options& o, Profile profile, const std::vector<int64_t>& lengths,
                   int64_t chunk, Traces* out) {
  engine::ServingConfig c;
  c.model_path = o.model;
  c.engine.profile = profile;
  c.engine.threads = o.threads;
  c.engine.kv_cache_bytes = int64_t{64} << 20;
  c.engine.scheduler.prefix_caching = false;
  c.engine.scheduler.max_model_len = 1024;
  c.engine.batch_invariant.effective = ops::BatchInvariance::kOn;
  if (chunk > 0) c.engine.scheduler.max_num_batched_tokens = chunk;
  TARE_ASSIGN_OR_RETURN(const auto serving, engine::Serving::Start(c));
  NameTap tap;
  serving->engine().SetTap(&tap);
  for (const int64_t n : lengths) {
    (void)serving->engine().TakeLaunches();
    TARE_RETURN_IF_ERROR(Ask(&serving->engine(), n, 1));
    Launches prefill = serving->engine().TakeLaunches();
    TARE_RETURN_IF_ERROR(Ask(&serving->engine(), n, 2));
    Launches both = serving->engine().TakeLaunches();
    if (both.size() <= prefill.size()) {
      return Error(Code::kInternal, "a decode step of {} tokens launched nothing", n);
    }
    const std::string suffix = chunk > 0 ? fmt::format("/{}/chunked", n) : fmt::format("/{}", n);
    out->chunks["prefill" + suffix] = chunk > 0 ? (n + chunk - 1) / chunk : 1;
    out->phases["decode" + suffix].assign(
        both.begin() + static_cast<std::ptrdiff_t>(prefill.size()), both.end());
    out->phases["prefill" + suffix] = std::move(prefill);
  }
  serving->Stop(10);
  for (const auto& [name, op] : tap.values()) out->values[name] = op;
  for (const std::string& op : tap.ops()) out->ops.insert(op);
  return Ok();
}

// The grad-enabled forward and its backward, as the trainer calls them.
Status TraceTraining(const Options& o, Profile profile, const std::vector<int64_t>& lengths,
                     Traces* out) {
  ThreadPool pool(o.threads);
  TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(o.model));
  TARE_ASSIGN_OR_RETURN(const models::Model model,
                        models::Model::Load(&pool, checkpoint, {.side = fault::Side::kTrainer}));
  models::Scratch scratch;
  TARE_ASSIGN_OR_RETURN(models::Gradients gradients, models::Gradients::Zeros(model));
  NameTap tap;
  ops::LaunchTrace trace;
  ops::Ctx ctx;
  ctx.pool = &pool;
  ctx.profile = profile;
  ctx.side = fault::Side::kTrainer;
  ctx.trace = &trace;
  for (const int64_t n : lengths) {
    std::vector<int32_t> tokens(static_cast<size_t>(n)), targets(static_cast<size_t>(n), -1);
    for (int64_t i = 0; i < n; ++i) {
      tokens[static_cast<size_t>(i)] = static_cast<int32_t>((i * 7 + 3) % model.config().vocab);
      if (i > 0) targets[static_cast<size_t>(i - 1)] = tokens[static_cast<size_t>(i)];
    }
    models::Batch batch;
    models::TokenRun run;
    run.tokens = tokens;
    run.targets = targets;
    batch.runs.push_back(std::move(run));
    batch.phase = TapPhase::kTrain;
    for (int repeat = 0; repeat < 3; ++repeat) {
      const int64_t before = scratch.size_bytes();
      models::Tape tape;
      TARE_ASSIGN_OR_RETURN(const models::ForwardOutput got,
                            models::Forward(ctx, model, batch, &scratch, &tape, &tap));
      Launches forward = trace.Take();
      const std::vector<float> ones(got.logprob.size(), 1.0f);
      TARE_RETURN_IF_ERROR(models::Backward(ctx, model, batch, {.dlogprob = ones, .dentropy = {}},
                                            &tape, &scratch, &gradients));
      Launches step = forward;
      const Launches backward = trace.Take();
      step.insert(step.end(), backward.begin(), backward.end());
      out->phases[fmt::format("train-forward/{}", n)] = std::move(forward);
      out->phases[fmt::format("train-backward/{}", n)] = backward;
      out->phases[fmt::format("train-step/{}", n)] = std::move(step);
      if (repeat == 2) out->scratch_growth += scratch.size_bytes() - before;
    }
  }
  for (const auto& [name, op] : tap.values()) out->values[name] = op;
  for (const std::string& op : tap.ops()) out->ops.insert(op);
  return Ok();
}

std::string OpOf(const ops::Launch& l) { return l.op.substr(0, l.op.find('.')); }

// Terms of the formula, by module, from a configuration.
std::map<std::string, std::map<std::string, std::string>> Terms(const models::ModelConfig& c) {
  std::map<std::string, std::map<std::string, std::string>> t;
  std::string windows, sinks, experts;
  for (const models::LayerConfig& l : c.layers) {
    windows += fmt::format("{}{}", windows.empty() ? "" : ",", l.window);
    sinks += l.sink ? '1' : '0';
    experts += l.moe ? '1' : '0';
  }
  t["M01"] = {{"vocab", std::to_string(c.vocab)}, {"hidden", std::to_string(c.hidden)}};
  t["M02"] = t["M03"] = {{"epsilon", ops::HexWord(c.norm_eps)},
                         {"residual_dtype", std::string(DTypeName(c.residual_dtype))}};
  t["M04"] = {{"theta", ops::HexWord(c.rope.theta)},
              {"rotary_dim", std::to_string(c.rope.rotary_dim)},
              {"layout", std::to_string(static_cast<int>(c.rope.layout))},
              {"scaling", std::to_string(static_cast<int>(c.rope.scaling))},
              {"factor", ops::HexWord(c.rope.factor)}};
  t["M05"] = {{"qkv_bias", c.qkv_bias ? "yes" : "no"}, {"o_bias", c.o_bias ? "yes" : "no"}};
  t["M06"] = {{"q_heads", std::to_string(c.q_heads)},
              {"kv_heads", std::to_string(c.kv_heads)},
              {"window", windows},
              {"sink", sinks}};
  t["M07"] = {{"experts", std::to_string(c.experts)},
              {"top_k", std::to_string(c.top_k)},
              {"renormalise", c.renormalise ? "yes" : "no"},
              {"layers", experts}};
  t["M08"] = {{"activation", std::string(ops::gate::ActivationName(c.activation))},
              {"intermediate", std::to_string(c.intermediate)},
              {"expert_intermediate", std::to_string(c.expert_intermediate)},
              {"bias", c.mlp_bias ? "yes" : "no"}};
  t["M09"] = {{"tied", c.tied ? "yes" : "no"},
              {"logits_dtype", std::string(DTypeName(c.logits_dtype))}};
  return t;
}

Result<models::ModelConfig> ConfigOf(const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(path));
  return models::ParseConfig(checkpoint.config().raw);
}

// Executable and everything mapped beside it: the nearest thing to an image that a bare process
// has.
std::string ImageDigest(std::string* executable) {
  std::set<std::string> paths;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t slash = line.find('/');
    if (slash != std::string::npos && line.find(" r-xp ") != std::string::npos) {
      paths.insert(line.substr(slash));
    }
  }
  char self[4096];
  const ssize_t n = ::readlink("/proc/self/exe", self, sizeof self);
  std::string lines;
  for (const std::string& path : paths) {
    const auto file = Env::Real()->OpenReadable(path);
    const std::string digest = file.ok() ? Hex(Sha256Of((*file)->bytes())) : "unreadable";
    if (n > 0 && path == std::string_view(self, static_cast<size_t>(n))) *executable = digest;
    lines += digest + "  " + path.substr(path.rfind('/') + 1) + "\n";
  }
  return "sha256:" + Hex(Sha256Of(lines));
}

Result<Json> Subject(const Options& o, const WeightHash& hash, const models::ModelConfig& c) {
  std::vector<std::string> lines;
  for (const ops::OpInfo* op : ops::AllOps()) {
    for (const ops::OpKey& key : op->keys) {
      const ops::Contract contract = op->select(key);
      lines.push_back(fmt::format("{}/{}/{}={}\n", contract.op, contract.variant, key.ToString(),
                                  Hex(contract.Id())));
    }
  }
  std::sort(lines.begin(), lines.end());
  Json shapes = Json::array();
  for (const models::LayerConfig& l : c.layers) {
    Json types = {l.window > 0 ? "attention.window" : "attention.full"};
    if (l.sink) types.push_back("attention.sink");
    if (c.qk_norm) types.push_back("qk_norm");
    types.push_back(l.moe ? "moe" : "mlp");
    shapes.push_back({{"types", types},
                      {"states", Json::array({l.window > 0 ? "kv.window" : "kv"})},
                      {"shares", Json::array()}});
  }
  Json geometry = Json::object();
  for (const auto& [name, value] :
       std::map<std::string, int64_t>{{"hidden", c.hidden},
                                      {"intermediate", c.intermediate},
                                      {"q_heads", c.q_heads},
                                      {"kv_heads", c.kv_heads},
                                      {"head_dim", c.head_dim},
                                      {"vocab", c.vocab},
                                      {"experts", c.experts},
                                      {"top_k", c.top_k},
                                      {"expert_intermediate", c.expert_intermediate}}) {
    geometry[name] = std::to_string(value);
  }
  geometry["quant_block"] = "none";
  std::string path = o.model;
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  std::string executable;
  const std::string image = ImageDigest(&executable);
  return Json{{"schema", "tare.inventory/1"},
              {"model", path.substr(path.rfind('/') + 1)},
              {"source", path},
              {"weights", Hex(hash.digest)},
              {"image", image},
              {"contracts", Hex(Sha256Of(fmt::format("{}", fmt::join(lines, ""))))},
              {"executable_sha256", executable},
              {"commit", "0.1.0"},
              {"hidden", c.hidden},
              {"layers", c.layers.size()},
              {"vocab", c.vocab},
              {"dtype", DTypeName(c.dtype)},
              {"layer_shapes", shapes},
              {"geometry", geometry}};
}

Json LaunchJson(const Launches& launches, const std::string& phase) {
  std::map<std::tuple<std::string, std::string, std::string>, int64_t> counts;
  for (const ops::Launch& l : launches) ++counts[{OpOf(l), l.kernel, l.dtypes}];
  Json out = Json::array();
  for (const auto& [key, count] : counts) {
    out.push_back({{"phase", phase},
                   {"op", std::get<0>(key)},
                   {"kernel", std::get<1>(key)},
                   {"dtypes", std::get<2>(key)},
                   {"count", count}});
  }
  return out;
}

// The rows of the inventory: every name in the row of its module, kernels from the trace.
Json Rows(const models::ModelConfig& inference, const models::ModelConfig& training,
          const std::vector<std::string>& tensors, const std::set<std::string>& ops,
          const Json& launches) {
  const auto left = Terms(inference), right = Terms(training);
  Json rows = Json::array();
  for (const Module& m : Modules()) {
    Json row = {{"id", m.id},
                {"module", m.name},
                {"tensors", Json::array()},
                {"ops", Json::array()},
                {"kernels", Json::array()}};
    for (const std::string& t : tensors) {
      if (Find(t, &Module::tensors) == &m) row["tensors"].push_back(t);
    }
    for (const std::string& op : ops) {
      const Module* owner =
          op.starts_with("launch:") ? OfOp(op.substr(7)) : Find(op, &Module::values);
      if (owner == &m) row["ops"].push_back(op);
    }
    bool backward = false;
    for (const Json& l : launches) {
      if (OfOp(l["op"].get<std::string>()) != &m) continue;
      Json kernel = l;
      kernel.erase("count");
      row["kernels"].push_back(kernel);
      backward |= l["phase"] == "train-backward";
    }
    if (row["tensors"].empty() && row["ops"].empty() && row["kernels"].empty()) continue;
    const auto terms = [&](const auto& all) {
      Json out = Json::object();
      const auto at = all.find(m.id);
      if (at == all.end()) return out;
      for (const auto& [name, value] : at->second) out[name] = value;
      return out;
    };
    row["inference_terms"] = terms(left);
    row["training_terms"] = terms(right);
    row["quantization"] = Json::array();
    row["choices"] = Json::array();
    if (row["id"] == "M07") {
      row["choices"].push_back({{"name", "router.top_k"}, {"tie_break", "value down, index up"}});
    }
    if (row["id"] == "M10") {
      for (const char* name : {"sampling.top_k", "sampling.top_p"}) {
        row["choices"].push_back({{"name", name}, {"tie_break", "logit down, id up"}});
      }
      row["choices"].push_back({{"name", "sampling.argmax"}, {"tie_break", "lowest id"}});
    }
    if (row["id"] == "M06") {
      row["choices"].push_back(
          {{"name", "cache.eviction"}, {"tie_break", "least recently used block first"}});
    }
    // Written with the operator, in its own folder; a module without gradient needs none.
    row["backward"] = backward                                   ? "new"
                      : m.ops.empty() && !row["tensors"].empty() ? "new"
                                                                 : "not-needed";
    rows.push_back(std::move(row));
  }
  return rows;
}

int Run(const Options& o) {
  const std::optional<Profile> profile = ParseProfile(o.profile);
  if (!profile) return ReportError(InvalidArgument("--profile {}", Printable(o.profile)));
  const auto json = [&]() -> Result<Json> {
    TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(o.model));
    TARE_ASSIGN_OR_RETURN(const models::ModelConfig inference, ConfigOf(o.model));
    TARE_ASSIGN_OR_RETURN(const models::ModelConfig training,
                          ConfigOf(o.trainer.empty() ? o.model : o.trainer));
    ThreadPool pool(o.threads);
    TARE_ASSIGN_OR_RETURN(const WeightHash hash, HashWeights(checkpoint, &pool, true));
    TARE_ASSIGN_OR_RETURN(Json out, Subject(o, hash, inference));
    if (o.subject) return out;
    Traces traces;
    const std::vector<int64_t> lengths =
        o.profiles ? std::vector<int64_t>{16, 32, 64} : std::vector<int64_t>{33};
    TARE_RETURN_IF_ERROR(TraceEngine(o, *profile, lengths, 0, &traces));
    TARE_RETURN_IF_ERROR(TraceTraining(o, *profile, lengths, &traces));
    if (o.profiles) {
      TARE_RETURN_IF_ERROR(TraceEngine(o, *profile, {64}, 16, &traces));
      out["profiles"] = Json::array();
      for (const auto& [name, launches] : traces.phases) {
        const std::string phase = name.substr(0, name.find('/'));
        if (phase == "train-backward" || name == "decode/64/chunked") continue;
        const auto chunks = traces.chunks.find(name);
        out["profiles"].push_back({{"id", name},
                                   {"phase", phase},
                                   {"tokens", std::atoll(name.c_str() + name.find('/') + 1)},
                                   {"chunks", chunks == traces.chunks.end() ? 1 : chunks->second},
                                   {"launches", LaunchJson(launches, phase)}});
      }
      out["steady_allocation_bytes"] = traces.scratch_growth;
      return out;
    }
    Json launches = Json::array();
    std::set<std::string> ops, quantized, choices;
    for (const auto& [name, list] : traces.phases) {
      const std::string phase = name.substr(0, name.find('/'));
      if (phase == "train-step") continue;
      for (const Json& l : LaunchJson(list, phase)) launches.push_back(l);
    }
    std::set<std::string> tapped;
    for (const auto& [value, op] : traces.values) {
      ops.insert(value);
      tapped.insert(op);
    }
    for (const Json& l : launches) {
      const std::string op = l["op"];
      if (!tapped.contains(op)) ops.insert("launch:" + op);
      if (op == "quantize" || l["dtypes"].get<std::string>().find("e4m3") != std::string::npos) {
        quantized.insert(l["kernel"].get<std::string>());
      }
    }
    // Not every operator records its launches: routing is seen by the values it reported, sampling
    // by the tokens that the engine drew (top-k and top-p were asked for).
    if (tapped.contains("router")) choices.insert("router.top_k");
    ops.insert("sampling");
    choices.insert({"sampling.top_k", "sampling.top_p", "sampling.argmax"});
    std::vector<std::string> names;
    out["tensors"] = Json::array();
    for (const WeightHashItem& t : hash.tensors) {
      names.push_back(t.name);
      out["tensors"].push_back({{"name", t.name},
                                {"dtype", DTypeName(t.dtype)},
                                {"sha256", Hex(*t.plain_sha256)},
                                {"origin", "checkpoint"}});
    }
    out["trace"] = {
        {"ops", ops}, {"launches", launches}, {"quantized", quantized}, {"choices", choices}};
    out["rows"] = Rows(inference, training, names, ops, launches);
    // Operators by row: of the values that a forward reported, and of the launches.
    std::map<std::string, std::set<std::string>> by_row;
    for (const auto& [value, op] : traces.values) {
      const Module* owner = Find(value, &Module::values);
      if (owner != nullptr) by_row[owner->id].insert(op.substr(0, op.find('.')));
    }
    std::set<std::string> seen = traces.ops;
    for (const Json& l : launches) seen.insert(l["op"].get<std::string>());
    for (const std::string& op : seen) {
      if (const Module* owner = OfOp(op)) by_row[owner->id].insert(op);
    }
    out["operators"] = by_row;
    return out;
  }();
  if (!json.ok()) return ReportError(json.status());
  fmt::print("{}\n", json->dump(1));
  return 0;
}

}  // namespace

TARE_COMMAND(inventory, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand(
      "inventory", "what a checkpoint holds and which kernels really run for it, as JSON");
  auto o = std::make_shared<Options>();
  app->add_option("model", o->model, "a Hugging Face directory or a GGUF file")->required();
  app->add_option("--trainer", o->trainer, "the trainer's checkpoint, where it is another one");
  app->add_option("--profile", o->profile, "ieee-f32 or sm90-mma")->capture_default_str();
  app->add_option("--threads", o->threads, "0: the CPUs of the affinity mask");
  app->add_flag("--subject", o->subject, "only what identifies model, program and contracts");
  app->add_flag("--launches", o->profiles, "launches at 16, 32 and 64 tokens, by phase");
  app->add_flag("--json", o->json, "JSON, which is the only form");
  app->callback([o] { SetExit(Run(*o)); });
});

}  // namespace tare
