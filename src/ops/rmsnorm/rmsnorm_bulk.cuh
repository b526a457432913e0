#pragma once

// rmsnorm for prefill: rows come and go by the copy engine. A team of warps works on one row and
// has a ring of stages in shared memory: while it works on one row the next ones arrive, and what
// it has written leaves. A team, because a row takes one warp so long that the first and the last
// of them leave the memory idle. The bits are those of rmsnorm.cu's other kernels: the same lanes,
// the same order.

#include "ops/cuda/eights.cuh"
#include "ops/cuda/sm90.cuh"
#include "ops/rmsnorm/rmsnorm_cuda.h"

namespace tare::ops::rmsnorm {

struct ForwardArgs {
  int64_t rows, width;
  const void *x, *residual, *w;
  void *y, *residual_out;
  float* rstd;
  float inverse, eps;
  bool w_f32, unit_offset;
  bool staged;  // the row fits in shared memory; else it is read again
};

struct BackwardRowArgs {
  int64_t rows, width;
  const void *h, *w, *dy, *extra;
  void* dx;
  const float* rstd;
  float inverse;
  bool w_f32, unit_offset;
  bool staged;
};

constexpr int kForwardTeam = 2, kBackwardTeam = 4;  // warps of a team
constexpr int kMostThreads = 512;
constexpr int kMostTeams = kMostThreads / 32 / kForwardTeam;  // of either kernel
constexpr int kMostStages = 8;

// How a CTA is cut: launch configuration, no bit depends on it. teams = 0: two stages of a row do
// not fit.
struct BulkShape {
  int teams = 0, stages = 0;
  size_t shared = 0;
};
constexpr size_t kLanesBytes = 2 * 128 * sizeof(float);

// As many teams as have two stages each, then as many stages as fit.
inline BulkShape ShapeOf(size_t stage_bytes, size_t weight_bytes, int most_teams) {
  const size_t left = cuda::kMostShared - std::min(cuda::kMostShared, weight_bytes);
  BulkShape s;
  s.teams = static_cast<int>(
      std::min<size_t>(static_cast<size_t>(most_teams), left / (2 * stage_bytes + kLanesBytes)));
  if (s.teams == 0) return s;
  const auto teams = static_cast<size_t>(s.teams);
  s.stages =
      static_cast<int>(std::min<size_t>(kMostStages, (left / teams - kLanesBytes) / stage_bytes));
  s.shared = weight_bytes + teams * (kLanesBytes + static_cast<size_t>(s.stages) * stage_bytes);
  return s;
}

__device__ __forceinline__ void BulkLoad(uint32_t to, const void* from, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void BulkStore(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// What a thread of a team of kTeam warps has of each chunk of 128: elements kE * thread and on,
// which are lanes kE * thread and on.
template <int kE>
struct Piece;
template <>
struct Piece<1> {
  static __device__ __forceinline__ void Load(const float* p, float (&v)[1]) { v[0] = *p; }
  static __device__ __forceinline__ void Load(const uint16_t* p, float (&v)[1]) {
    v[0] = cuda::Widen(*p);
  }
  template <typename T>
  static __device__ __forceinline__ void Store(const float (&v)[1], T* p) {
    cuda::Put(v[0], p);
  }
  // Stores v; v is then what a load would give.
  template <typename T>
  static __device__ __forceinline__ void Round(float (&v)[1], T* p) {
    cuda::Put(v[0], p);
    v[0] = cuda::RoundAs(v[0], p);
  }
};
template <>
struct Piece<2> {
  static __device__ __forceinline__ void Load(const float* p, float (&v)[2]) {
    const float2 pair = *reinterpret_cast<const float2*>(p);
    v[0] = pair.x, v[1] = pair.y;
  }
  static __device__ __forceinline__ void Load(const uint16_t* p, float (&v)[2]) {
    const uint32_t pair = *reinterpret_cast<const uint32_t*>(p);
    v[0] = __uint_as_float(pair << 16), v[1] = __uint_as_float(pair & 0xffff0000u);
  }
  static __device__ __forceinline__ void Store(const float (&v)[2], float* p) {
    *reinterpret_cast<float2*>(p) =
        make_float2(numerics::Canonical(v[0]), numerics::Canonical(v[1]));
  }
  static __device__ __forceinline__ void Store(const float (&v)[2], uint16_t* p) {
    *reinterpret_cast<uint32_t*>(p) = cuda::Bf16Pair(v[0], v[1]);
  }
  static __device__ __forceinline__ void Round(float (&v)[2], float* p) {
    v[0] = numerics::Canonical(v[0]), v[1] = numerics::Canonical(v[1]);
    *reinterpret_cast<float2*>(p) = make_float2(v[0], v[1]);
  }
  static __device__ __forceinline__ void Round(float (&v)[2], uint16_t* p) {
    const uint32_t pair = cuda::Bf16Pair(v[0], v[1]);
    *reinterpret_cast<uint32_t*>(p) = pair;
    v[0] = __uint_as_float(pair << 16), v[1] = __uint_as_float(pair & 0xffff0000u);
  }
};

// A team: its hardware barrier, its ring, and the 128 lanes that its warps tell each other.
template <int kTeam>
struct Team {
  static constexpr int kE = 4 / kTeam;
  int thread, index;
  float* lanes;  // two turns of 128

  __device__ __forceinline__ void Sync() const { sm90::NamedBarrier(1 + index, 32 * kTeam); }
  // The tree over the 128 lanes; the sum in every thread. What the team wrote to shared memory
  // before is there after it. Calls take turns at `lanes`.
  __device__ __forceinline__ float Tree(const float (&acc)[kE], uint32_t turn) const {
    float* all = lanes + 128 * turn;
#pragma unroll
    for (int e = 0; e < kE; ++e) all[kE * thread + e] = acc[e];
    Sync();
    const float* mine = all + thread % 32;
    return cuda::TreeOf32(cuda::Add(cuda::Add(mine[0], mine[64]), cuda::Add(mine[32], mine[96])));
  }
};

// Stage and parity of a team's ring.
struct Stage {
  int at = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Next(int stages) {
    if (++at == stages) at = 0, parity ^= 1;
  }
};

// Bytes of shared memory of one stage and of the weight.
template <typename R, bool kResidual>
size_t BulkStageBytes(int64_t width) {
  return static_cast<size_t>(width) * (2 + (kResidual ? sizeof(R) : 0));
}
template <typename H, typename G>
size_t BulkBackwardStageBytes(int64_t width, bool extra) {
  return static_cast<size_t>(width) * (sizeof(H) + (extra ? 2 : 1) * sizeof(G));
}
inline size_t BulkBytesOfWeight(int64_t width) { return static_cast<size_t>(width) * 4; }

// The barriers of all rings.
__device__ __forceinline__ void BulkBarriers(uint64_t* barriers, int count) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < count; ++i) sm90::BarrierInit(sm90::SharedAddress(barriers + i), 1);
    sm90::BarrierInitFence();
  }
  __syncthreads();
}
// The weight as f32 into shared memory; called when the first rows are on their way.
template <typename Args>
__device__ __forceinline__ void BulkWeight(const Args& a, float* w) {
  for (int i = threadIdx.x; i < a.width; i += blockDim.x) {
    const float v = cuda::LoadAny(a.w, a.w_f32, i);
    w[i] = a.unit_offset ? cuda::Add(v, 1.0f) : v;
  }
  __syncthreads();
}

// REQUIRES: width a multiple of 128 and rows at addresses of 16 bytes. Shared memory: per team and
// stage x (then y) and, with kResidual, the residual (then the sum); then the weight as f32, then
// the lanes.
template <typename R, bool kResidual>
__global__ void __launch_bounds__(kMostThreads)
    rmsnorm_bulk_kernel(const __grid_constant__ ForwardArgs a, BulkShape shape) {
  using P = Piece<Team<kForwardTeam>::kE>;
  constexpr int kE = Team<kForwardTeam>::kE;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) uint64_t barriers[kMostTeams * kMostStages];
  constexpr int kThreads = 32 * kForwardTeam;
  const int index = threadIdx.x / kThreads;
  const auto width = static_cast<uint32_t>(a.width);
  const uint32_t x_bytes = width * 2, r_bytes = kResidual ? width * sizeof(R) : 0;
  const uint32_t stage_bytes = x_bytes + r_bytes;
  const int stages = shape.stages;
  uint8_t* mine = shared + static_cast<size_t>(index * stages) * stage_bytes;
  auto* w =
      reinterpret_cast<float*>(shared + static_cast<size_t>(shape.teams * stages) * stage_bytes);
  const Team<kForwardTeam> team = {static_cast<int>(threadIdx.x) % kThreads, index,
                                   w + a.width + 256 * index};
  BulkBarriers(barriers, shape.teams * stages);
  const uint32_t barrier = sm90::SharedAddress(barriers + index * stages);
  const auto load = [&](int64_t row, int stage) {
    sm90::BarrierArriveExpect(barrier + 8 * stage, stage_bytes);
    const uint32_t to = sm90::SharedAddress(mine + stage * stage_bytes);
    BulkLoad(to, static_cast<const uint16_t*>(a.x) + row * a.width, x_bytes, barrier + 8 * stage);
    if constexpr (kResidual)
      BulkLoad(to + x_bytes, static_cast<const R*>(a.residual) + row * a.width, r_bytes,
               barrier + 8 * stage);
  };
  const int64_t step = int64_t{gridDim.x} * shape.teams;
  const int64_t first = int64_t{blockIdx.x} + static_cast<int64_t>(index) * gridDim.x;
  if (team.thread == 0) {
    for (int s = 0; s < stages - 1 && first + s * step < a.rows; ++s) load(first + s * step, s);
  }
  BulkWeight(a, w);
  Stage stage;
  uint32_t turn = 0;
  for (int64_t row = first; row < a.rows; row += step) {
    sm90::BarrierWait(barrier + 8 * stage.at, stage.parity);
    auto* x = reinterpret_cast<uint16_t*>(mine + stage.at * stage_bytes);
    auto* r = reinterpret_cast<R*>(mine + stage.at * stage_bytes + x_bytes);
    float acc[kE] = {};
#pragma unroll 8
    for (uint32_t at = kE * team.thread; at < width; at += 128) {
      float h[kE];
      P::Load(x + at, h);
      if constexpr (kResidual) {
        float old[kE];
        P::Load(r + at, old);
#pragma unroll
        for (int e = 0; e < kE; ++e) h[e] = cuda::Add(h[e], old[e]);
        P::Round(h, r + at);
      }
#pragma unroll
      for (int e = 0; e < kE; ++e) acc[e] = cuda::Fma(h[e], h[e], acc[e]);
    }
    if constexpr (kResidual) sm90::FenceProxyAsync();
    const float sum = team.Tree(acc, turn);
    turn ^= 1;
    if (team.thread == 0) {
      if constexpr (kResidual) {
        BulkStore(static_cast<R*>(a.residual_out) + row * a.width, sm90::SharedAddress(r), r_bytes);
        sm90::BulkCommit();
      }
      // The stage before this one is filled anew once what it sent out has been read.
      const int64_t next = row + (stages - 1) * step;
      if (next < a.rows) {
        sm90::BulkWaitRead<kResidual ? 1 : 0>();
        load(next, stage.at == 0 ? stages - 1 : stage.at - 1);
      }
    }
    const float rstd = cuda::Div(1.0f, numerics::Sqrt(cuda::Fma(sum, a.inverse, a.eps)));
    if (team.thread == 0 && a.rstd != nullptr) cuda::Put(rstd, a.rstd + row);
#pragma unroll 8
    for (uint32_t at = kE * team.thread; at < width; at += 128) {
      float h[kE], weight[kE];
      if constexpr (kResidual) {
        P::Load(r + at, h);
      } else {
        P::Load(x + at, h);
      }
      P::Load(w + at, weight);
#pragma unroll
      for (int e = 0; e < kE; ++e) h[e] = cuda::Mul(cuda::Mul(h[e], rstd), weight[e]);
      P::Store(h, x + at);
    }
    sm90::FenceProxyAsync();
    team.Sync();
    if (team.thread == 0) {
      BulkStore(static_cast<uint16_t*>(a.y) + row * a.width, sm90::SharedAddress(x), x_bytes);
      sm90::BulkCommit();
    }
    stage.Next(stages);
  }
  // Shared memory must live until the last row has left it.
  if (team.thread == 0) sm90::BulkWaitRead<0>();
}

// dx. Shared memory: per team and stage dy (then dx), the other gradient if there is one, h; then
// the weight as f32, then the lanes. REQUIRES: as rmsnorm_bulk_kernel.
template <typename H, typename G, bool kExtra>
__global__ void __launch_bounds__(kMostThreads)
    rmsnorm_bulk_backward_kernel(const __grid_constant__ BackwardRowArgs a, BulkShape shape) {
  using P = Piece<Team<kBackwardTeam>::kE>;
  constexpr int kE = Team<kBackwardTeam>::kE;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) uint64_t barriers[kMostTeams * kMostStages];
  constexpr int kThreads = 32 * kBackwardTeam;
  const int index = threadIdx.x / kThreads;
  const auto width = static_cast<uint32_t>(a.width);
  const uint32_t g_bytes = width * sizeof(G), h_bytes = width * sizeof(H);
  const uint32_t h_offset = (kExtra ? 2 : 1) * g_bytes, stage_bytes = h_offset + h_bytes;
  const int stages = shape.stages;
  uint8_t* mine = shared + static_cast<size_t>(index * stages) * stage_bytes;
  auto* w =
      reinterpret_cast<float*>(shared + static_cast<size_t>(shape.teams * stages) * stage_bytes);
  const Team<kBackwardTeam> team = {static_cast<int>(threadIdx.x) % kThreads, index,
                                    w + a.width + 256 * index};
  BulkBarriers(barriers, shape.teams * stages);
  const uint32_t barrier = sm90::SharedAddress(barriers + index * stages);
  const auto load = [&](int64_t row, int stage) {
    sm90::BarrierArriveExpect(barrier + 8 * stage, stage_bytes);
    const uint32_t to = sm90::SharedAddress(mine + stage * stage_bytes);
    BulkLoad(to, static_cast<const G*>(a.dy) + row * a.width, g_bytes, barrier + 8 * stage);
    if constexpr (kExtra)
      BulkLoad(to + g_bytes, static_cast<const G*>(a.extra) + row * a.width, g_bytes,
               barrier + 8 * stage);
    BulkLoad(to + h_offset, static_cast<const H*>(a.h) + row * a.width, h_bytes,
             barrier + 8 * stage);
  };
  const int64_t step = int64_t{gridDim.x} * shape.teams;
  const int64_t first = int64_t{blockIdx.x} + static_cast<int64_t>(index) * gridDim.x;
  if (team.thread == 0) {
    for (int s = 0; s < stages - 1 && first + s * step < a.rows; ++s) load(first + s * step, s);
  }
  BulkWeight(a, w);
  float next_r = first < a.rows ? a.rstd[first] : 0.0f;
  Stage stage;
  uint32_t turn = 0;
  for (int64_t row = first; row < a.rows; row += step) {
    const float r = next_r;
    if (row + step < a.rows) next_r = a.rstd[row + step];
    sm90::BarrierWait(barrier + 8 * stage.at, stage.parity);
    auto* dy = reinterpret_cast<G*>(mine + stage.at * stage_bytes);
    const auto* extra = reinterpret_cast<const G*>(mine + stage.at * stage_bytes + g_bytes);
    const auto* h = reinterpret_cast<const H*>(mine + stage.at * stage_bytes + h_offset);
    // g = dy * w and x^ = h * r.
    const auto prepare = [&](uint32_t at, float(&g)[kE], float(&xhat)[kE]) {
      float weight[kE];
      P::Load(dy + at, g);
      P::Load(h + at, xhat);
      P::Load(w + at, weight);
#pragma unroll
      for (int e = 0; e < kE; ++e) {
        g[e] = cuda::Mul(g[e], weight[e]);
        xhat[e] = cuda::Mul(xhat[e], r);
      }
    };
    float acc[kE] = {};
#pragma unroll 8
    for (uint32_t at = kE * team.thread; at < width; at += 128) {
      float g[kE], xhat[kE];
      prepare(at, g, xhat);
#pragma unroll
      for (int e = 0; e < kE; ++e) acc[e] = cuda::Fma(g[e], xhat[e], acc[e]);
    }
    const float c = cuda::Mul(team.Tree(acc, turn), a.inverse);
    turn ^= 1;
    if (team.thread == 0) {
      // The stage before this one is filled anew once what it sent out has been read.
      const int64_t next = row + (stages - 1) * step;
      if (next < a.rows) {
        sm90::BulkWaitRead<0>();
        load(next, stage.at == 0 ? stages - 1 : stage.at - 1);
      }
    }
#pragma unroll 8
    for (uint32_t at = kE * team.thread; at < width; at += 128) {
      float g[kE], xhat[kE], add[kE];
      prepare(at, g, xhat);
      if constexpr (kExtra) P::Load(extra + at, add);
#pragma unroll
      for (int e = 0; e < kE; ++e) {
        const float u = cuda::Fma(-c, xhat[e], g[e]);
        g[e] = kExtra ? cuda::Fma(u, r, add[e]) : cuda::Mul(u, r);
      }
      P::Store(g, dy + at);
    }
    sm90::FenceProxyAsync();
    team.Sync();
    if (team.thread == 0) {
      BulkStore(static_cast<G*>(a.dx) + row * a.width, sm90::SharedAddress(dy), g_bytes);
      sm90::BulkCommit();
    }
    stage.Next(stages);
  }
  if (team.thread == 0) sm90::BulkWaitRead<0>();
}

// The weight's gradient: columns 256c .. 256c + 255 by a cluster of eight CTAs, CTA r with the
// token lanes 4r .. 4r + 3, two warps a lane and four columns a thread. Rows come by the copy
// engine, kRows of a lane a stage; at the end of a unit every CTA gets all lanes of 32 of the
// columns and adds them. REQUIRES: as rmsnorm_bulk_kernel, and a width that is a multiple of 256.
constexpr int kWeightColumns = 256, kWeightCluster = 8, kWeightLanes = 4;
constexpr int kWeightRows = 4, kWeightStages = 4;
template <typename H, typename G>
constexpr size_t WeightShared() {
  return kWeightLanes * kWeightStages * kWeightRows * kWeightColumns * (sizeof(H) + sizeof(G));
}
template <typename H, typename G>
__global__ void __cluster_dims__(kWeightCluster, 1, 1) __launch_bounds__(256)
    rmsnorm_bulk_weight_kernel(int64_t width, const H* h, const G* dy, const float* rstd, float* dw,
                               const __grid_constant__ cuda::UnitList units) {
  constexpr int kRows = kWeightRows, kStages = kWeightStages;
  constexpr uint32_t kHBytes = kWeightColumns * sizeof(H), kGBytes = kWeightColumns * sizeof(G);
  constexpr uint32_t kRow = kHBytes + kGBytes, kStage = kRows * kRow;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ __align__(8) uint64_t barriers[kWeightLanes * kStages];
  __shared__ float lanes[32][33];  // of 32 columns
  const int rank = static_cast<int>(sm90::ClusterRank());
  const int local = threadIdx.x / 64, thread = threadIdx.x % 64,
            token = kWeightLanes * rank + local;
  const int64_t column0 = int64_t{blockIdx.x / kWeightCluster} * kWeightColumns;
  BulkBarriers(barriers, kWeightLanes * kStages);
  sm90::ClusterSync();  // all of the cluster run before one writes to another
  const uint32_t barrier = sm90::SharedAddress(barriers + local * kStages);
  const uint32_t ring = sm90::SharedAddress(shared) + local * (kStages * kStage);
  const uint8_t* const mine = shared + local * (kStages * kStage);
  // Rows first, first + 32, .. of a unit that ends at `end`, by one thread.
  const auto load = [&](int64_t first, int64_t end, int stage) {
    const int count = static_cast<int>(min(int64_t{kRows}, (end - first + 31) / 32));
    sm90::BarrierArriveExpect(barrier + 8 * stage, count * kRow);
#pragma unroll
    for (int j = 0; j < kRows; ++j) {
      if (j >= count) break;
      const int64_t at = (first + 32 * j) * width + column0;
      const uint32_t to = ring + stage * kStage + j * kRow;
      BulkLoad(to, h + at, kHBytes, barrier + 8 * stage);
      BulkLoad(to + kHBytes, dy + at, kGBytes, barrier + 8 * stage);
    }
  };
  // The lane's threads' columns go to the CTA that adds them: 32 columns each.
  const uint32_t owner = static_cast<uint32_t>(thread / 8);
  const uint32_t to = sm90::MapToRank(sm90::SharedAddress(&lanes[token][thread % 8 * 4]), owner);
  const bool loads = thread < 32;  // the warp whose elected lane asks for rows
  Stage stage;
  for (int u = 0; u < units.count; ++u) {
    const int64_t begin = units.unit[u].begin, end = begin + units.unit[u].rows;
    const int64_t first = begin + token;
    if (loads && sm90::ElectOne()) {
      for (int n = 0; n < kStages && first + 32 * kRows * n < end; ++n)
        load(first + 32 * kRows * n, end, (stage.at + n) % kStages);
    }
    __syncwarp();
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    float next_r[kRows];
    const auto fetch = [&](int64_t row) {
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (row + 32 * j < end) next_r[j] = rstd[row + 32 * j];
      }
    };
    fetch(first);
    for (int64_t row = first; row < end; row += 32 * kRows) {
      float r[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) r[j] = next_r[j];
      fetch(row + 32 * kRows);
      sm90::BarrierWait(barrier + 8 * stage.at, stage.parity);
      const uint8_t* at = mine + stage.at * kStage;
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
        if (row + 32 * j >= end) break;
        float x[4], d[4];
        cuda::Widen4(cuda::LoadRaw4(reinterpret_cast<const H*>(at + j * kRow) + 4 * thread), x);
        cuda::Widen4(
            cuda::LoadRaw4(reinterpret_cast<const G*>(at + j * kRow + kHBytes) + 4 * thread), d);
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[e] = cuda::Fma(d[e], cuda::Mul(x[e], r[j]), acc[e]);
      }
      sm90::NamedBarrier(1 + local, 64);  // both warps have read the stage
      const int64_t later = row + 32 * kRows * kStages;
      if (loads && later < end && sm90::ElectOne()) load(later, end, stage.at);
      __syncwarp();
      stage.Next(kStages);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(to + 4 * e), "f"(acc[e]) : "memory");
    sm90::ClusterSync();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float sum = cuda::TreeOf32(lanes[lane][4 * warp + c]);
      const int64_t at = column0 + 32 * rank + 4 * warp + c;
      if (lane == 0) cuda::Put(cuda::Add(dw[at], sum), dw + at);
    }
    sm90::ClusterSync();
  }
}

}  // namespace tare::ops::rmsnorm
