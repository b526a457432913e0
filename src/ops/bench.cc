#include "ops/bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace tare::ops {
namespace {

double Microseconds(const std::function<void()>& body, int64_t repeats) {
  const auto begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < repeats; ++i) body();
  const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - begin;
  return elapsed.count() / static_cast<double>(repeats);
}

int64_t RepeatsFor(const std::function<void()>& body) {
  const double once = std::min(Microseconds(body, 1), Microseconds(body, 1));
  return std::clamp<int64_t>(static_cast<int64_t>(5000.0 / std::max(once, 0.1)), 1, 10000);
}

double Median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<int64_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

}  // namespace

BenchResult RunBench(const BenchCase& bench, ThreadPool& pool, int rounds) {
  const BenchCase::Bodies bodies = bench.prepare(pool);
  bodies.ours();
  bodies.peer();
  const int64_t ours_repeats = RepeatsFor(bodies.ours);
  const int64_t peer_repeats = RepeatsFor(bodies.peer);
  std::vector<double> ours, peer;
  for (int i = 0; i < rounds; ++i) {
    ours.push_back(Microseconds(bodies.ours, ours_repeats));
    peer.push_back(Microseconds(bodies.peer, peer_repeats));
  }
  return {*std::min_element(ours.begin(), ours.end()), *std::min_element(peer.begin(), peer.end()), Median(ours),
          Median(peer)};
}

BenchCase::Bodies WithCopyPeer(ThreadPool& pool, int64_t read_bytes, int64_t write_bytes, std::function<void()> ours,
                               std::shared_ptr<void> keep) {
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
      if (copied > 0) std::memcpy(peer->to.data() + begin, peer->from.data() + begin, static_cast<size_t>(copied));
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
