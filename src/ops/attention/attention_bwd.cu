// The Hopper kernels of the attention backward: bf16, sm90-mma, heads of 64 or 128, no soft cap.
//
// dK and dV: a CTA owns 128 keys for one query head and walks the rows that see them in blocks of
// 64, ascending; its two warpgroups hold 64 keys each. The scores stand transposed, so that P and
// dS are the matrix unit's A operand as they come out of its accumulator; dV's product runs while
// dS is made. A warp beside the loading one brings the rows' lse2 and delta to shared memory. The
// warpgroups take turns at P and dS (hardware barriers 3 and 4), here and in dQ. The sums of one
// head go to memory in f32 (after every cut of the contract); a second kernel adds the heads of a
// group in order. dQ: a CTA owns 128 rows of one query head, its warpgroups 64 each, and walks the
// keys in tiles of 128, ascending. P and dS are computed twice: once in each kernel. Nothing is
// added by arrival.

#include <type_traits>

#include "ops/attention/attention_gpu.cuh"
#include "ops/cuda/descriptors.cuh"
#include "ops/cuda/sm90.cuh"
#include "ops/cuda/tensor_map.h"
#include "ops/cuda/wgmma.cuh"
#include "tensor/cuda_status.h"

namespace tare::ops::attention::gpu {
namespace {

constexpr int kThreads = 3 * 128;
constexpr int kKeys = kBackwardKeys;
constexpr int kRows = 64;      // rows of a step of dK and dV
constexpr int kKeyStages = 4;  // of (Q, dO) in the kernel of dK and dV
// Slots of the rows' lse2 and delta there: two rounds of stages. All threads read them, and free a
// round at a time.
constexpr int kValueSlots = 2 * kKeyStages;
constexpr int kRowStages = 2;  // of K and of V in the kernel of dQ

template <int kD>
struct Layout {
  static constexpr int kChunks = kD / 64;
  static constexpr int kRowTile = kChunks * kRows * 128;  // bytes of 64 rows of one operand
  static constexpr int kKeyTile = kChunks * kKeys * 128;  // bytes of 128 keys of one operand
  // dK and dV: K, V, then stages of (Q, dO). dQ: Q and dO of both warpgroups, then stages of (K,
  // V).
  static constexpr int kFixed = 2 * kKeyTile;
  static constexpr int kKeyStage = 2 * kRowTile;
  static constexpr int kRowStage = 2 * kKeyTile;
  static constexpr int kRowZero = kFixed + kRowStages * kRowStage;  // +0: kKeyTile of them
  static constexpr int kValueSlot = 2 * kRows * 4;                  // lse2, then delta
  static constexpr int kValues = kFixed + kKeyStages * kKeyStage;
  static constexpr int kKeyBarriers = kValues + kValueSlots * kValueSlot;
  static constexpr int kRowBarriers = kRowZero + kKeyTile;
  static constexpr int kRoundBarriers = kKeyBarriers + (1 + 2 * kKeyStages) * 8;
  static constexpr int kKeyBytes = 1024 + kRoundBarriers + 2 * 8;
  static constexpr int kRowBytes = 1024 + kRowBarriers + (1 + 4 * kRowStages) * 8;
  static_assert(kRowBytes <= 232448);
};

template <int kStages>
struct Stage {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void Next() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// BackwardProbability with the clamp as one instruction.
__device__ __forceinline__ float FastProbability(float s, float c, float lse2) {
  float x = __fmaf_rn(s, c, -lse2);
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-125.0f));
  const float t = __fadd_rn(x, 12583039.0f);
  const float f = __fsub_rn(x, __fsub_rn(t, 12583039.0f));
  float p = __fmaf_rn(0x1.c2a254p-5f, f, 0x1.f00c4cp-3f);
  p = __fmaf_rn(p, f, 0x1.62f5fap-1f);
  p = __fmaf_rn(p, f, 1.0f);
  return __fmul_rn(p, __int_as_float(__float_as_int(t) << 23));
}

// +0 over `bytes` of shared memory, by the whole CTA.
__device__ __forceinline__ void ZeroBytes(uint32_t at, int bytes) {
  for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += kThreads * 16)
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at + i), "r"(0) : "memory");
  sm90::FenceProxyAsync();
}

// +0 over rows [first, count) of a tile of `count` rows.
template <int kD>
__device__ __forceinline__ void ZeroRows(uint32_t tile, int first, int count, int thread) {
  for (int i = first * 8 + thread; i < count * 8; i += 128) {
#pragma unroll
    for (int chunk = 0; chunk < kD / 64; ++chunk) {
      asm volatile(
          "st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(tile + chunk * (count * 128) + i * 16),
          "r"(0)
          : "memory");
    }
  }
}

// d = a b^T over the head: a has 64 rows of a tile of a_rows, b has kN.
template <int kD, int kN>
__device__ __forceinline__ void IssueProduct(float (&d)[kN / 2], uint32_t a, int a_rows,
                                             uint32_t b) {
  const uint32_t a_low = sm90::DescriptorLow(a), b_low = sm90::DescriptorLow(b);
#pragma unroll
  for (int step = 0; step < kD / 16; ++step) {
    const uint64_t left = sm90::Descriptor(a_low, (step / 4) * (a_rows * 128) + (step % 4) * 32);
    const uint64_t right = sm90::Descriptor(b_low, (step / 4) * (kN * 128) + (step % 4) * 32);
    if (step == 0) {
      sm90::Wgmma<kN>::template StepClear<0, 0>(d, left, right);
    } else {
      sm90::Wgmma<kN>::template Step<0, 0>(d, left, right);
    }
  }
  sm90::WgmmaCommit();
}

// d += a b, a in registers (kK / 16 fragments), b a tile of kK rows read with its row as k.
template <int kD, int kK>
__device__ __forceinline__ void IssueSum(float (&d)[kD / 2], const uint32_t (&a)[kK / 16][4],
                                         uint32_t b) {
  const uint32_t b_low = sm90::DescriptorLow(b, kK * 128);
#pragma unroll
  for (int step = 0; step < kK / 16; ++step)
    sm90::Wgmma<kD>::template StepRegisters<1>(d, a[step], sm90::Descriptor(b_low, step * 2048));
}

template <int kK>
__device__ __forceinline__ void PackFragments(const float (&s)[kK / 2], uint32_t (&p)[kK / 16][4]) {
#pragma unroll
  for (int step = 0; step < kK / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) p[step][i] = PackBf16(s[8 * step + 2 * i], s[8 * step + 2 * i + 1]);
  }
}

struct Maps {
  CUtensorMap q, dout, k, v;  // boxes of 64 rows, 64 rows, 128 keys, 128 keys
};

// dK and dV -----------------------------------------------------------------------------------

// The values of a quad's columns: 8j + 2q and the next of each 8.
__device__ __forceinline__ void LoadValues(float (&v)[kRows / 4], uint32_t at) {
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j)
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(v[2 * j]), "=f"(v[2 * j + 1])
                 : "r"(at + 32 * j)
                 : "memory");
}

template <int kD>
__device__ __forceinline__ void KeySide(const Backward& b, const Run& run, int head, int key0,
                                        int row_end, uint32_t base, uint32_t barriers, int group) {
  using L = Layout<kD>;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  const int rows = static_cast<int>(run.q_rows);
  const int wg_key0 = key0 + 64 * group;
  const int own_key[2] = {wg_key0 + 16 * warp + lane / 4, wg_key0 + 16 * warp + lane / 4 + 8};
  const uint32_t k_at = base + group * 8192, v_at = k_at + L::kKeyTile;
  // Of this quad's columns.
  const uint32_t values = base + L::kValues + 8 * (lane % 4);
  float dk[kD / 2], dv[kD / 2];
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0.0f;
  bool stored = false;
  const auto store = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (own_key[half] >= rows) continue;
      const int64_t at = ((run.q_begin + own_key[half]) * b.q_heads + head) * kD + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kD / 8; ++j) {
        float2* to_k = reinterpret_cast<float2*>(b.head_k + at + 8 * j);
        float2* to_v = reinterpret_cast<float2*>(b.head_v + at + 8 * j);
        const float2 old_k = stored ? *to_k : make_float2(0.0f, 0.0f);
        const float2 old_v = stored ? *to_v : make_float2(0.0f, 0.0f);
        *to_k = make_float2(__fadd_rn(old_k.x, dk[4 * j + 2 * half]),
                            __fadd_rn(old_k.y, dk[4 * j + 2 * half + 1]));
        *to_v = make_float2(__fadd_rn(old_v.x, dv[4 * j + 2 * half]),
                            __fadd_rn(old_v.y, dv[4 * j + 2 * half + 1]));
      }
    }
    stored = true;
  };
  Stage<kKeyStages> stage;
  const uint32_t own_turn = 3 + group, other_turn = 4 - group;
  const auto release = [&] {
    if (thread == 0) sm90::BarrierArrive(barriers + 8 + (kKeyStages + stage.slot) * 8);
    if (stage.slot == kKeyStages - 1)
      sm90::BarrierArrive(base + L::kRoundBarriers + 8 * stage.parity);
    stage.Next();
  };
  if (group == 1) sm90::NamedBarrierArrive(own_turn - 1, 256);
  sm90::BarrierWait(barriers, 0);
  int row0 = key0;
  // Blocks in which no row sees a key of this warpgroup.
  for (; row0 + kRows <= wg_key0 && row0 < row_end; row0 += kRows) {
    sm90::BarrierWait(barriers + 8 + stage.slot * 8, stage.parity);
    sm90::NamedBarrier(own_turn, 256);
    sm90::NamedBarrierArrive(other_turn, 256);
    release();
  }
  // One block of rows. Only those at the edges of what the warpgroup's keys see are masked.
  const auto step = [&](auto masked) {
    constexpr bool kMasked = decltype(masked)::value;
    const uint32_t q = base + L::kFixed + stage.slot * L::kKeyStage, go = q + L::kRowTile;
    const uint32_t value = values + (stage.slot + kKeyStages * stage.parity) * L::kValueSlot;
    sm90::BarrierWait(barriers + 8 + stage.slot * 8, stage.parity);
    if (kMasked && rows - row0 < kRows) {
      ZeroRows<kD>(q, rows - row0, kRows, thread);
      ZeroRows<kD>(go, rows - row0, kRows, thread);
      sm90::FenceProxyAsync();
      sm90::NamedBarrier(1 + group, 128);
    }
    float s[kRows / 2], dp[kRows / 2], row_value[kRows / 4];
    sm90::WgmmaFence();
    IssueProduct<kD, kRows>(s, k_at, kKeys, q);
    IssueProduct<kD, kRows>(dp, v_at, kKeys, go);
    LoadValues(row_value, value);
    sm90::WgmmaWait<1>();
    sm90::PinRegisters(s);
    sm90::NamedBarrier(own_turn, 256);
    const auto mask = [&] {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) {
        const int row = row0 + 8 * (i / 4) + 2 * (lane % 4) + i % 2, key = own_key[i / 2 % 2];
        if (row >= rows || key > row || (b.window != 0 && key <= row - b.window)) s[i] = 0.0f;
      }
    };
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i)
      s[i] = FastProbability(s[i], b.c, row_value[i / 4 * 2 + i % 2]);
    if constexpr (kMasked) mask();
    LoadValues(row_value, value + kRows * 4);
    uint32_t p[kRows / 16][4], ds[kRows / 16][4];
    PackFragments<kRows>(s, p);
    sm90::WgmmaFence();
    IssueSum<kD, kRows>(dv, p, go);
    sm90::WgmmaCommit();
    sm90::WgmmaWait<1>();
    sm90::PinRegisters(dp);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i)
      s[i] = __fmul_rn(s[i], __fsub_rn(dp[i], row_value[i / 4 * 2 + i % 2]));
    if constexpr (kMasked) mask();  // 0 * NaN is not 0
    PackFragments<kRows>(s, ds);
    sm90::NamedBarrierArrive(other_turn, 256);
    sm90::WgmmaFence();
    IssueSum<kD, kRows>(dk, ds, q);
    sm90::WgmmaCommit();
    sm90::WgmmaWait<0>();
    sm90::PinRegisters(dv);
    sm90::PinRegisters(dk);
    release();
  };
  const int plain = wg_key0 + kRows;
  const int edge = min(rows, b.window == 0 ? rows : wg_key0 + b.window) - (kRows - 1);
  // Unit by unit: with the store in the loop over rows, ptxas moves both sums to other registers
  // and back in each of its turns.
  do {
    const int left = row_end - row0, unit = b.unit_rows - row0 % b.unit_rows;
    const int unit_end = unit < left ? row0 + unit : row_end;
    for (; row0 < min(unit_end, plain); row0 += kRows) step(std::true_type());
    for (; row0 < min(unit_end, edge); row0 += kRows) step(std::false_type());
    for (; row0 < unit_end; row0 += kRows) step(std::true_type());
    store();
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0.0f;
  } while (row0 < row_end);
}

// What one warp does beside the copies: lse2 and delta of each block of rows.
template <int kD>
__device__ __forceinline__ void LoadRowValues(const Backward& b, const Run& run, int head, int key0,
                                              int row_end, uint32_t base, uint32_t barriers) {
  using L = Layout<kD>;
  const int lane = static_cast<int>(threadIdx.x) % 32, rows = static_cast<int>(run.q_rows);
  const int64_t first = static_cast<int64_t>(head) * b.tokens + run.q_begin;
  Stage<kKeyStages> stage;
  Stage<2> round;
  stage.parity = round.parity = 1;  // every slot starts free
  for (int row0 = key0; row0 < row_end; row0 += kRows) {
    const uint32_t full = barriers + 8 + stage.slot * 8;
    const uint32_t to = base + L::kValues + (stage.slot + kKeyStages * round.slot) * L::kValueSlot;
    float v[4];  // past the last row: any number, those pairs are masked
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row0 + lane + 32 * (i % 2);
      v[i] = row < rows ? (i < 2 ? b.lse_t : b.delta)[first + row] : 0.0f;
    }
    sm90::BarrierWait(full + kKeyStages * 8, stage.parity);
    if (stage.slot == 0) sm90::BarrierWait(base + L::kRoundBarriers + round.slot * 8, round.parity);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm volatile("st.shared.f32 [%0], %1;" ::"r"(to + (lane + 32 * i) * 4), "f"(v[i]) : "memory");
    sm90::BarrierArrive(full);
    stage.Next();
    if (stage.slot == 0) round.Next();
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1)
    attention_dkdv_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Backward b) {
  using L = Layout<kD>;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (sm90::SharedAddress(shared) + 1023) / 1024 * 1024;
  const uint32_t barriers = base + L::kKeyBarriers;
  const int x = static_cast<int>(blockIdx.x);  // the first keys are seen by the most rows
  const int head = x % b.q_heads;
  const Place place = Locate(b.num_runs, x / b.q_heads,
                             [&](int r) { return (b.runs[r].q_rows + kKeys - 1) / kKeys; });
  if (place.run < 0) return;
  const Run run = b.runs[place.run];
  const int rows = static_cast<int>(run.q_rows), key0 = place.index * kKeys;
  const int row_end = b.window == 0 ? rows : min(rows, key0 + kKeys - 1 + b.window);
  if (threadIdx.x == 0) {
    sm90::BarrierInit(barriers, 1);
    for (int i = 0; i < kKeyStages; ++i) {
      sm90::BarrierInit(barriers + 8 + i * 8, 1 + 32);  // the copies and the values
      sm90::BarrierInit(barriers + 8 + (kKeyStages + i) * 8, 2);
    }
    for (int i = 0; i < 2; ++i) sm90::BarrierInit(base + L::kRoundBarriers + i * 8, 256);
    sm90::BarrierInitFence();
  }
  __syncthreads();
  if (threadIdx.x >= 128) {
    sm90::RegistersIncrease<240>();
    KeySide<kD>(b, run, head, key0, row_end, base, barriers,
                sm90::Uniform(static_cast<int>(threadIdx.x) / 128 - 1));
    return;
  }
  sm90::RegistersDecrease<24>();
  const int warp = sm90::Uniform(static_cast<int>(threadIdx.x) / 32);
  if (warp == 1) {
    LoadRowValues<kD>(b, run, head, key0, row_end, base, barriers);
  } else if (warp == 0 && sm90::ElectOne()) {
    const int kv_head = head / b.group;
    sm90::BarrierArriveExpect(barriers, 2 * L::kKeyTile);
    for (int chunk = 0; chunk < L::kChunks; ++chunk) {
      const int at = chunk * kKeys * 128, column = kv_head * kD + 64 * chunk,
                row = static_cast<int>(run.kv_begin) + key0;
      sm90::TensorLoad(base + at, &maps.k, barriers, column, row);
      sm90::TensorLoad(base + L::kKeyTile + at, &maps.v, barriers, column, row);
    }
    Stage<kKeyStages> stage;
    stage.parity = 1;
    for (int row0 = key0; row0 < row_end; row0 += kRows) {
      const uint32_t full = barriers + 8 + stage.slot * 8;
      const uint32_t to = base + L::kFixed + stage.slot * L::kKeyStage;
      sm90::BarrierWait(full + kKeyStages * 8, stage.parity);
      sm90::BarrierArriveExpect(full, L::kKeyStage);
      for (int chunk = 0; chunk < L::kChunks; ++chunk) {
        const int at = chunk * kRows * 128, column = head * kD + 64 * chunk,
                  row = static_cast<int>(run.q_begin) + row0;
        sm90::TensorLoad(to + at, &maps.q, full, column, row);
        sm90::TensorLoad(to + L::kRowTile + at, &maps.dout, full, column, row);
      }
      stage.Next();
    }
  }
  __syncwarp();
}

// One warp a key and KV head: the heads of the group ascending, then the scale and the rounding.
template <int kD>
__global__ void __launch_bounds__(128)
    attention_add_heads_kernel(const __grid_constant__ Backward b) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32;
  const int kv_head = static_cast<int>(item % b.kv_heads);
  const Place place = Locate(b.num_runs, static_cast<int>(item / b.kv_heads),
                             [&](int r) { return b.runs[r].q_rows; });
  if (place.run < 0) return;
  const Run run = b.runs[place.run];
  constexpr int kOwn = kD / 64;  // pairs
#pragma unroll
  for (int operand = 0; operand < 2; ++operand) {
    const float* from = (operand == 0 ? b.head_k : b.head_v) +
                        ((run.q_begin + place.index) * b.q_heads + kv_head * b.group) * kD;
    auto* to = static_cast<__nv_bfloat16*>(operand == 0 ? b.dk : b.dv) +
               (run.kv_begin + place.index) * (operand == 0 ? b.dk_stride : b.dv_stride) +
               static_cast<int64_t>(kv_head) * kD;
    float2 sum[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum[i] = make_float2(0.0f, 0.0f);
    for (int h = 0; h < b.group; ++h) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(from + h * kD + 64 * i + 2 * lane);
        sum[i].x = __fadd_rn(sum[i].x, x.x);
        sum[i].y = __fadd_rn(sum[i].y, x.y);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (operand == 0) {
        sum[i].x = __fmul_rn(sum[i].x, b.scale);
        sum[i].y = __fmul_rn(sum[i].y, b.scale);
      }
      *reinterpret_cast<uint32_t*>(to + 64 * i + 2 * lane) =
          PackBf16(__fadd_rn(sum[i].x, 0.0f), __fadd_rn(sum[i].y, 0.0f));
    }
  }
}

// dQ ------------------------------------------------------------------------------------------

template <int kD>
__device__ __forceinline__ void RowSide(const Backward& b, const Run& run, int head, int row0,
                                        int first, int last, uint32_t base, uint32_t barriers,
                                        int group) {
  using L = Layout<kD>;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, warp = thread / 32;
  const int rows = static_cast<int>(run.q_rows);
  const int wg_row0 = row0 + 64 * group;
  const uint32_t q = base + group * L::kRowTile, go = q + 2 * L::kRowTile;
  int own_row[2];
  float lse2[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    own_row[half] = wg_row0 + 16 * warp + lane / 4 + 8 * half;
    const int64_t at =
        static_cast<int64_t>(head) * b.tokens + run.q_begin + min(own_row[half], rows - 1);
    lse2[half] = b.lse_t[at];
    delta[half] = b.delta[at];
  }
  float dq[kD / 2];
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) dq[i] = 0.0f;
  Stage<kRowStages> stage;
  const uint32_t own_turn = 3 + group, other_turn = 4 - group;
  if (group == 1) sm90::NamedBarrierArrive(own_turn - 1, 256);
  sm90::BarrierWait(barriers, 0);
  float s[kKeys / 2], dp[kKeys / 2];
  uint32_t ds[kKeys / 16][4];
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) ds[step][i] = 0;
  }
  // What ds is multiplied with: the tile before, at first a tile of +0, which adds nothing.
  uint32_t sum_k = base + L::kRowZero, sum_empty = 0;
  const auto step = [&](int tile, auto masked) {
    constexpr bool kMasked = decltype(masked)::value;
    const int key0 = tile * kKeys;
    const uint32_t k = base + L::kFixed + stage.slot * L::kRowStage, v = k + L::kKeyTile;
    const uint32_t k_full = barriers + 8 + stage.slot * 32, v_full = k_full + 16;
    sm90::BarrierWait(k_full, stage.parity);
    if (kMasked && rows - key0 < kKeys) {
      ZeroRows<kD>(k, rows - key0, kKeys, thread);
      sm90::FenceProxyAsync();
      sm90::NamedBarrier(1 + group, 128);
    }
    // The sum over the tile before and the scores of this one queue together.
    sm90::WgmmaFence();
    IssueSum<kD, kKeys>(dq, ds, sum_k);
    sm90::WgmmaCommit();
    IssueProduct<kD, kKeys>(s, q, kRows, k);
    sm90::BarrierWait(v_full, stage.parity);
    sm90::WgmmaWait<1>();
    sm90::WgmmaFence();
    IssueProduct<kD, kKeys>(dp, go, kRows, v);
    if (sum_empty != 0 && thread == 0) sm90::BarrierArrive(sum_empty);
    sm90::WgmmaWait<1>();
    sm90::PinRegisters(s);
    sm90::NamedBarrier(own_turn, 256);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] = FastProbability(s[i], b.c, lse2[i / 2 % 2]);
    sm90::WgmmaWait<0>();
    sm90::PinRegisters(dp);
    sm90::PinRegisters(dq);
    if (thread == 0) sm90::BarrierArrive(v_full + 8);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) s[i] = __fmul_rn(s[i], __fsub_rn(dp[i], delta[i / 2 % 2]));
    if constexpr (kMasked) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        const int row = own_row[i / 2 % 2], key = key0 + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        if (key > row || (b.window != 0 && key <= row - b.window)) s[i] = 0.0f;
      }
    }
    PackFragments<kKeys>(s, ds);
    sm90::NamedBarrierArrive(other_turn, 256);
    sum_k = k;
    sum_empty = k_full + 8;
    stage.Next();
  };
  // Tiles that some row of the warpgroup does not see whole: at the window's edge and at the end.
  const int plain = b.window == 0 ? first : max(first, (wg_row0 + 63 - b.window + kKeys) / kKeys);
  const int edge = (wg_row0 + 1) / kKeys;
  int tile = first;
  for (; tile <= last && tile < plain; ++tile) step(tile, std::true_type());
  for (; tile < edge; ++tile) step(tile, std::false_type());
  for (; tile <= last; ++tile) step(tile, std::true_type());
  sm90::WgmmaFence();
  IssueSum<kD, kKeys>(dq, ds, sum_k);
  sm90::WgmmaCommit();
  sm90::WgmmaWait<0>();
  sm90::PinRegisters(dq);
#pragma unroll
  for (int i = 0; i < kD / 2; ++i) dq[i] = __fadd_rn(__fmul_rn(dq[i], b.scale), 0.0f);
  const int matrix_row = warp * 16 + lane % 8 + 8 * ((lane / 8) % 2);
#pragma unroll
  for (int j = 0; j < kD / 8; j += 2) {
    const float* x = dq + 4 * j;
    sm90::StoreMatrix4(
        q + (j / 8) * 8192 + matrix_row * 128 + (((j % 8 + lane / 16) ^ (lane % 8)) * 16),
        PackBf16(x[0], x[1]), PackBf16(x[2], x[3]), PackBf16(x[4], x[5]), PackBf16(x[6], x[7]));
  }
  sm90::NamedBarrier(1 + group, 128);
#pragma unroll
  for (int i = thread; i < 64 * kD / 8; i += 128) {
    const int row = i / (kD / 8), column = i % (kD / 8);
    if (wg_row0 + row >= rows) continue;
    uint32_t x[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(q + (column / 8) * 8192 + row * 128 + ((column % 8) ^ (row % 8)) * 16)
                 : "memory");
    auto* to = static_cast<__nv_bfloat16*>(b.dq) + (run.q_begin + wg_row0 + row) * b.dq_stride +
               static_cast<int64_t>(head) * kD + column * 8;
    StoreGlobal16(to, x);
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1)
    attention_dq_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Backward b) {
  using L = Layout<kD>;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (sm90::SharedAddress(shared) + 1023) / 1024 * 1024;
  const uint32_t barriers = base + L::kRowBarriers;
  const int x = static_cast<int>(gridDim.x) - 1 - static_cast<int>(blockIdx.x);
  const int head = x % b.q_heads;
  const Place place =
      Locate(b.num_runs, x / b.q_heads, [&](int r) { return (b.runs[r].q_rows + 127) / 128; });
  if (place.run < 0) return;
  const Run run = b.runs[place.run];
  const int rows = static_cast<int>(run.q_rows), row0 = place.index * 128;
  const int last = (min(rows, row0 + 128) - 1) / kKeys;
  const int first = b.window == 0 ? 0 : max(0, row0 - b.window + 1) / kKeys;
  if (threadIdx.x == 0) {
    sm90::BarrierInit(barriers, 1);
    // For each slot: K full, K empty, V full, V empty.
    for (int i = 0; i < 4 * kRowStages; ++i) sm90::BarrierInit(barriers + 8 + i * 8, 1 + i % 2);
    sm90::BarrierInitFence();
  }
  ZeroBytes(base + L::kRowZero, L::kKeyTile);
  __syncthreads();
  if (threadIdx.x >= 128) {
    sm90::RegistersIncrease<240>();
    RowSide<kD>(b, run, head, row0, first, last, base, barriers,
                sm90::Uniform(static_cast<int>(threadIdx.x) / 128 - 1));
    return;
  }
  sm90::RegistersDecrease<24>();
  if (__shfl_sync(0xffffffff, threadIdx.x / 32, 0) == 0 && sm90::ElectOne()) {
    const int kv_head = head / b.group;
    sm90::BarrierArriveExpect(barriers, 4 * L::kRowTile);
    for (int group = 0; group < 2; ++group) {
      for (int chunk = 0; chunk < L::kChunks; ++chunk) {
        const int at = group * L::kRowTile + chunk * kRows * 128, column = head * kD + 64 * chunk,
                  row = static_cast<int>(run.q_begin) + row0 + 64 * group;
        sm90::TensorLoad(base + at, &maps.q, barriers, column, row);
        sm90::TensorLoad(base + 2 * L::kRowTile + at, &maps.dout, barriers, column, row);
      }
    }
    Stage<kRowStages> stage;
    stage.parity = 1;
    for (int tile = first; tile <= last; ++tile) {
      for (int operand = 0; operand < 2; ++operand) {
        const uint32_t full = barriers + 8 + stage.slot * 32 + operand * 16;
        const uint32_t to = base + L::kFixed + stage.slot * L::kRowStage + operand * L::kKeyTile;
        sm90::BarrierWait(full + 8, stage.parity);
        sm90::BarrierArriveExpect(full, L::kKeyTile);
        for (int chunk = 0; chunk < L::kChunks; ++chunk) {
          sm90::TensorLoad(to + chunk * kKeys * 128, operand == 0 ? &maps.k : &maps.v, full,
                           kv_head * kD + 64 * chunk,
                           static_cast<int>(run.kv_begin) + tile * kKeys);
        }
      }
      stage.Next();
    }
  }
  __syncwarp();
}

template <int kD>
Status Launch(const Backward& b, int64_t kv_rows, int64_t blocks, int64_t keys,
              StreamHandle stream) {
  using L = Layout<kD>;
  Maps maps;
  const int64_t wide = static_cast<int64_t>(b.q_heads) * kD,
                narrow = static_cast<int64_t>(b.kv_heads) * kD;
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(b.q, b.tokens, wide, b.q_stride, kRows, &maps.q));
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(b.dout, b.tokens, wide, b.dout_stride, kRows, &maps.dout));
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(b.k, kv_rows, narrow, b.k_stride, kKeys, &maps.k));
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(b.v, kv_rows, narrow, b.v_stride, kKeys, &maps.v));
  static const cudaError_t prepared[] = {
      cudaFuncSetAttribute(attention_dkdv_kernel<kD>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           L::kKeyBytes),
      cudaFuncSetAttribute(attention_dq_kernel<kD>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           L::kRowBytes)};
  for (const cudaError_t error : prepared) TARE_CUDA_RETURN_IF_ERROR(error);
  const auto s = static_cast<cudaStream_t>(stream);
  const auto ctas = static_cast<unsigned>(blocks * b.q_heads);
  attention_dkdv_kernel<kD><<<ctas, kThreads, L::kKeyBytes, s>>>(maps, b);
  attention_add_heads_kernel<kD>
      <<<static_cast<unsigned>((keys * b.kv_heads + 3) / 4), 128, 0, s>>>(b);
  attention_dq_kernel<kD><<<ctas, kThreads, L::kRowBytes, s>>>(maps, b);
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

}  // namespace

bool CanBackward(const Params& p, Profile profile, const Backward& b, int64_t kv_rows) {
  if (profile != Profile::kSm90Mma || p.dtype != DType::kBF16 || p.softcap != 0.0f) return false;
  if ((p.head_dim != 64 && p.head_dim != 128) || b.unit_rows % kRows != 0) return false;
  const int64_t wide = p.q_heads * p.head_dim, narrow = p.kv_heads * p.head_dim;
  const auto writes = [](const void* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % 8 == 0;
  };
  return cuda::CanMap(b.q, b.tokens, wide, b.q_stride) &&
         cuda::CanMap(b.dout, b.tokens, wide, b.dout_stride) &&
         cuda::CanMap(b.k, kv_rows, narrow, b.k_stride) &&
         cuda::CanMap(b.v, kv_rows, narrow, b.v_stride) && writes(b.dq, b.dq_stride) &&
         writes(b.dk, b.dk_stride) && writes(b.dv, b.dv_stride);
}

Status LaunchBackward(const Backward& b, int64_t kv_rows, int64_t blocks, int64_t keys,
                      StreamHandle stream) {
  return b.head_dim == 64 ? Launch<64>(b, kv_rows, blocks, keys, stream)
                          : Launch<128>(b, kv_rows, blocks, keys, stream);
}

}  // namespace tare::ops::attention::gpu
