#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "base/check.h"

namespace tare {
namespace {

thread_local bool inside_pool = false;

int AffinityCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// How long a thread looks for work before it sleeps. A decode step is some 200 short jobs with a
// few microseconds of serial work between them; waking a sleeper costs 5 to 50 us each time.
constexpr auto kSpin = std::chrono::microseconds(30);

// True as soon as `ready` is, false after kSpin.
template <class Ready>
bool SpinFor(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (ready()) return true;
      Pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

}  // namespace

// A job is published as one word: generation in the high half, the next unclaimed index in the low
// one. A thread claims an index by compare-and-swap of the whole word, so a claim that succeeds
// belongs to the job whose body and n were read before it; a job cannot end while a claim is
// unfinished. Whoever wakes late finds nothing to claim: no job waits for a thread that has not
// started on it.
struct ThreadPool::State {
  std::vector<std::thread> workers;
  std::function<void()> check;
  std::mutex caller_mutex;  // one job at a time
  std::atomic<uint64_t> word{0};
  std::atomic<const std::function<void(int64_t)>*> body{nullptr};
  std::atomic<uint64_t> n{0};
  std::atomic<int64_t> unfinished{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;  // for sleeping and waking only
  std::condition_variable wake;
  std::condition_variable done;
  std::atomic<int> sleepers{0};
  std::atomic<bool> caller_sleeps{false};

  static uint32_t Generation(uint64_t w) { return static_cast<uint32_t>(w >> 32); }

  void Drain() {
    for (;;) {
      uint64_t w = word.load(std::memory_order_acquire);
      const auto* f = body.load(std::memory_order_relaxed);
      const uint64_t count = n.load(std::memory_order_relaxed);
      const uint64_t index = w & 0xffffffffu;
      if (index >= count) {
        // Unless n belongs to another job than w, there is nothing left.
        if (word.load(std::memory_order_acquire) == w) return;
        continue;
      }
      if (!word.compare_exchange_weak(w, w + 1, std::memory_order_acq_rel)) continue;
      (*f)(static_cast<int64_t>(index));
      if (unfinished.fetch_sub(1) == 1 && caller_sleeps.load()) {
        std::lock_guard lock(mutex);
        done.notify_one();
      }
    }
  }

  void Work() {
    inside_pool = true;
    if (check) check();
    uint32_t seen = 0;
    const auto ready = [&] { return stop.load() || Generation(word.load()) != seen; };
    for (;;) {
      if (!SpinFor(ready)) {
        std::unique_lock lock(mutex);
        sleepers.fetch_add(1);
        wake.wait(lock, ready);
        sleepers.fetch_sub(1);
      }
      if (stop.load()) return;
      seen = Generation(word.load());
      Drain();
    }
  }

  void Wake() {
    // Either this sees the sleeper or the sleeper sees the new word: both sides are sequentially
    // consistent, and the lock closes the gap between its check and its sleep.
    if (sleepers.load() == 0) return;
    { std::lock_guard lock(mutex); }
    wake.notify_all();
  }
};

ThreadPool::ThreadPool(int threads, std::function<void()> check)
    : state_(std::make_unique<State>()) {
  TARE_CHECK(threads >= 0);
  if (threads == 0) threads = AffinityCpus();
  state_->check = std::move(check);
  if (state_->check) state_->check();
  for (int i = 1; i < threads; ++i) {
    state_->workers.emplace_back([this] { state_->Work(); });
  }
}

ThreadPool::~ThreadPool() {
  state_->stop.store(true);
  { std::lock_guard lock(state_->mutex); }
  state_->wake.notify_all();
  for (std::thread& t : state_->workers) t.join();
}

int ThreadPool::threads() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::ParallelFor(int64_t n, const std::function<void(int64_t)>& body) {
  if (n <= 0) return;
  State& s = *state_;
  if (n == 1 || s.workers.empty() || inside_pool) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  TARE_CHECK(n < int64_t{1} << 32) << "more pieces than a job can count";
  std::lock_guard caller(s.caller_mutex);
  // The last job is over. Closing its word makes every late claim fail before the fields change.
  const uint64_t generation = State::Generation(s.word.load());
  s.word.store((generation << 32) | 0xffffffffu);
  s.body.store(&body);
  s.n.store(static_cast<uint64_t>(n));
  s.unfinished.store(n);
  s.word.store((generation + 1) << 32);
  s.Wake();
  inside_pool = true;
  s.Drain();
  inside_pool = false;
  const auto finished = [&] { return s.unfinished.load() == 0; };
  if (SpinFor(finished)) return;
  std::unique_lock lock(s.mutex);
  s.caller_sleeps.store(true);
  s.done.wait(lock, finished);
  s.caller_sleeps.store(false);
}

void ThreadPool::ParallelRanges(int64_t n, int64_t grain,
                                const std::function<void(int64_t, int64_t)>& body) {
  TARE_CHECK(grain > 0);
  ParallelFor((n + grain - 1) / grain,
              [&](int64_t i) { body(i * grain, std::min(n, (i + 1) * grain)); });
}

}  // namespace tare
