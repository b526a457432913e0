// The last step of decode: the splits of a run's rows, which the kernels of attention_decode.cu and
// attention_decode_cluster.cu left as parts, are joined in ascending order.

#include <algorithm>

#include "ops/attention/attention_decode.cuh"
#include "ops/cuda/cluster.cuh"
#include "ops/cuda/sm90.cuh"
#include "tensor/cuda_status.h"

namespace tare::ops::attention::gpu {
namespace {

constexpr int kMostSplits = 64;  // that are under way at once

// A thread a head element, a CTA `rows` rows of one token. All parts are on their way before the
// first is used; the references are joined by a scan over lanes (a maximum has no order), which
// makes the factors of 32 splits at once, so that the chain over splits is one of multiply-adds
// alone. More than one row only where all their parts fit.
template <int kD>
__global__ void __launch_bounds__(kD)
    attention_combine_kernel(const __grid_constant__ Forward f, int rows, int capacity) {
  extern __shared__ __align__(16) uint8_t shared[];
  // Of each split: a and b of its joining, its l, and the reference after it.
  auto* factors = reinterpret_cast<float4*>(shared);
  auto* parts = reinterpret_cast<float*>(factors + capacity);  // [capacity][kD]
  constexpr int kWarps = kD / 32;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const auto rows_of = [&](int r) {
    return BlocksOf(f, f.runs[r]) == 0 ? 0 : static_cast<int>(f.runs[r].q_rows) * f.q_heads;
  };
  const Place place = Locate(f.num_runs, static_cast<int>(blockIdx.x) * rows, rows_of);
  Run run = {};
  int splits = 0, before = 0;  // units of the runs before
  if (place.run >= 0) {
    run = f.runs[place.run];
    splits = SplitsOf(f, run);
#pragma unroll 1
    for (int i = lane; i < place.run; i += 32) before += UnitsOf(f, f.runs[i]);
    if (place.run > 0) before = __reduce_add_sync(0xffffffff, before);
  }
  const int token = Divide(place.index, f.by_q_heads), head0 = place.index - token * f.q_heads;
  const int slot_step = f.kv_heads * kDecodeRows;
  // Where the part of a row's first split stands.
  const auto first_slot = [&](int row) {
    const int head = head0 + row, kv_head = Divide(head, f.by_group);
    const int flat = token * f.group + head - kv_head * f.group;
    return (static_cast<int64_t>(before + flat / kDecodeRows * splits) * f.kv_heads + kv_head) *
               kDecodeRows +
           flat % kDecodeRows;
  };
  // Every thread, so that this kernel never ends before the one whose parts it reads.
  sm90::WaitForDependency();
  if (splits <= 1) return;
  float r = -kInfinity, l = 0.0f, o = 0.0f;
#pragma unroll 1
  for (int s0 = 0; s0 < splits; s0 += capacity) {
    const int count = min(capacity, splits - s0);
    constexpr int kPieces = kD / 4, kAtOnce = kD / kPieces;
    if (s0 > 0) __syncthreads();  // those before are read
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      const int64_t slot = first_slot(row) + static_cast<int64_t>(s0) * slot_step;
#pragma unroll 4
      for (int s = thread / kPieces; s < count; s += kAtOnce) {
        sm90::CopyAsync16(
            sm90::SharedAddress(parts + (row * count + s) * kD + thread % kPieces * 4),
            f.part_o + (slot + static_cast<int64_t>(s) * slot_step) * kD + thread % kPieces * 4,
            16);
      }
    }
    sm90::CopyCommit();
    // A warp takes every kWarps-th row, or lot of 32 splits of the only row: it scans the lots
    // before too.
    const int lots = (count + 31) / 32;
#pragma unroll 1
    for (int turn = warp; turn < rows * lots; turn += kWarps) {
      const int row = rows > 1 ? turn : 0, own = turn - row;
      const int64_t slot = first_slot(row) + static_cast<int64_t>(s0) * slot_step;
      float past = r;
#pragma unroll 1
      for (int lot = 0; lot <= own; ++lot) {
        const int s = lot * 32 + lane;
        float2 rl = make_float2(-kInfinity, 0.0f);
        if (s < count)
          rl = *reinterpret_cast<const float2*>(f.part_rl +
                                                2 * (slot + static_cast<int64_t>(s) * slot_step));
        float top = rl.x;
#pragma unroll 1
        for (int step = 1; step < min(count, 32); step *= 2) {
          const float left = __shfl_up_sync(0xffffffff, top, step);
          if (lane >= step) top = numerics::MaxOf(left, top);
        }
        top = numerics::MaxOf(past, top);
        float from = __shfl_up_sync(0xffffffff, top, 1);
        if (lane == 0) from = past;
        past = __shfl_sync(0xffffffff, top, 31);
        if (s < count && lot == own) {
          float a = 1.0f, b = 1.0f;
#pragma unroll 1
          for (int side = 0; side < 2; ++side) {
            a = b;
            if (top != -kInfinity) b = RescaleReference(side == 0 ? from : rl.x, top);
          }
          factors[row * count + s] = make_float4(a, b, rl.y, top);
        }
      }
    }
    sm90::CopyWait<0>();
    __syncthreads();
#pragma unroll 1
    for (int row = 0; row < rows; ++row) {
      if (row > 0) l = o = 0.0f;
#pragma unroll 4
      for (int s = 0; s < count; ++s) {
        const float4 factor = factors[row * count + s];
        l = __fmaf_rn(factor.z, factor.y, __fmul_rn(l, factor.x));
        o = __fmaf_rn(parts[(row * count + s) * kD + thread], factor.y, __fmul_rn(o, factor.x));
        r = factor.w;
      }
      if (s0 + count < splits) break;
      const int head = head0 + row;
      const RowFactors end = EndFactors(r, l, f.sink, head);
      if (f.sink != nullptr) o = __fmul_rn(o, end.f);
      static_cast<__nv_bfloat16*>(
          f.out)[(run.q_begin + token) * f.out_stride + static_cast<int64_t>(head) * kD + thread] =
          __float2bfloat16_rn(__fadd_rn(__fmul_rn(o, end.inverse), 0.0f));
      if (f.lse2 != nullptr && thread == 0)
        f.lse2[(run.q_begin + token) * f.q_heads + head] = EndLse2(r, l);
    }
  }
}

template <int kD>
Status Launch(const Forward& f, int64_t total, cudaStream_t stream) {
  // Many rows: four a CTA, which are found once and need fewer CTAs beside those of the kernel
  // before.
  const int each = total >= 1024 && f.q_heads % 4 == 0 && f.most_splits <= 16 ? 4 : 1;
  const int capacity = std::clamp(each * f.most_splits, 1, kMostSplits);
  // It may start beside the last splits: it waits for them itself.
  cudaLaunchAttribute serialization = {};
  serialization.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  serialization.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(total / each));
  config.blockDim = dim3(kD);
  config.dynamicSmemBytes = static_cast<size_t>(capacity) * (kD * 4 + 16);
  config.stream = stream;
  config.attrs = &serialization;
  config.numAttrs = 1;
  TARE_CUDA_RETURN_IF_ERROR(
      cudaLaunchKernelEx(&config, attention_combine_kernel<kD>, f, each, capacity));
  return Ok();
}

}  // namespace

Status LaunchDecodeCombine(const Forward& f, int64_t rows, StreamHandle stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  return f.head_dim == 64 ? Launch<64>(f, rows, s) : Launch<128>(f, rows, s);
}

}  // namespace tare::ops::attention::gpu
