// linear on CUDA against its native arm, which is cuBLAS, in one process.
//
//   linear_cuda_bench bits            every kernel against the generic one, that against integers
//   linear_cuda_bench bits-small      the same in little memory, for memory checkers
//   linear_cuda_bench tune PASS [S]   every kernel at every point; PASS: fwd, dx, dw, ragged
//   linear_cuda_bench table OUT.json  the table against cuBLAS, with the schedules that Pick gives

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "base/env.h"
#include "ops/cuda/bench.h"
#include "ops/cuda/bench_kernels.h"
#include "ops/cuda/cublas_peer.h"
#include "ops/cuda/sm90_oracle.h"
#include "ops/linear/linear_cuda.h"
#include "tensor/cuda_status.h"

namespace tare::ops::linear::gpu {
namespace {

using cuda::Arm;
using cuda::Bench;
using cuda::Timing;

struct Shape2 {
  int64_t n, k;
};
constexpr Shape2 kShapes[] = {{6144, 4096}, {4096, 4096}, {24576, 4096}, {4096, 12288}};
constexpr int64_t kRows[] = {1, 8, 64, 256, 1024, 4096, 8192};

// Normal-like bf16 values on the device.
Result<uint16_t*> RandomBf16(size_t count, uint64_t seed) {
  std::vector<uint16_t> host(count);
  uint64_t s = seed * 0x9E3779B97F4A7C15ull + 1;
  for (uint16_t& value : host) {
    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    const auto part = [&](int shift) {
      return static_cast<float>(static_cast<int>(s >> shift & 0xFFFF) - 32768);
    };
    const float sum = (part(0) + part(16) + part(32) + part(48)) / 37837.0f;  // variance 1
    uint32_t bits;
    std::memcpy(&bits, &sum, 4);
    value = cuda::OracleRoundBf16(bits);
  }
  uint16_t* device = nullptr;
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(reinterpret_cast<void**>(&device), count * 2));
  TARE_CUDA_RETURN_IF_ERROR(cudaMemcpy(device, host.data(), count * 2, cudaMemcpyHostToDevice));
  return device;
}

struct Buffers {
  uint16_t* x = nullptr;  // 8192 x 24576
  uint16_t* w = nullptr;  // 24576 x 4096
  void* y = nullptr;      // 24576 x 12288 f32 at most
  void* reference = nullptr;
  unsigned long long* counts = nullptr;
};

constexpr size_t kXCount = size_t{8192} * 24576;
constexpr size_t kWCount = size_t{24576} * 4096;
constexpr size_t kSmallCount = size_t{1} << 20;
constexpr size_t kYBytes = size_t{24576} * 8192 * 4;

// With `small`, enough for Bits alone: memory checkers are slow on gigabytes.
Result<Buffers> Allocate(bool small) {
  Buffers b;
  TARE_ASSIGN_OR_RETURN(b.x, RandomBf16(small ? kSmallCount : kXCount, 1));
  TARE_ASSIGN_OR_RETURN(b.w, RandomBf16(small ? kSmallCount : kWCount, 2));
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&b.y, small ? kSmallCount * 4 : kYBytes));
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&b.reference, small ? kSmallCount * 4 : kYBytes));
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(reinterpret_cast<void**>(&b.counts), 16));
  return b;
}

// 40 sequences of 100 to 400 tokens (8,192 rows hold them all), each starting at a multiple of 16.
constexpr int kRagged = -1;
std::vector<Run> RaggedUnits(int64_t tokens) {
  std::vector<Run> runs;
  int begin = 0;
  uint64_t s = 12345;
  for (int i = 0; i < 40; ++i) {
    s = s * 6364136223846793005ull + 1442695040888963407ull;
    const int length =
        std::min<int>(100 + static_cast<int>((s >> 33) % 215), static_cast<int>(tokens) - begin);
    if (length <= 0) break;
    runs.push_back({begin, length});
    begin = (begin + length + 15) / 16 * 16;
  }
  return runs;
}

Contraction Problem(Pass pass, const Buffers& b, int64_t m, int64_t n, int64_t k, int chains) {
  // n, k: shape of the weight.
  Contraction c;
  c.pass = pass;
  c.y = b.y;
  switch (pass) {
    case Pass::kForward:
      c.m = m, c.n = n, c.k = k;
      c.a = b.x, c.a_stride = k, c.b = b.w, c.b_stride = k;
      break;
    case Pass::kDx:
      c.m = m, c.n = k, c.k = n;
      c.a = b.x, c.a_stride = n, c.b = b.w, c.b_stride = k;
      break;
    case Pass::kDw:
      c.m = n, c.n = k, c.k = m;
      c.a = b.x, c.a_stride = n, c.b = b.w, c.b_stride = k;
      c.y_dtype = DType::kF32;
      break;
  }
  c.y_stride = c.n;
  if (pass == Pass::kDw && chains == kRagged) {
    c.runs = RaggedUnits(m);
  } else if (pass == Pass::kDw) {
    for (int64_t t = 0; t < m; t += 4096) {
      c.runs.push_back({static_cast<int>(t), static_cast<int>(std::min<int64_t>(4096, m - t))});
    }
  } else {
    for (int i = 0; i < chains; ++i) {
      c.runs.push_back({static_cast<int>(c.k / chains * i), static_cast<int>(c.k / chains)});
    }
  }
  return c;
}

size_t YBytes(const Contraction& c) {
  return static_cast<size_t>(c.m * c.n) * static_cast<size_t>(SizeOf(c.y_dtype));
}

// Words in which the schedule's output differs from the generic kernel's; -1 when it cannot run.
Result<int64_t> Differences(const Bench& bench, const Buffers& b, const Contraction& c,
                            const Schedule& schedule) {
  TARE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(c.y, 0x3C, YBytes(c), bench.stream()));
  TARE_RETURN_IF_ERROR(Launch(c, schedule, bench.stream(), nullptr));
  TARE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(b.counts, 0, 16, bench.stream()));
  TARE_RETURN_IF_ERROR(cuda::LaunchCountDifferences(c.y, b.reference, YBytes(c) / 2, b.counts,
                                                    b.counts + 1, bench.stream()));
  unsigned long long count = 0;
  TARE_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(&count, b.counts, 8, cudaMemcpyDeviceToHost, bench.stream()));
  TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(bench.stream()));
  return static_cast<int64_t>(count);
}

Status Reference(const Bench& bench, const Buffers& b, Contraction c) {
  c.y = b.reference;
  TARE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(c.y, 0x3C, YBytes(c), bench.stream()));
  return Launch(c, Schedule{.pass = c.pass}, bench.stream(), nullptr);
}

std::vector<Schedule> Candidates(const Contraction& c) {
  std::vector<Schedule> list;
  const size_t count = c.pass == Pass::kForward ? std::size(kForwardConfigs)
                       : c.pass == Pass::kDx    ? std::size(kDxConfigs)
                                                : std::size(kDwConfigs);
  for (size_t i = 0; i < count; ++i) {
    Schedule s{.pass = c.pass, .config = static_cast<int>(i)};
    const GemmConfig& g = s.gemm();
    if (c.pass != Pass::kDw && (c.chains() > (1 << g.levels) || (c.chains() == 1 && g.levels > 0)))
      continue;
    list.push_back(s);
  }
  return list;
}

// Tiles that could be sensible for these rows: neither far too tall nor too many waves.
bool Sensible(const Contraction& c, const GemmConfig& g) {
  if (c.pass != Pass::kForward || c.chains() > 1) return true;
  if (c.m <= 64) return g.bm == 64;
  if (g.bm == 64) return false;
  const double tiles =
      std::ceil(static_cast<double>(c.m) / g.bm) * std::ceil(static_cast<double>(c.n) / g.bn);
  const double waves = std::ceil(tiles / 132) * g.bm * g.bn;
  const double ideal = static_cast<double>(c.m) * static_cast<double>(c.n) / 132;
  return waves < 2.2 * ideal || (c.m <= 256 && g.bn <= 64);
}

Status Tune(Bench& bench, const Buffers& b, Pass pass, int chains) {
  for (const Shape2& shape : kShapes) {
    for (const int64_t m : kRows) {
      if (pass != Pass::kForward && m < 4096) continue;
      if (chains > 1 && m != 8 && m != 4096) continue;
      if (chains == kRagged && m != 8192) continue;
      Contraction c = Problem(pass, b, m, shape.n, shape.k, chains);
      Contraction one = c;  // for the opponent, which knows no segments
      if (pass != Pass::kDw) one.runs = {{0, static_cast<int>(c.k)}};
      TARE_RETURN_IF_ERROR(Reference(bench, b, c));
      std::vector<Arm> arms;
      std::vector<Schedule> schedules;
      std::vector<int64_t> bad;
      for (Schedule s : Candidates(c)) {
        if (!Sensible(c, s.gemm())) continue;
        for (const int group : {4, 8, 16}) {
          s.group_m = group;
          if (group != 8 && (m < 4096 || s.gemm().bm * s.gemm().bn < 128 * 256)) continue;
          auto differences = Differences(bench, b, c, s);
          if (!differences.ok()) {
            std::printf("  %s: %s\n", s.ToString().c_str(),
                        differences.status().ToString().c_str());
            continue;
          }
          bad.push_back(*differences);
          schedules.push_back(s);
          arms.push_back(
              {s.ToString(), [&bench, c, s] { return Launch(c, s, bench.stream(), nullptr); }});
        }
      }
      arms.push_back({"cublas", [&] { return LaunchNative(one, bench.stream(), nullptr); }});
      const bool big = m >= 4096;
      TARE_ASSIGN_OR_RETURN(const auto times, bench.Time(arms, big ? 3 : 10, big ? 3 : 5));
      const double cublas = times.back().median_us;
      std::printf("M=%lld N=%lld K=%lld cublas %.2f us\n", (long long)m, (long long)shape.n,
                  (long long)shape.k, cublas);
      std::vector<size_t> order(schedules.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = i;
      std::sort(order.begin(), order.end(),
                [&](size_t i, size_t j) { return times[i].median_us < times[j].median_us; });
      for (size_t rank = 0; rank < order.size(); ++rank) {
        const size_t i = order[rank];
        if (rank >= 5 && bad[i] == 0) continue;
        std::printf("  %.2f us (%.2f-%.2f) ratio %.3f  %2d %s%s\n", times[i].median_us,
                    times[i].low_us, times[i].high_us, times[i].median_us / cublas,
                    schedules[i].config, arms[i].name.c_str(),
                    bad[i] == 0 ? "" : fmt::format("  WRONG: {} words differ", bad[i]).c_str());
      }
      std::fflush(stdout);
    }
  }
  return Ok();
}

// Small and odd shapes: every kernel against the plain one, and the plain one against integers.
Status Bits(const Bench& bench, const Buffers& b) {
  int64_t runs = 0, wrong = 0;
  const int64_t shapes[][3] = {{1, 8, 16},       {3, 40, 64},     {64, 72, 48},    {65, 200, 136},
                               {130, 264, 1000}, {257, 520, 528}, {700, 1032, 320}};
  for (const auto& s : shapes) {
    for (const Pass pass : {Pass::kForward, Pass::kDx, Pass::kDw}) {
      for (const int chains : {1, 2, 4, 8}) {
        Contraction c = Problem(pass, b, s[0], s[1], s[2], 1);
        if (pass == Pass::kDw) {
          if (s[0] % 8 != 0 && false) continue;
          c.runs.clear();
          for (int i = 0; i < chains; ++i) {
            const int begin = static_cast<int>(s[0] * i / chains);
            const int end = static_cast<int>(s[0] * (i + 1) / chains);
            if (end > begin) c.runs.push_back({begin, end - begin});
          }
        } else if (chains > 1) {
          if (c.k % (16 * chains) != 0) continue;
          c = Problem(pass, b, s[0], s[1], s[2], chains);
        }
        if (!CanUseGemm(c)) continue;
        TARE_RETURN_IF_ERROR(Reference(bench, b, c));
        if (pass == Pass::kForward && chains == 1) {
          // Integers on the host.
          std::vector<uint16_t> x(static_cast<size_t>(c.m * c.k)),
              w(static_cast<size_t>(c.n * c.k));
          std::vector<uint16_t> y(static_cast<size_t>(c.m * c.n));
          TARE_CUDA_RETURN_IF_ERROR(
              cudaMemcpy(x.data(), c.a, x.size() * 2, cudaMemcpyDeviceToHost));
          TARE_CUDA_RETURN_IF_ERROR(
              cudaMemcpy(w.data(), c.b, w.size() * 2, cudaMemcpyDeviceToHost));
          TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(bench.stream()));
          TARE_CUDA_RETURN_IF_ERROR(
              cudaMemcpy(y.data(), b.reference, y.size() * 2, cudaMemcpyDeviceToHost));
          int64_t differ = 0;
          for (int64_t i = 0; i < c.m; ++i) {
            for (int64_t j = 0; j < c.n; ++j) {
              uint32_t acc = 0;
              for (int64_t k = 0; k < c.k; k += 16) {
                acc = cuda::OracleStepBf16(acc, &x[static_cast<size_t>(i * c.k + k)],
                                           &w[static_cast<size_t>(j * c.k + k)],
                                           static_cast<int>(std::min<int64_t>(16, c.k - k)));
              }
              differ += cuda::OracleRoundBf16(acc) != y[static_cast<size_t>(i * c.n + j)];
            }
          }
          ++runs;
          wrong += differ != 0;
          if (differ != 0)
            std::printf("plain against integers M=%lld N=%lld K=%lld: %lld differ\n",
                        (long long)c.m, (long long)c.n, (long long)c.k, (long long)differ);
        }
        for (const Schedule& schedule : Candidates(c)) {
          auto differences = Differences(bench, b, c, schedule);
          ++runs;
          if (!differences.ok() || *differences != 0) {
            ++wrong;
            std::printf("M=%lld N=%lld K=%lld pass %d chains %d %d %s: %s\n", (long long)c.m,
                        (long long)c.n, (long long)c.k, static_cast<int>(pass), chains,
                        schedule.config, schedule.ToString().c_str(),
                        differences.ok() ? fmt::format("{} words differ", *differences).c_str()
                                         : differences.status().ToString().c_str());
            std::fflush(stdout);
            if (!differences.ok()) return differences.status();
          }
        }
      }
    }
  }
  std::printf("bits: %lld comparisons, %lld wrong\n", (long long)runs, (long long)wrong);
  if (wrong != 0) return Error(Code::kInternal, "{} of {} comparisons are wrong", wrong, runs);
  return Ok();
}

// The table -----------------------------------------------------------------------------------

struct Row {
  std::string section, shape, schedule;
  Timing ours, peer;
  double bytes = 0, flops = 0;  // the fewest that the call needs
  int64_t differing_words = 0;
};

// Bytes read plus written a second by a device-to-device copy of 512 MiB.
Result<double> CopyBandwidth(Bench& bench, const Buffers& b) {
  constexpr size_t kBytes = size_t{512} << 20;
  const Arm copy = {"copy",
                    [&] { return cuda::LaunchCopy(b.reference, b.y, kBytes, bench.stream()); }};
  TARE_ASSIGN_OR_RETURN(const auto times, bench.Time({copy}, 4, 9));
  return 2.0 * static_cast<double>(kBytes) / (times[0].median_us * 1e-6);
}

Result<Row> Point(Bench& bench, const Buffers& b, const std::string& section, const Contraction& c,
                  Bench::Flush flush) {
  Row row;
  row.section = section;
  row.shape = fmt::format("M={} N={} K={}", c.m, c.n, c.k);
  const Schedule schedule = Pick(c.pass, c.m, c.n, c.k, c.chains(), Arch{});
  row.schedule = schedule.ToString();
  TARE_RETURN_IF_ERROR(Reference(bench, b, c));
  TARE_ASSIGN_OR_RETURN(row.differing_words, Differences(bench, b, c, schedule));
  // The opponent is the operator's native arm. It knows no segments: it has one sum.
  Contraction one = c;
  if (c.pass != Pass::kDw) one.runs = {{0, static_cast<int>(c.k)}};
  const std::vector<Arm> arms = {
      {"tare", [&] { return Launch(c, schedule, bench.stream(), nullptr); }},
      {"cublas", [&] { return LaunchNative(one, bench.stream(), nullptr); }}};
  const double flops =
      2.0 * static_cast<double>(c.m) * static_cast<double>(c.n) * static_cast<double>(c.k);
  const bool big = flops > 1e11;
  TARE_ASSIGN_OR_RETURN(const auto times, bench.Time(arms, big ? 5 : 20, big ? 15 : 21, flush));
  row.ours = times[0];
  row.peer = times[1];
  row.flops = flops;
  row.bytes = 2.0 * static_cast<double>(c.m * c.k + c.n * c.k) +
              static_cast<double>(c.m * c.n * SizeOf(c.y_dtype)) * (c.pass == Pass::kDw ? 2 : 1);
  return row;
}

Status Table(Bench& bench, const Buffers& b, const cuda::CublasPeer& peer, const std::string& facts,
             const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const double copy, CopyBandwidth(bench, b));
  std::printf("copy %.3f TB/s\n", copy * 1e-12);
  std::vector<Row> rows;
  const auto add = [&](const std::string& section, const Contraction& c,
                       Bench::Flush flush) -> Status {
    TARE_ASSIGN_OR_RETURN(Row row, Point(bench, b, section, c, flush));
    std::printf(
        "| %s | %s | %.2f (%.2f-%.2f) | %.2f (%.2f-%.2f) | %.3f | %.2f | %.0f | %lld | %s |\n",
        section.c_str(), row.shape.c_str(), row.peer.median_us, row.peer.low_us, row.peer.high_us,
        row.ours.median_us, row.ours.low_us, row.ours.high_us,
        row.ours.median_us / row.peer.median_us, row.bytes / (row.ours.median_us * 1e-6) / copy,
        row.flops / row.ours.median_us * 1e-6, (long long)row.differing_words,
        row.schedule.c_str());
    std::fflush(stdout);
    rows.push_back(std::move(row));
    return Ok();
  };
  std::printf(
      "| pass | shape | cuBLAS us | tare us | ratio | bytes/copy | TFLOP/s | differing | schedule "
      "|\n"
      "|---|---|---|---|---|---|---|---|---|\n");
  int64_t row0_changes = 0;
  double log_sum = 0, worst = 0;
  for (const Shape2& shape : kShapes) {
    std::vector<uint16_t> first(static_cast<size_t>(shape.n)), row0(static_cast<size_t>(shape.n));
    for (const int64_t m : kRows) {
      const Contraction c = Problem(Pass::kForward, b, m, shape.n, shape.k, 1);
      TARE_RETURN_IF_ERROR(add("fwd", c, Bench::Flush::kRead));
      TARE_RETURN_IF_ERROR(
          Launch(c, Pick(c.pass, c.m, c.n, c.k, 1, Arch{}), bench.stream(), nullptr));
      TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(bench.stream()));
      TARE_CUDA_RETURN_IF_ERROR(cudaMemcpy((m == 1 ? first : row0).data(), b.y, first.size() * 2,
                                           cudaMemcpyDeviceToHost));
      row0_changes += m != 1 && row0 != first;
      const double ratio = rows.back().ours.median_us / rows.back().peer.median_us;
      log_sum += std::log(ratio);
      worst = std::max(worst, ratio);
    }
  }
  const double geomean = std::exp(log_sum / 28);
  std::printf(
      "forward: geometric mean of 28 ratios %.4f, worst %.3f; row 0 changed its bits with M %lld "
      "times\n",
      geomean, worst, (long long)row0_changes);
  for (const Shape2& shape : kShapes) {
    for (const int64_t m : {1, 64}) {
      TARE_RETURN_IF_ERROR(add("fwd, dirty L2", Problem(Pass::kForward, b, m, shape.n, shape.k, 1),
                               Bench::Flush::kWrite));
    }
  }
  for (const Pass pass : {Pass::kDx, Pass::kDw}) {
    for (const Shape2& shape : kShapes) {
      for (const int64_t m : {4096, 8192}) {
        TARE_RETURN_IF_ERROR(add(pass == Pass::kDx ? "dx" : "dw",
                                 Problem(pass, b, m, shape.n, shape.k, 1), Bench::Flush::kRead));
      }
    }
  }
  for (const Shape2& shape : kShapes) {
    TARE_RETURN_IF_ERROR(add("dw, 40 ragged",
                             Problem(Pass::kDw, b, 8192, shape.n, shape.k, kRagged),
                             Bench::Flush::kRead));
  }
  for (const Shape2& shape : kShapes) {
    for (const int64_t m : {8, 4096}) {
      for (const int chains : {2, 4, 8}) {
        TARE_RETURN_IF_ERROR(add(fmt::format("fwd, S={}", chains),
                                 Problem(Pass::kForward, b, m, shape.n, shape.k, chains),
                                 Bench::Flush::kRead));
      }
    }
  }
  std::string json = fmt::format(
      "{{\"schema\": \"tare.linear_cuda_bench.1\", {}, \"cublas\": \"{}\", \"copy_bytes_per_s\": "
      "{:.4g}, "
      "\"forward_geomean\": {:.4f}, \"forward_worst\": {:.4f}, \"row0_changes\": {},\n\"rows\": [",
      facts, peer.version(), copy, geomean, worst, row0_changes);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& r = rows[i];
    json += fmt::format(
        "{}\n{{\"pass\": \"{}\", \"shape\": \"{}\", \"schedule\": \"{}\", \"ours_us\": [{:.3f}, "
        "{:.3f}, {:.3f}], "
        "\"cublas_us\": [{:.3f}, {:.3f}, {:.3f}], \"bytes\": {:.0f}, \"flops\": {:.0f}, "
        "\"differing_words\": {}}}",
        i == 0 ? "" : ",", r.section, r.shape, r.schedule, r.ours.low_us, r.ours.median_us,
        r.ours.high_us, r.peer.low_us, r.peer.median_us, r.peer.high_us, r.bytes, r.flops,
        r.differing_words);
  }
  json += "\n]}\n";
  TARE_RETURN_IF_ERROR(Env::Real()->WriteFileAtomic(path, json));
  int64_t differing = row0_changes;
  for (const Row& r : rows) differing += r.differing_words;
  if (differing != 0) return Error(Code::kInternal, "bits differ: see the table");
  return Ok();
}

Status Main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "bits";
  TARE_ASSIGN_OR_RETURN(Bench bench, Bench::Create());
  TARE_ASSIGN_OR_RETURN(const Buffers buffers, Allocate(mode == "bits-small"));
  TARE_ASSIGN_OR_RETURN(const std::string facts, cuda::DeviceFacts());
  std::printf("{%s}\n", facts.c_str());
  if (mode == "bits" || mode == "bits-small") return Bits(bench, buffers);
  TARE_ASSIGN_OR_RETURN(const auto peer, cuda::CublasPeer::Open());
  std::printf("cuBLAS %s\n", peer.version().c_str());
  const std::string pass = argc > 2 ? argv[2] : "fwd";
  const int chains = argc > 3 ? std::atoi(argv[3]) : 1;
  if (mode == "tune") {
    return Tune(bench, buffers,
                pass == "fwd"  ? Pass::kForward
                : pass == "dx" ? Pass::kDx
                               : Pass::kDw,
                pass == "ragged" ? kRagged : chains);
  }
  if (mode == "table" && argc > 2) return Table(bench, buffers, peer, facts, argv[2]);
  return InvalidArgument("unknown mode {}; bits, tune PASS or table OUT.json", mode);
}

}  // namespace
}  // namespace tare::ops::linear::gpu

int main(int argc, char** argv) {
  const tare::Status status = tare::ops::linear::gpu::Main(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 70;
}
