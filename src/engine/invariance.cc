#include "engine/invariance.h"

#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/ranges.h>
#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/env.h"
#include "base/reasons.h"
#include "engine/client/client.h"
#include "engine/serving.h"
#include "models/op_params.h"
#include "ops/attention/attention.h"

namespace tare::engine {
namespace {

struct Bits {
  std::vector<int32_t> tokens;
  std::vector<uint32_t> raw, processed, prompt;
};

// Requests of one engine, collected.
class Collector {
 public:
  explicit Collector(Engine* engine) : engine_(engine) {}
  ~Collector() { (void)Wait(); }  // the callbacks point here
  Collector(const Collector&) = delete;
  Collector& operator=(const Collector&) = delete;

  Status Submit(Request request, Bits* into) {
    Add(std::move(request), into);
    return Send();
  }
  // Of those that must meet: added one by one, sent together.
  void Add(Request request, Bits* into) {
    request.id = fmt::format("invariance-{}", next_++);
    request.callback = [this, into](const SequenceEvent& event) { Take(event, into); };
    added_.push_back(std::move(request));
  }
  Status Send() {
    const int64_t count = std::ssize(added_);
    {
      std::lock_guard lock(mutex_);
      open_ += count;
    }
    Status status = engine_->SubmitTogether(std::exchange(added_, {}));
    if (!status.ok()) {
      std::lock_guard lock(mutex_);
      open_ -= count;
    }
    return status;
  }
  // Everything submitted has ended.
  Status Wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return open_ == 0; });
    return error_.empty() ? Ok() : Error(Code::kAborted, "a request failed: {}", error_);
  }
  bool open() {
    std::lock_guard lock(mutex_);
    return open_ > 0;
  }

 private:
  void Take(const SequenceEvent& event, Bits* into) {
    std::lock_guard lock(mutex_);
    if (into != nullptr) {
      for (const PromptLogprob& p : event.prompt_logprobs)
        into->prompt.push_back(std::bit_cast<uint32_t>(p.raw_logprob));
      for (const TokenOutput& t : event.tokens) {
        into->tokens.push_back(t.token);
        into->raw.push_back(std::bit_cast<uint32_t>(t.raw_logprob));
        into->processed.push_back(std::bit_cast<uint32_t>(t.processed_logprob));
      }
    }
    if (!event.finish) return;
    if (*event.finish == FinishReason::kError) error_ = event.error;
    if (--open_ == 0) done_.notify_all();
  }

  Engine* engine_;
  int64_t next_ = 0;
  std::vector<Request> added_;
  std::mutex mutex_;
  std::condition_variable done_;
  int64_t open_ = 0;
  std::string error_;
};

// Ids from a fixed sequence, so that every machine asks the same.
std::vector<int32_t> Ids(uint32_t seed, int64_t count, int64_t vocab) {
  std::vector<int32_t> ids;
  uint32_t x = seed * 2654435761u + 1;
  const auto span = static_cast<uint32_t>(std::min<int64_t>(vocab, 20000));
  for (int64_t i = 0; i < count; ++i) {
    x = x * 1664525u + 1013904223u;
    ids.push_back(static_cast<int32_t>((x >> 8) % span));
  }
  return ids;
}

class Matrix {
 public:
  Matrix(const InvarianceOptions& options, const std::function<void(const InvarianceCell&)>& say)
      : o_(options), say_(say) {}

  Result<InvarianceReport> Run() {
    TARE_RETURN_IF_ERROR(Reference());
    const std::pair<const char*, std::function<Status()>> axes[] = {
        {"batch", [&] { return Batches(); }},
        {"chunk", [&] { return Chunks(); }},
        {"page", [&] { return Pages(); }},
        {"cache", [&] { return Caches(); }},
        {"schedule", [&] { return Schedules(); }},
        {"prefill against decode", [&] { return PrefillAgainstDecode(); }},
        {"process", [&] { return Processes(); }},
    };
    for (const auto& [name, run] : axes) {
      if (o_.only.empty() || o_.only.contains(name)) {
        TARE_RETURN_IF_ERROR(run());
        continue;
      }
      // A part of the matrix is no matrix.
      InvarianceCell cell{.axis = name, .condition = "left out"};
      cell.verdict = Verdict::kNotCovered;
      cell.reason = reason::kOutsideScope;
      report_.cells.push_back(std::move(cell));
    }
    const auto rank = [](Verdict v) {
      return v == Verdict::kFail           ? 3
             : v == Verdict::kInconclusive ? 2
             : v == Verdict::kNotCovered   ? 1
                                           : 0;
    };
    report_.verdict = Verdict::kPass;
    for (const InvarianceCell& c : report_.cells) {
      if (rank(c.verdict) <= rank(report_.verdict)) continue;
      report_.verdict = c.verdict;
      report_.reason = c.reason;
    }
    return std::move(report_);
  }

 private:
  using Edit = std::function<void(ServingConfig*)>;

  Status Start(const Edit& edit = nullptr) {
    serving_.reset();
    ServingConfig c;
    c.model_path = o_.model_path;
    c.engine.batch_invariant.effective = o_.arm;
    c.engine.profile = o_.profile;
    c.engine.threads = o_.threads;
    c.engine.kv_cache_bytes = int64_t{256} << 20;
    c.engine.scheduler.max_model_len = kLongest;
    c.engine.scheduler.max_num_seqs = std::max(64, o_.max_batch);
    if (edit) edit(&c);
    TARE_ASSIGN_OR_RETURN(serving_, Serving::Start(c));
    return Ok();
  }
  Engine& engine() { return serving_->engine(); }

  Request Victim(int index) const {
    Request r;
    // The last one reaches beyond a split of attention: shorter ones cannot see a split that moves.
    const int64_t lengths[kVictims] = {45, 21, kLongPrompt};
    r.prompt = Ids(1u + static_cast<uint32_t>(index), lengths[index], vocab_);
    // One token throughout the second block: a cache that took a block for full after its first
    // token would hold this one.
    if (index == 0) std::fill(r.prompt.begin() + 16, r.prompt.begin() + 32, r.prompt[16]);
    r.params.max_tokens = o_.generated;
    r.params.seed = 7u + static_cast<uint64_t>(index);
    r.params.top_p = 0.95f;
    r.params.ignore_eos = true;
    return r;
  }
  Request Neighbour(int index) const {
    Request r;
    r.prompt = Ids(100u + static_cast<uint32_t>(index), 3 + 11 * index % 60, vocab_);
    r.params.max_tokens = 4 + 7 * index % (2 * o_.generated);
    r.params.seed = 1000u + static_cast<uint64_t>(index);
    r.params.ignore_eos = true;
    return r;
  }

  Status Reference() {
    TARE_RETURN_IF_ERROR(Start());
    report_.model = serving_->model_name();
    vocab_ = engine().model_config().vocab;
    TARE_ASSIGN_OR_RETURN(report_.weights_sha256, engine().WeightHash());
    for (int v = 0; v < kVictims; ++v) {
      Collector collector(&engine());
      TARE_RETURN_IF_ERROR(collector.Submit(Victim(v), &reference_[v]));
      TARE_RETURN_IF_ERROR(collector.Wait());
    }
    return Ok();
  }

  // Victims among `neighbours`, at `slot` of the order of arrival.
  struct Scene {
    int neighbours = 0;
    int slot = 0;
    bool preempt = false;
    int32_t neighbour_priority = 0;
    bool reversed = false;  // the victims arrive in the other order
    int without = -1;       // a victim that stays away
    bool late = false;      // what arrives before `slot` has begun to decode by then
  };
  Result<std::vector<Bits>> Play(const Scene& scene) {
    std::vector<Bits> got(kVictims);
    Collector collector(&engine());
    for (int i = 0; i <= scene.neighbours; ++i) {
      if (i == scene.slot) {
        if (scene.late) {
          const int64_t before = engine().GetStats().generated_tokens;
          TARE_RETURN_IF_ERROR(collector.Send());
          for (int wait = 0; wait < 5000; ++wait) {
            if (engine().GetStats().generated_tokens > before) break;
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        }
        for (int v = 0; v < kVictims; ++v) {
          const int which = scene.reversed ? kVictims - 1 - v : v;
          if (which == scene.without) continue;
          collector.Add(Victim(which), &got[static_cast<size_t>(which)]);
        }
      }
      if (i == scene.neighbours) break;
      Request neighbour = Neighbour(i);
      neighbour.priority = scene.neighbour_priority;
      collector.Add(std::move(neighbour), nullptr);
    }
    TARE_RETURN_IF_ERROR(collector.Send());
    while (scene.preempt && collector.open()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      engine().PreemptAll();  // between two steps: each still gives a token
    }
    TARE_RETURN_IF_ERROR(collector.Wait());
    return got;
  }

  static void Compare(InvarianceCell* cell, const std::string& who,
                      const std::vector<int32_t>& a_ids, const std::vector<uint32_t>& a,
                      const std::vector<int32_t>& b_ids, const std::vector<uint32_t>& b) {
    const auto note = [&](const std::string& text) {
      cell->mismatches++;
      if (cell->first.empty()) cell->first = who + ": " + text;
    };
    if (a.size() != b.size()) note(fmt::format("{} tokens against {}", a.size(), b.size()));
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      cell->compared++;
      // What follows another token answers another question.
      if (a_ids[i] != b_ids[i])
        return note(fmt::format("token {} is {} alone and {} here", i, a_ids[i], b_ids[i]));
      if (a[i] != b[i]) note(fmt::format("token {}: 0x{:08x} alone, 0x{:08x} here", i, a[i], b[i]));
    }
  }
  void Close(InvarianceCell cell, bool proven) {
    if (cell.mismatches > 0) {
      cell.verdict = Verdict::kFail;
      cell.reason = reason::kBitMismatch;
    } else if (cell.compared == 0) {
      cell.verdict = Verdict::kInconclusive;
      cell.reason = reason::kNothingCompared;
    } else if (!proven) {
      cell.verdict = Verdict::kInconclusive;
      cell.reason = reason::kNoEvidence;
    } else {
      cell.verdict = Verdict::kPass;
    }
    if (say_) say_(cell);
    report_.cells.push_back(std::move(cell));
  }

  // One cell on the engine that runs: `proof` names the counter that must have grown, and by how
  // much at least.
  using Counter = std::function<int64_t(const SchedulerCounters&)>;
  Status Cell(const char* axis, const std::string& condition, const Scene& scene,
              const char* proof = nullptr, const Counter& counter = nullptr, int64_t least = 1) {
    const int64_t before = counter ? counter(Settled().scheduler) : 0;
    InvarianceCell cell{.axis = axis, .condition = condition};
    // Preempted and mixed steps need requests that meet, which a fast model may not let happen: the
    // scene is played again, and whatever is compared on the way counts.
    const bool by_chance =
        counter && (axis == std::string_view("preemption") || axis == std::string_view("mixed"));
    int64_t seen = 0;
    for (int left = by_chance ? 7 : 1; left > 0; --left) {
      TARE_ASSIGN_OR_RETURN(const std::vector<Bits> got, Play(scene));
      CompareVictims(&cell, scene, got);
      if (counter) seen = counter(Settled().scheduler) - before;
      if (cell.mismatches > 0 || seen >= least) break;
    }
    const bool proven = !counter || seen >= least;
    if (counter) {
      cell.proof[proof] = seen;
      cell.proof["at_least"] = least;
    }
    Close(std::move(cell), proven);
    return Ok();
  }
  void CompareVictims(InvarianceCell* cell, const Scene& scene, const std::vector<Bits>& got) {
    for (int v = 0; v < kVictims; ++v) {
      if (v == scene.without) continue;
      const Bits& g = got[static_cast<size_t>(v)];
      const std::string who = fmt::format("victim {}", v);
      Compare(cell, who, reference_[v].tokens, reference_[v].raw, g.tokens, g.raw);
      if (g.processed != reference_[v].processed && g.raw == reference_[v].raw) {
        cell->mismatches++;
        cell->first = who + ": the processed logprobs differ";
      }
    }
  }
  // The last answer goes out before its step is booked.
  Stats Settled() {
    Stats s = engine().GetStats();
    for (int i = 0; i < 500 && (s.running + s.waiting > 0 || s.free_blocks != s.num_blocks); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      s = engine().GetStats();
    }
    return s;
  }

  Status Batches() {
    for (const int size : {2, 3, 4, 8, 16, 32, 64}) {
      if (size > o_.max_batch) break;
      // A fresh engine a cell, for its counter of the widest step; no cache, so that every cell
      // computes.
      const int neighbours = std::max(0, size - kVictims);
      for (const int slot : std::set<int>{0, neighbours / 2, neighbours}) {
        TARE_RETURN_IF_ERROR(
            Start([](ServingConfig* c) { c->engine.scheduler.prefix_caching = false; }));
        TARE_RETURN_IF_ERROR(Cell(
            "batch", fmt::format("{} slot {}", size, slot),
            {.neighbours = neighbours, .slot = slot, .without = size < kVictims ? 1 : -1},
            "widest_step", [](const SchedulerCounters& c) { return c.widest_step; }, size));
      }
    }
    return Ok();
  }

  Status Chunks() {
    const auto chunked = [](const SchedulerCounters& c) { return c.chunked_runs; };
    // Around a block, around the rows where the kernels change (8, 64, 192), and in the middle.
    for (const int size : {1, 7, 8, 9, 15, 16, 17, 37, 63, 64, 65, 192, 193}) {
      TARE_RETURN_IF_ERROR(
          Start([&](ServingConfig* c) { c->engine.scheduler.max_num_batched_tokens = size; }));
      TARE_RETURN_IF_ERROR(
          Cell("chunk", fmt::format("{} of blocks of 16", size), {}, "chunked_runs", chunked));
    }
    TARE_RETURN_IF_ERROR(
        Start([](ServingConfig* c) { c->engine.scheduler.chunked_prefill = false; }));
    return Cell("chunk", "whole prompts", {});
  }

  Status Pages() {
    for (const int size : {1, 7, 32, 64}) {
      TARE_RETURN_IF_ERROR(Start([&](ServingConfig* c) { c->engine.scheduler.block_size = size; }));
      TARE_RETURN_IF_ERROR(Cell("page", fmt::format("{}", size), {.neighbours = 2}));
    }
    return Ok();
  }

  Status Caches() {
    const auto hits = [](const SchedulerCounters& c) { return c.prefix_hits; };
    TARE_RETURN_IF_ERROR(Start());
    TARE_RETURN_IF_ERROR(Cell("cache", "cold", {}));
    TARE_RETURN_IF_ERROR(Cell("cache", "hot", {}, "prefix_hits", hits, 32));
    TARE_RETURN_IF_ERROR(Cell("cache", "hot among neighbours", {.neighbours = 6, .slot = 3},
                              "prefix_hits", hits, 32));
    // Only the first of the two full blocks is common: a partial hit.
    TARE_ASSIGN_OR_RETURN(const int64_t dropped, engine().ResetPrefixCache());
    {
      Collector collector(&engine());
      Request part = Victim(0);
      part.prompt.resize(17);
      TARE_RETURN_IF_ERROR(collector.Submit(part, nullptr));
      TARE_RETURN_IF_ERROR(collector.Wait());
    }
    TARE_RETURN_IF_ERROR(Cell("cache", "partly hot", {}, "prefix_hits", hits, 16));
    report_.cells.back().proof["dropped_before"] = dropped;
    // A small pool whose blocks the neighbours need: the victims' are evicted, reused, computed
    // again.
    const auto computed = [](const SchedulerCounters& c) { return c.computed_tokens; };
    TARE_RETURN_IF_ERROR(
        Start([](ServingConfig* c) { c->engine.scheduler.num_blocks = kLongBlocks + 8; }));
    TARE_RETURN_IF_ERROR(Play({}).status());
    TARE_RETURN_IF_ERROR(Play({.neighbours = 12, .slot = 12}).status());
    return Cell("cache", "evicted and reused", {.neighbours = 3}, "computed_tokens", computed, 66);
  }

  Status Schedules() {
    const auto preemptions = [](const SchedulerCounters& c) { return c.preemptions; };
    const auto mixed = [](const SchedulerCounters& c) { return c.mixed_steps; };
    TARE_RETURN_IF_ERROR(Start([](ServingConfig* c) {
      c->engine.scheduler.num_blocks = kLongBlocks + 4;
      c->engine.scheduler.prefix_caching = false;
    }));
    TARE_RETURN_IF_ERROR(Cell("preemption", "blocks run out", {.neighbours = 6, .slot = 3},
                              "preemptions", preemptions));
    TARE_RETURN_IF_ERROR(Start());
    TARE_RETURN_IF_ERROR(Cell("preemption", "all sent back again and again",
                              {.neighbours = 3, .slot = 1, .preempt = true}, "preemptions",
                              preemptions));
    TARE_RETURN_IF_ERROR(Start([](ServingConfig* c) {
      c->engine.scheduler.max_num_batched_tokens = 24;
      c->engine.scheduler.prefix_caching = false;
    }));
    TARE_RETURN_IF_ERROR(Cell("mixed", "prefill and decode in one step",
                              {.neighbours = 8, .slot = 4}, "mixed_steps", mixed));
    TARE_RETURN_IF_ERROR(Cell("order", "reversed", {.neighbours = 4, .slot = 4, .reversed = true},
                              "mixed_steps", mixed));
    TARE_RETURN_IF_ERROR(Cell("order", "after others began to decode",
                              {.neighbours = 4, .slot = 4, .late = true}, "mixed_steps", mixed));
    TARE_RETURN_IF_ERROR(Start([](ServingConfig* c) { c->engine.scheduler.max_num_seqs = 2; }));
    TARE_RETURN_IF_ERROR(
        Cell("priority", "neighbours first", {.neighbours = 5, .neighbour_priority = -1}));
    for (const int threads : {1, 2, 3}) {
      TARE_RETURN_IF_ERROR(Start([&](ServingConfig* c) { c->engine.threads = threads; }));
      TARE_RETURN_IF_ERROR(Cell("threads", fmt::format("{}", threads), {.neighbours = 3}));
    }
    return Ok();
  }

  // Every place along a sequence where the contract or the cache begins something new, taken from
  // the operators' own parameters for this model.
  std::map<std::string, int64_t> Constants() {
    const models::ModelConfig& config = engine().model_config();
    std::map<std::string, int64_t> at = {
        {"page", engine().config().scheduler.block_size}, {"step group", 16}, {"lanes", 128}};
    for (const models::LayerConfig& layer : config.layers) {
      const ops::attention::Params p = models::AttentionParams(config, layer);
      at["kv_tile"] = p.kv_tile;
      at["kv_split"] = p.kv_split;
      at["second kv_split"] = 2 * p.kv_split;
      if (p.window > 1) at[fmt::format("window {}", p.window)] = p.window;
    }
    std::erase_if(at, [](const auto& c) { return c.second < 2 || c.second > kLongest - 130; });
    return at;
  }

  // Logprobs of what decode sampled, forced through one prefill; also around the constants of the
  // contract.
  Status PrefillAgainstDecode() {
    TARE_RETURN_IF_ERROR(Start());
    std::vector<std::pair<std::string, int64_t>> prompts = {{"45 tokens", 45}};
    if (o_.boundaries) {
      for (const auto& [name, at] : Constants()) {
        for (const int64_t d : {-1, 0, 1})
          prompts.emplace_back(fmt::format("{} {:+d}", name, d), at + d);
      }
    }
    for (const auto& [name, length] : prompts) {
      InvarianceCell cell{.axis = "prefill against decode", .condition = name};
      if (length + o_.generated + 1 > kLongest)
        return Error(Code::kInternal, "a boundary beyond the engine");
      Request request = Victim(0);
      request.prompt = Ids(50, length, vocab_);
      Bits decoded, scored;
      Collector collector(&engine());
      TARE_RETURN_IF_ERROR(collector.Submit(request, &decoded));
      TARE_RETURN_IF_ERROR(collector.Wait());
      Request forced = request;
      forced.prompt.insert(forced.prompt.end(), decoded.tokens.begin(), decoded.tokens.end());
      forced.params.max_tokens = 1;
      forced.params.prompt_logprobs = 0;
      TARE_RETURN_IF_ERROR(collector.Submit(forced, &scored));
      TARE_RETURN_IF_ERROR(collector.Wait());
      if (scored.prompt.size() + 1 != forced.prompt.size())
        return Error(Code::kInternal, "the prompt's logprobs are not all there");
      const std::vector<uint32_t> tail(scored.prompt.begin() + length - 1, scored.prompt.end());
      Compare(&cell, "decode", decoded.tokens, decoded.raw, decoded.tokens, tail);
      cell.proof["positions"] = fmt::format("{}..{}", length, length + o_.generated - 1);
      Close(std::move(cell), true);
    }
    return Ok();
  }

  Status Processes() {
    TARE_RETURN_IF_ERROR(FreshProcess("fresh", {}));
    return FreshProcess("fresh, other settings",
                        {"--threads", "1", "--block-size", "8", "--max-num-batched-tokens", "100"});
  }
  Status FreshProcess(const std::string& condition, const std::vector<std::string>& options) {
    InvarianceCell cell{.axis = "process", .condition = condition};
    if (o_.program.empty()) {
      cell.verdict = Verdict::kNotCovered;
      cell.reason = reason::kOutsideScope;
      if (say_) say_(cell);
      report_.cells.push_back(std::move(cell));
      return Ok();
    }
    std::string root = (std::filesystem::temp_directory_path() / "tare_invariance_XXXXXX").string();
    if (::mkdtemp(root.data()) == nullptr) return Errno("mkdtemp", root, errno);
    const Status status = AskProcess(root + "/port", options, &cell);
    std::error_code ignored;
    std::filesystem::remove_all(root, ignored);
    TARE_RETURN_IF_ERROR(status);
    Close(std::move(cell), true);
    return Ok();
  }
  Status AskProcess(const std::string& port_file, const std::vector<std::string>& options,
                    InvarianceCell* cell) {
    std::vector<std::string> args = {"tare",
                                     "serve",
                                     o_.model_path,
                                     "--port",
                                     "0",
                                     "--port-file",
                                     port_file,
                                     "--profile",
                                     std::string(ProfileName(o_.profile)),
                                     "--max-model-len",
                                     fmt::format("{}", kLongest),
                                     "--kv-cache-mib",
                                     "64"};
    args.insert(args.end(), options.begin(), options.end());
    if (!fault::Selected().empty()) args.insert(args.end(), {"--fault", fault::Selected()});
    const bool on = o_.arm == ops::BatchInvariance::kOn;
    std::vector<std::string> env;
    for (char** e = environ; *e != nullptr; ++e) {
      if (!std::string_view(*e).starts_with(std::string(kSwitchName) + "=")) env.emplace_back(*e);
    }
    env.push_back(std::string(kSwitchName) + (on ? "=1" : "=0"));
    std::vector<char*> argv, envp;
    for (std::string& a : args) argv.push_back(a.data());
    for (std::string& e : env) envp.push_back(e.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    pid_t pid = 0;
    if (const int error =
            ::posix_spawn(&pid, o_.program.c_str(), nullptr, nullptr, argv.data(), envp.data());
        error != 0) {
      return Errno("posix_spawn", o_.program, error);
    }
    const auto ask = [&]() -> Status {
      for (int i = 0; i < 6000 && !Env::Real()->Exists(port_file); ++i) {
        if (::waitpid(pid, nullptr, WNOHANG) == pid) {
          pid = -1;
          return Error(Code::kAborted, "the fresh process ended before it served");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
      TARE_ASSIGN_OR_RETURN(const std::string port, Env::Real()->ReadFile(port_file));
      const client::Endpoint at{.port = static_cast<uint16_t>(std::atoi(port.c_str())),
                                .timeout_seconds = 300};
      for (int v = 0; v < kVictims; ++v) {
        const Request r = Victim(v);
        const auto got = client::Complete(at, {{.prompt = r.prompt,
                                                .max_tokens = r.params.max_tokens,
                                                .top_p = r.params.top_p,
                                                .seed = r.params.seed,
                                                .ignore_eos = true}});
        TARE_RETURN_IF_ERROR(got[0].status());
        Compare(cell, fmt::format("victim {}", v), reference_[v].tokens, reference_[v].raw,
                got[0]->at(0).tokens, got[0]->at(0).raw_logprob);
      }
      TARE_ASSIGN_OR_RETURN(const Json id, client::SendJson(at, "GET", "/identity"));
      cell->proof["pid"] = id.value("pid", Json(nullptr));
      cell->proof["binary_sha256"] = id.value("binary_sha256", Json(nullptr));
      return Ok();
    };
    Status status = ask();
    if (pid > 0) {
      ::kill(pid, SIGTERM);
      ::waitpid(pid, nullptr, 0);
    }
    return status;
  }

  static constexpr int kVictims = 3;
  static constexpr int64_t kLongPrompt = 600;
  // Blocks of 16 that the longest victim needs, all of its tokens at most 128.
  static constexpr int64_t kLongBlocks = (kLongPrompt + 128) / 16 + 1;
  static constexpr int64_t kLongest = 1184;

  InvarianceOptions o_;
  std::function<void(const InvarianceCell&)> say_;
  InvarianceReport report_;
  std::unique_ptr<Serving> serving_;
  int64_t vocab_ = 0;
  Bits reference_[kVictims];
};

}  // namespace

Result<InvarianceReport> RunInvariance(
    const InvarianceOptions& options,
    const std::function<void(const InvarianceCell& cell)>& progress) {
  if (options.generated < 2 || options.generated > 128)
    return InvalidArgument("generated {}; it must be from 2 to 128", options.generated);
  for (const std::string& axis : options.only) {
    if (std::find(std::begin(kInvarianceAxes), std::end(kInvarianceAxes), axis) ==
        std::end(kInvarianceAxes)) {
      return InvalidArgument("axis '{}'; one of {}", Printable(axis),
                             fmt::join(kInvarianceAxes, ", "));
    }
  }
  if (options.max_batch < 2 || options.max_batch > 64)
    return InvalidArgument("max_batch {}; it must be from 2 to 64", options.max_batch);
  return Matrix(options, progress).Run();
}

Json ToJson(const InvarianceOptions& options, const InvarianceReport& report) {
  Json cells = Json::array();
  for (const InvarianceCell& c : report.cells) {
    cells.push_back(Json{{"axis", c.axis},
                         {"condition", c.condition},
                         {"verdict", VerdictName(c.verdict)},
                         {"reason", c.reason},
                         {"compared", c.compared},
                         {"mismatches", c.mismatches},
                         {"first", c.first},
                         {"proof", c.proof}});
  }
  return Json{{"schema", "tare.invariance/1"},
              {"scope", "inference-internal"},
              {"model", report.model},
              {"weights_sha256", report.weights_sha256},
              {"arm", options.arm == ops::BatchInvariance::kOn ? "invariant" : "native"},
              {"profile", ProfileName(options.profile)},
              {"faults", fault::Selected()},
              {"verdict", VerdictName(report.verdict)},
              {"reason", report.reason},
              {"cells", std::move(cells)}};
}

}  // namespace tare::engine
