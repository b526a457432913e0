#pragma once

// A fixed set of worker threads for data parallelism. Its size never moves a bit of any result:
// callers give it independent pieces, and the order of sums is fixed by who loops inside a piece.

#include <cstdint>
#include <functional>
#include <memory>

namespace tare {

class ThreadPool {
 public:
  // `threads` counts the calling thread: 1 runs everything inline. 0 takes the CPUs of this
  // process's affinity mask. Every worker runs `check` once before its first piece (numerics uses
  // it to refuse a wrong rounding mode); a null check is none.
  explicit ThreadPool(int threads = 0, std::function<void()> check = nullptr);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const;

  // Calls body(i) for every i in [0, n), each exactly once, in any order and on any thread, and
  // returns when all are done. Nested calls run inline on the calling worker. `body` must not
  // throw. Calls from several outside threads take turns.
  void ParallelFor(int64_t n, const std::function<void(int64_t)>& body);

  // The same over ranges: body(begin, end) with at most `grain` items each.
  // REQUIRES: grain > 0
  void ParallelRanges(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tare
