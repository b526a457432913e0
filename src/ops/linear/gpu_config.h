#pragma once

// The shape of one Hopper contraction kernel, as a printable value, and the kernels that are built.
// Host code without CUDA may include this: what runs is decided (and tested) without a device.
//
// Nothing here can move a bit: every output element has one accumulator that walks its k in order.

#include <cstdint>

#include "tensor/hd.h"

namespace tare::ops::linear::gpu {

// kTree: the chains' sums are added as a balanced tree of neighbours, then the output is written.
// kUnits: each chain's sum is added to the f32 output, in order.
enum class Chains : uint8_t { kTree, kUnits };

struct GemmConfig {
  int bm = 128;          // rows of a in a tile, a multiple of 64 * consumers
  int bn = 256;          // rows of b in a tile: 16, 32, 48, 64, 96, 128, 176, 192 or 256
  int bk = 64;           // k of a stage, a multiple of 64
  int stages = 4;        // of the ring in shared memory
  int consumers = 2;     // warpgroups that multiply: 1 or 2
  int cluster_m = 1;     // CTAs of a cluster that sit above each other and share rows of b
  int cluster_n = 1;     // CTAs of a cluster that sit abreast and share rows of a
  bool trans_a = false;  // a lies [k, i] in memory (row index innermost); else [i, k]
  bool trans_b = false;
  Chains chains = Chains::kTree;
  // kTree: log2 of the most chains. kUnits: 1 keeps the f32 output of the tile in registers from
  // its first chain to its last, 0 goes through memory for every chain.
  int levels = 0;
  bool ordered = false;  // kUnits: the warpgroups take turns at the matrix unit
  int park = 0;          // kUnits, levels 0: sums of a thread that wait in shared memory
  bool staged = true;  // bf16 output through shared memory and the copy engine; bn a multiple of 64

  TARE_HD constexpr int threads() const { return 128 * (consumers + 1); }
  TARE_HD constexpr int a_bytes() const { return bm * bk * 2; }
  TARE_HD constexpr int b_bytes() const { return b_columns() * bk * 2; }
  // Rows of b that a stage holds: MN-major, whole boxes of 64.
  TARE_HD constexpr int b_columns() const { return trans_b ? (bn + 63) / 64 * 64 : bn; }
  TARE_HD constexpr int stage_bytes() const { return a_bytes() + b_bytes(); }
  TARE_HD constexpr int epilogue_bytes() const {
    return staged ? consumers * 2 * 8192 : park * consumers * 128 * 4;
  }
  // Dynamic shared memory: stages and staging from a multiple of 1,024, then the barriers.
  TARE_HD constexpr int shared_bytes() const {
    return 1024 + stages * stage_bytes() + epilogue_bytes() + stages * 16;
  }
  TARE_HD constexpr int cluster() const { return cluster_m * cluster_n; }
  // Row blocks of 64 that a warpgroup holds.
  TARE_HD constexpr int blocks() const { return bm / 64 / consumers; }
  // f32 registers a thread needs for accumulators and saved sums.
  TARE_HD constexpr int accumulators() const { return blocks() * (bn / 2) * (1 + levels); }
};

struct Run {
  int begin;  // first k
  int length;
};
// The runs of all chains: `chains * parts` of them for kTree, `chains` for kUnits.
struct GemmRuns {
  static constexpr int kMax = 480;  // what a kernel's parameters hold
  Run runs[kMax];
};
struct NoRuns {};  // kTree with one part: chain c is [c * chain_length, (c + 1) * chain_length)

struct GemmArgs {
  int m, n;              // shape of the output
  int tiles_m, tiles_n;  // in tiles of a whole cluster
  int group_m;           // tiles_m is walked in groups of this many, n outside m inside a group
  int chains;
  int parts;         // runs of a chain; 1 for kUnits
  int chain_length;  // NoRuns
  int a_rows;        // rows of a that a box holds when a lies [i, k]: bm, or fewer when m is small
  bool out_f32;      // kTree: f32 output, else bf16
  bool pairs;        // columns 2j and 2j + 1 of y may be written as one aligned word
  bool out_tma;      // bf16 output through `map_y`
  void* y;           // [m, n], rows y_stride elements apart
  int64_t y_stride;
  const void* bias;  // [n] or null
  bool bias_f32;
};

// Rows of a box of an operand of dW: all of a stage, or one CTA's part where they are cut among
// `parts` CTAs that cannot share its chunks of 64 columns evenly.
constexpr int GradientBoxRows(const GemmConfig& c, int columns, int parts) {
  return columns / 64 % parts == 0 ? c.bk : c.bk / parts;
}

constexpr int kSharedLimit = 232448;  // bytes a Hopper CTA may ask for

constexpr bool Valid(const GemmConfig& c) {
  // dW holds b in whole boxes and cuts what a cluster shares by rows where chunks do not do.
  const bool units = c.chains == Chains::kUnits;
  return c.bm % (64 * c.consumers) == 0 && c.bk % 64 == 0 && c.shared_bytes() <= kSharedLimit &&
         (c.consumers == 1 || c.consumers == 2) &&
         c.accumulators() <= (c.consumers == 1 ? 208 : 192) && (!c.staged || c.bn % 64 == 0) &&
         (!c.trans_a || c.bm % 64 == 0) && (!c.trans_b || units || c.bn % 64 == 0) &&
         c.cluster() <= 4 && (c.cluster_m == 1 || c.cluster_n == 1) &&
         (units || (c.trans_a ? c.bm / 64 : c.bm / 8) % c.cluster_n == 0) &&
         (units || (c.trans_b ? c.bn / 64 : c.bn / 8) % c.cluster_m == 0) &&
         (units || (!c.ordered && c.park == 0)) && c.park % 8 == 0 && c.park <= c.bn / 4;
}

// Forward, one chain or more: a = x [M, K], b = W [N, K].
inline constexpr GemmConfig kForwardConfigs[] = {
    // Decode: weights stream past at most 64 tokens; the tile is as narrow as the SMs need.
    {.bm = 64, .bn = 16, .bk = 128, .stages = 11, .consumers = 1, .staged = false},
    {.bm = 64, .bn = 32, .bk = 128, .stages = 9, .consumers = 1, .staged = false},
    {.bm = 64, .bn = 48, .bk = 128, .stages = 8, .consumers = 1, .staged = false},
    {.bm = 64, .bn = 64, .bk = 128, .stages = 7, .consumers = 1, .staged = false},
    {.bm = 64, .bn = 96, .bk = 64, .stages = 11, .consumers = 1, .staged = false},
    // Up to a few hundred tokens: one wave of small tiles.
    {.bm = 128, .bn = 32, .bk = 128, .stages = 5, .staged = false},
    {.bm = 128, .bn = 48, .bk = 128, .stages = 5, .staged = false},
    {.bm = 128, .bn = 64, .bk = 64, .stages = 8, .cluster_m = 2},
    {.bm = 128, .bn = 96, .bk = 64, .stages = 7, .cluster_m = 2, .staged = false},
    {.bm = 128, .bn = 128, .bk = 64, .stages = 6, .cluster_m = 2},
    // Prefill and training.
    {.bm = 128, .bn = 192, .bk = 64, .stages = 4, .cluster_m = 2},
    {.bm = 128, .bn = 256, .bk = 64, .stages = 4},
    {.bm = 128, .bn = 256, .bk = 64, .stages = 4, .cluster_m = 2},
    // More than one chain: partial sums in registers ask for smaller tiles.
    {.bm = 64, .bn = 32, .bk = 128, .stages = 9, .consumers = 1, .levels = 3, .staged = false},
    {.bm = 64, .bn = 48, .bk = 128, .stages = 8, .consumers = 1, .levels = 3, .staged = false},
    {.bm = 128, .bn = 192, .bk = 64, .stages = 4, .cluster_m = 2, .levels = 1},
    {.bm = 128, .bn = 128, .bk = 64, .stages = 6, .cluster_m = 2, .levels = 1},
    {.bm = 128, .bn = 128, .bk = 64, .stages = 6, .cluster_m = 2, .levels = 2},
    {.bm = 128, .bn = 96, .bk = 64, .stages = 7, .cluster_m = 2, .levels = 3, .staged = false},
};

// dX: a = dY [M, N], b = W [N, K] read with its row index as k.
inline constexpr GemmConfig kDxConfigs[] = {
    {.bm = 64, .bn = 64, .bk = 64, .stages = 12, .consumers = 1, .trans_b = true, .staged = false},
    {.bm = 128, .bn = 128, .bk = 64, .stages = 6, .cluster_m = 2, .trans_b = true},
    {.bm = 128, .bn = 256, .bk = 64, .stages = 4, .cluster_m = 2, .trans_b = true},
    {.bm = 256, .bn = 128, .bk = 64, .stages = 4, .cluster_n = 2, .trans_b = true},
    {.bm = 128, .bn = 128, .bk = 64, .stages = 6, .cluster_m = 2, .trans_b = true, .levels = 2},
    {.bm = 128, .bn = 64, .bk = 64, .stages = 8, .cluster_n = 2, .trans_b = true, .levels = 3},
};

// dW: a = dY [T, N], b = X [T, K], both read with the token as k. Long units go through memory, for
// short ones the gradient of the tile stays in registers.
inline constexpr GemmConfig kDwConfigs[] = {
    {.bm = 128,
     .bn = 256,
     .bk = 64,
     .stages = 4,
     .cluster_m = 2,
     .trans_a = true,
     .trans_b = true,
     .chains = Chains::kUnits,
     .ordered = true,
     .park = 32,
     .staged = false},
    {.bm = 128,
     .bn = 192,
     .bk = 64,
     .stages = 5,
     .cluster_m = 1,
     .trans_a = true,
     .trans_b = true,
     .chains = Chains::kUnits,
     .levels = 1,
     .ordered = true,
     .staged = false},
    {.bm = 128,
     .bn = 176,
     .bk = 64,
     .stages = 5,
     .cluster_m = 2,
     .trans_a = true,
     .trans_b = true,
     .chains = Chains::kUnits,
     .levels = 1,
     .ordered = true,
     .staged = false},
};

template <int kCount>
constexpr bool AllValid(const GemmConfig (&configs)[kCount]) {
  for (const GemmConfig& c : configs) {
    if (!Valid(c)) return false;
  }
  return true;
}
static_assert(AllValid(kForwardConfigs));
static_assert(AllValid(kDxConfigs));
static_assert(AllValid(kDwConfigs));

}  // namespace tare::ops::linear::gpu
