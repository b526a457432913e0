#include "ops/bench.h"

#include <time.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace tare::ops {
namespace {

double Now(bool cpu_time) {
  timespec t;
  clock_gettime(cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}

double Microseconds(const std::function<void()>& body, int64_t repeats, bool cpu_time) {
  const double begin = Now(cpu_time);
  for (int64_t i = 0; i < repeats; ++i) body();
  return (Now(cpu_time) - begin) / static_cast<double>(repeats);
}

int64_t RepeatsFor(const std::function<void()>& body) {
  const double once = std::min(Microseconds(body, 1, false), Microseconds(body, 1, false));
  return std::clamp<int64_t>(static_cast<int64_t>(5000.0 / std::max(once, 0.1)), 1, 10000);
}

double Median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<int64_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

}  // namespace

BenchResult RunBench(const BenchCase& bench, ThreadPool& pool, int rounds, bool cpu_time) {
  TARE_CHECK(!cpu_time || pool.threads() == 1) << "CPU time of several threads is no elapsed time";
  const BenchCase::Bodies bodies = bench.prepare(pool);
  bodies.ours();
  bodies.peer();
  const int64_t ours_repeats = RepeatsFor(bodies.ours);
  const int64_t peer_repeats = RepeatsFor(bodies.peer);
  std::vector<double> ours, peer;
  for (int i = 0; i < rounds; ++i) {
    ours.push_back(Microseconds(bodies.ours, ours_repeats, cpu_time));
    peer.push_back(Microseconds(bodies.peer, peer_repeats, cpu_time));
  }
  return {*std::min_element(ours.begin(), ours.end()), *std::min_element(peer.begin(), peer.end()),
          Median(ours), Median(peer)};
}

BenchCase::Bodies WithCopyPeer(ThreadPool& pool, int64_t read_bytes, int64_t write_bytes,
                               std::function<void()> ours, std::shared_ptr<void> keep) {
  // Reads and writes in equal parts; what is left over is read alone.
  struct Peer {
    std::vector<char> from, to;
    std::shared_ptr<void> keep;
    std::vector<uint64_t> sums;
  };
  auto peer = std::make_shared<Peer>();
  const int64_t more = std::max(read_bytes, write_bytes);
  peer->from.assign(static_cast<size_t>(more), 1);
  peer->to.assign(static_cast<size_t>(more), 2);
  peer->keep = std::move(keep);
  const int64_t both = std::min(read_bytes, write_bytes);
  constexpr int64_t kPiece = 1 << 18;
  peer->sums.assign(static_cast<size_t>(more / kPiece + 2), 0);
  const auto body = [peer, both, read_bytes, write_bytes, &pool] {
    pool.ParallelRanges(std::max(read_bytes, write_bytes), kPiece, [&](int64_t begin, int64_t end) {
      const int64_t copied = std::max<int64_t>(0, std::min(end, both) - begin);
      if (copied > 0)
        std::memcpy(peer->to.data() + begin, peer->from.data() + begin,
                    static_cast<size_t>(copied));
      const int64_t rest = begin + copied;
      if (rest >= end) return;
      if (read_bytes > write_bytes) {
        uint64_t sum[8] = {};
        for (int64_t i = rest; i + 64 <= end; i += 64) {
          for (int k = 0; k < 8; ++k) {
            uint64_t word;
            std::memcpy(&word, peer->from.data() + i + 8 * k, sizeof(word));
            sum[k] += word;
          }
        }
        for (uint64_t s : sum) peer->sums[static_cast<size_t>(begin / kPiece)] += s;
      } else {
        std::memset(peer->to.data() + rest, 3, static_cast<size_t>(end - rest));
      }
    });
  };
  return {std::move(ours), body, peer};
}

}  // namespace tare::ops
