#include "base/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
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

}  // namespace

struct ThreadPool::State {
  std::vector<std::thread> workers;
  std::function<void()> check;
  std::mutex caller_mutex;  // one job at a time
  std::mutex mutex;
  std::condition_variable wake;
  std::condition_variable done;
  // Guarded by mutex.
  uint64_t generation = 0;
  int busy = 0;
  bool stop = false;
  const std::function<void(int64_t)>* body = nullptr;
  int64_t n = 0;
  // Claimed by workers.
  std::atomic<int64_t> next{0};

  void Drain() {
    const std::function<void(int64_t)>& f = *body;
    for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < n;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      f(i);
    }
  }

  void Work() {
    inside_pool = true;
    if (check) check();
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return stop || generation != seen; });
        if (stop) return;
        seen = generation;
      }
      Drain();
      std::lock_guard lock(mutex);
      if (--busy == 0) done.notify_one();
    }
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
  {
    std::lock_guard lock(state_->mutex);
    state_->stop = true;
  }
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
  std::lock_guard caller(s.caller_mutex);
  {
    std::lock_guard lock(s.mutex);
    s.body = &body;
    s.n = n;
    s.next.store(0, std::memory_order_relaxed);
    s.busy = static_cast<int>(s.workers.size());
    ++s.generation;
  }
  s.wake.notify_all();
  inside_pool = true;
  s.Drain();
  inside_pool = false;
  std::unique_lock lock(s.mutex);
  s.done.wait(lock, [&] { return s.busy == 0; });
  s.body = nullptr;
}

void ThreadPool::ParallelRanges(int64_t n, int64_t grain,
                                const std::function<void(int64_t, int64_t)>& body) {
  TARE_CHECK(grain > 0);
  ParallelFor((n + grain - 1) / grain,
              [&](int64_t i) { body(i * grain, std::min(n, (i + 1) * grain)); });
}

}  // namespace tare
