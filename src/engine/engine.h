#pragma once

// Engine: one model, one KV cache, one thread that schedules, computes and samples. Thread-safe
// from outside. It knows nothing of HTTP, text or JSON.
//
// With batch invariance on, every logprob bit is a function of weights, tokens and contract alone:
// not of the batch, the chunks, the page size, the cache, preemption or the number of threads.

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/thread_pool.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "engine/switch.h"
#include "models/forward.h"
#include "models/model.h"
#include "ops/op.h"
#include "ops/trace.h"

namespace tare::engine {

struct EngineConfig {
  SchedulerConfig scheduler;  // num_blocks 0: from kv_cache_bytes
  int64_t kv_cache_bytes = int64_t{1} << 30;
  int64_t max_queued = 4096;  // sequences waiting; more are refused with kExhausted
  Profile profile = Profile::kIeeeF32;
  int threads = 0;  // 0: the CPUs of the affinity mask
  Switch batch_invariant;
  std::vector<int32_t> eos;  // ids that end a sequence unless ignore_eos
  int64_t weight_version = 0;
  fault::Side side = fault::Side::kRollout;
};

// What to do with requests that are in flight when new weights come.
enum class InFlight : uint8_t {
  kFinish,  // they finish on the old weights; new ones wait for the swap (default)
  kAbort,   // they end with finish reason "abort"
  kRefuse,  // the update is refused with kPrecondition while any is in flight
};

struct UpdateReport {
  int64_t version = 0;
  std::string sha256;          // over the tensors that the engine holds after the update
  int64_t dropped_blocks = 0;  // of the prefix cache
  int64_t aborted = 0;
  int64_t finished = 0;  // sequences that were let finish
  double load_seconds = 0;
};

// What the threads that compute found when they started: the rounding and flush modes are required
// (a wrong one ends the process), the switch is compared with what the process read at its start.
struct WorkerChecks {
  int threads = 0;
  int checked = 0;
  int other_switch = 0;  // threads that saw another value in the environment
};

struct Stats {
  SchedulerCounters scheduler;
  int64_t waiting = 0, running = 0;
  int64_t free_blocks = 0, cached_blocks = 0, num_blocks = 0, block_size = 0;
  int64_t prompt_tokens = 0, generated_tokens = 0;
  int64_t finished_stop = 0, finished_length = 0, finished_abort = 0, finished_error = 0;
  int64_t weight_version = 0;
  int64_t weight_updates = 0;
  bool healthy = true;
};

struct LoadedWeights {
  models::Model model;
  std::string sha256;  // the canonical hash over the parameters of `model`
};

class Engine {
 public:
  struct Hooks {
    // Loads the weights of a directory into a model like the one served. It needs no packed copies:
    // only its parameters are taken over. `memory`, null at first, holds parameters that nobody
    // uses any more (Model::Load).
    std::function<Result<LoadedWeights>(const std::string& path, models::Model* memory)> load;
    // Makes whatever the kernels read beside the parameters, after these have changed.
    std::function<Status(models::Model* model)> repack;
    // The canonical hash over the tensors that a model really holds, packed copies included.
    std::function<Result<std::string>(const models::Model& model)> weight_hash;
  };

  static Result<std::unique_ptr<Engine>> Create(models::Model model, const EngineConfig& config,
                                                Hooks hooks);
  ~Engine();

  const EngineConfig& config() const { return config_; }
  const models::ModelConfig& model_config() const { return model_config_; }

  // Queues n samples. Every check that can fail fails here, before anything is queued:
  // kInvalidArgument names the field, kExhausted says which limit. Events then come through
  // request.callback until each index has finished; an aborted one still gets its finish event.
  Status Submit(Request request);
  // The same for several that must meet: no step is scheduled between the first and the last. All
  // are queued, or none.
  Status SubmitTogether(std::vector<Request> requests);
  // The samples of a request (all, or one index). Unknown ids are no error: it may have finished.
  void Abort(const std::string& request_id, int32_t index = -1);

  // Blocks until the new weights serve, or the old ones go on serving and the error says why. The
  // report's hash is computed over what the engine holds afterwards; `sha256`, when not empty, must
  // equal it. Versions must grow.
  Result<UpdateReport> UpdateWeights(int64_t version, const std::string& path,
                                     const std::string& sha256,
                                     InFlight in_flight = InFlight::kFinish);
  // Drops the prefix cache when nothing is in flight; says how many blocks went. kPrecondition
  // else.
  Result<int64_t> ResetPrefixCache();
  // Sends every running sequence back to the queue, to be computed again. For tests and tools.
  void PreemptAll();

  // The hash over the held tensors, computed now, between two steps.
  Result<std::string> WeightHash();

  Stats GetStats();
  WorkerChecks workers() const {
    return {.threads = pool_.threads(), .checked = checked_, .other_switch = other_switch_};
  }
  // Kernels that ran since the last call, once for every shape of a step (runs, rows, context).
  std::vector<ops::Launch> TakeLaunches() {
    std::vector<ops::Launch> launches = trace_.Take();
    taken_ = true;
    return launches;
  }
  // Sets what reports every tensor of every step (null: nothing). Not owned; for dumps.
  void SetTap(Tap* tap);

  // Lets what runs finish (up to `seconds`), aborts the rest, ends the thread. Idempotent.
  void Stop(double seconds);

 private:
  Engine(models::Model model, const EngineConfig& config, Hooks hooks);

  void CheckWorker();
  void Loop();
  bool Step();  // false: nothing to do
  Status RunPlan(const StepPlan& plan);
  Status SampleRows(const StepPlan& plan, const models::ForwardOutput& output,
                    ops::LaunchTrace* trace);
  ops::LaunchTrace* TraceOf(const models::Batch& batch);
  void Emit(Sequence* sequence, SequenceEvent event);
  void End(Sequence* sequence, FinishReason reason, SequenceEvent event);
  Status CheckRequest(const Request& request) const;
  // Runs `command` on the engine's thread between two steps and waits for it.
  void OnThread(const std::function<void()>& command);

  EngineConfig config_;
  models::ModelConfig model_config_;
  Hooks hooks_;
  std::atomic<int> checked_{0}, other_switch_{0};  // by the pool's threads, as they start
  ThreadPool pool_;
  ops::LaunchTrace trace_;
  std::atomic<bool> taken_{false};
  std::set<std::array<int64_t, 5>> traced_;  // the engine thread's own

  // The engine thread's own.
  std::unique_ptr<models::Model> model_;
  std::unique_ptr<models::KvCache> cache_;
  models::Scratch scratch_;
  std::unique_ptr<Scheduler> scheduler_;
  int64_t weight_version_ = 0;
  Tap* tap_ = nullptr;
  int64_t step_ = 0;
  std::vector<int32_t> block_table_;
  bool draining_ = false;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::unique_ptr<Sequence>> incoming_;
  std::vector<std::pair<std::string, int32_t>> aborts_;
  std::deque<std::function<void()>> commands_;
  Stats stats_;
  bool stop_ = false;
  std::mutex update_mutex_;  // one update at a time
  // Under it: the parameters before the last update, for the next one to load into. An update needs
  // both at once anyway.
  std::unique_ptr<models::Model> memory_;
  std::thread thread_;
};

}  // namespace tare::engine
