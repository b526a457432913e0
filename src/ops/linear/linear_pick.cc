// Which Hopper kernel runs a contraction. A pure function of shape and SM count; no bit depends on
// it.

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <span>

#include "ops/linear/linear_cuda.h"

namespace tare::ops::linear::gpu {
namespace {

std::span<const GemmConfig> Configs(Pass pass) {
  switch (pass) {
    case Pass::kForward:
      return kForwardConfigs;
    case Pass::kDx:
      return kDxConfigs;
    case Pass::kDw:
      return kDwConfigs;
  }
  return {};
}

// Tokens of a unit from which on its sums may go through memory: their writes and reads take the
// time of 44 stages to be spread over. With shorter ones the gradient stays in registers.
constexpr int64_t kLongUnit = 3072;

bool Holds(const GemmConfig& c, Pass pass, int64_t k, int chains) {
  if (pass == Pass::kDw) return c.levels == 1 || k >= kLongUnit * chains || chains == 1;
  return (1 << c.levels) >= chains;
}

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Time of a schedule in cycles for each 64 k, on a model with two limits of one SM: the matrix unit
// (a tile of 128 x 256 takes 1,024 cycles) and shared memory at 128 bytes a cycle, which takes
// every stage once from the copy engine and gives b once, and a once, for every 64 rows of a.
// Measured on an H200: tiles of 128 x 64, 128 x 96 and 128 x 128 run at that second limit. Whole
// waves; ties go to fewer tiles. Decode is bound by memory whatever the tile: there the narrowest
// tile that still fits one wave brings the most SMs to bear, and beyond one wave 96 columns
// measured best.
// dW follows the same two limits (its b is held in whole boxes of 64), waits for memory hidden.
double Cost(const GemmConfig& c, Pass pass, int64_t m, int64_t n, const Arch& arch) {
  const int64_t at_once = std::max<int64_t>(1, arch.sms / c.cluster());
  const int64_t tiles = CeilDiv(m, c.bm * c.cluster_m) * CeilDiv(n, c.bn * c.cluster_n);
  const int64_t waves = CeilDiv(tiles, at_once);
  const double compute = c.bm * c.bn / 32.0;
  const int row_blocks = c.bm / 64;
  const double shared =
      (4 * row_blocks * (2048 + 32 * c.bn) + 128 * (c.bm + c.b_columns())) / 128.0;
  double cost =
      static_cast<double>(waves) * (std::max(compute, shared) * (1 + 0.05 * c.levels) + 30);
  if (pass == Pass::kDw) return static_cast<double>(waves) * (std::max(compute, shared) + 30);
  const bool few = m <= 64;
  // One consumer warpgroup is for few rows, two are for more.
  if (few != (c.consumers == 1)) return 1e9 + cost;
  if (few && pass == Pass::kForward && waves > 1) cost = 1e6 - c.bn;
  return cost;
}

}  // namespace

const GemmConfig& Schedule::gemm() const {
  const auto configs = Configs(pass);
  TARE_CHECK(config >= 0 && config < static_cast<int>(configs.size()))
      << "no Hopper kernel " << config;
  return configs[static_cast<size_t>(config)];
}

std::string Schedule::Kernel() const {
  const char* name = pass == Pass::kForward ? "fwd" : pass == Pass::kDx ? "bwd_dx" : "bwd_dw";
  if (config < 0) return fmt::format("linear_{}_generic", name);
  return fmt::format("linear_{}_wgmma_{}x{}", name, gemm().bm, gemm().bn);
}

std::string Schedule::ToString() const {
  if (config < 0) return "tile=64x64x16";
  const GemmConfig& c = gemm();
  std::string text =
      fmt::format("tile={}x{}x{} stages={} consumers={}", c.bm, c.bn, c.bk, c.stages, c.consumers);
  if (c.cluster() > 1) text += fmt::format(" cluster={}x{}", c.cluster_m, c.cluster_n);
  if (c.levels > 0) text += fmt::format(" levels={}", c.levels);
  if (c.ordered) text += " ordered";
  return text + fmt::format(" group={}", group_m);
}

Schedule Pick(Pass pass, int64_t m, int64_t n, int64_t k, int chains, const Arch& arch) {
  const auto configs = Configs(pass);
  Schedule best{.pass = pass};
  double best_cost = 0;
  for (int i = 0; i < static_cast<int>(configs.size()); ++i) {
    const GemmConfig& c = configs[static_cast<size_t>(i)];
    if (!Holds(c, pass, k, chains)) continue;
    const double cost = Cost(c, pass, m, n, arch);
    if (best.config < 0 || cost < best_cost) {
      best.config = i;
      best_cost = cost;
    }
  }
  return best;
}

}  // namespace tare::ops::linear::gpu
