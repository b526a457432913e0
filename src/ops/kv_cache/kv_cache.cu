// kv_cache on CUDA: the rows of K and V copied into their pages, bit for bit.

#include "ops/cuda/rows.cuh"
#include "ops/kv_cache/kv_cache.h"
#include "tensor/convert.h"

namespace tare::ops::kv_cache {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

struct RunList {
  static constexpr int kMost = 120;
  int count;
  struct {
    int64_t begin, position;
    int32_t rows, block_row;
    int64_t first;  // rows of the runs before
  } run[kMost];
};

struct KernelArgs {
  const void *k, *v;
  int64_t k_stride, v_stride, width;  // elements
  const int32_t* block_table;
  int64_t max_pages, num_pages, page_size;
  void *k_pages, *v_pages;
  int32_t* nonfinite;
  int kind;         // 0: bf16, 1: f16, 2: f32; read for the planted fault alone
  bool local, fp8;  // planted faults: positions from the chunk's start, values through e4m3
};

template <typename Word>
__device__ __forceinline__ bool NonFinite(Word v, uint32_t mask) {
  return (static_cast<uint32_t>(v) & mask) == mask;
}

// The bits of a value of one of three dtypes after a rounding to e4m3: the planted fault.
__device__ uint32_t ThroughE4m3(uint32_t bits, int kind) {
  const float v = kind == 0   ? __uint_as_float(bits << 16)
                  : kind == 1 ? F16ToF32(static_cast<uint16_t>(bits))
                              : __uint_as_float(bits);
  const float rounded = E4m3ToF32(F32ToE4m3(v));
  if (kind == 2) return __float_as_uint(rounded);
  if (kind == 0) return Bf16Bits(rounded);
  return ConvertFloatBits<DType::kF32, DType::kF16>(__float_as_uint(rounded),
                                                    Fp8Overflow::kNonFinite);
}

// Word: uint16_t for bf16 and f16, uint32_t for f32; `mask` its exponent bits. kGroup words at
// once.
template <typename Word, typename Group>
__global__ void __launch_bounds__(256)
    kv_cache_kernel(const __grid_constant__ KernelArgs a, const __grid_constant__ RunList runs,
                    int64_t rows, uint32_t mask) {
  constexpr int kGroup = sizeof(Group) / sizeof(Word);
  const int64_t per_row = a.width / kGroup, total = 2 * rows * per_row;
  bool bad = false;
  for (int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x; at < total;
       at += int64_t{gridDim.x} * 256) {
    const auto [row2, in_row] = PlaceOf(at, per_row);
    const int64_t i = in_row * kGroup;
    const bool is_v = row2 >= rows;
    const int64_t row = is_v ? row2 - rows : row2;
    int low = 0, high = runs.count - 1;  // the run that holds this row
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (runs.run[middle].first <= row) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t in_run = row - runs.run[low].first;
    const int64_t token = runs.run[low].begin + in_run;
    const int64_t key = (a.local ? 0 : runs.run[low].position) + in_run;
    const int64_t page = a.block_table[runs.run[low].block_row * a.max_pages + key / a.page_size];
    if (page < 0 || page >= a.num_pages) continue;
    const Word* from =
        static_cast<const Word*>(is_v ? a.v : a.k) + token * (is_v ? a.v_stride : a.k_stride) + i;
    Word* to = static_cast<Word*>(is_v ? a.v_pages : a.k_pages) +
               (page * a.page_size + key % a.page_size) * a.width + i;
    const Group value = *reinterpret_cast<const Group*>(from);
    Word words[kGroup];
    memcpy(words, &value, sizeof(value));
#pragma unroll
    for (int e = 0; e < kGroup; ++e) bad |= NonFinite(words[e], mask);
    if (a.fp8) {
#pragma unroll
      for (int e = 0; e < kGroup; ++e) to[e] = static_cast<Word>(ThroughE4m3(words[e], a.kind));
      continue;
    }
    *reinterpret_cast<Group*>(to) = value;
  }
  if (bad && a.nonfinite != nullptr) *a.nonfinite = 1;
}

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& args) {
  const int64_t width = p.kv_heads * p.head_dim, size = SizeOf(p.dtype);
  const KernelArgs a = {args.k,
                        args.v,
                        args.k_stride == 0 ? width : args.k_stride,
                        args.v_stride == 0 ? width : args.v_stride,
                        width,
                        args.block_table,
                        args.max_pages,
                        args.num_pages,
                        args.page_size,
                        args.k_pages,
                        args.v_pages,
                        args.nonfinite_flag,
                        p.dtype == DType::kBF16  ? 0
                        : p.dtype == DType::kF16 ? 1
                                                 : 2,
                        fault::Active(kChunkLocalPosition, ctx.side),
                        fault::Active(kWriteFp8, ctx.side)};
  const auto aligned = [](const void* q) { return reinterpret_cast<uintptr_t>(q) % 16 == 0; };
  const int64_t group = 16 / size;
  const bool vec = width % group == 0 && a.k_stride % group == 0 && a.v_stride % group == 0 &&
                   aligned(a.k) && aligned(a.v) && aligned(a.k_pages) && aligned(a.v_pages);
  const uint32_t mask = p.dtype == DType::kF32    ? 0x7f800000u
                        : p.dtype == DType::kBF16 ? 0x7f80u
                                                  : 0x7c00u;
  for (size_t at = 0; at < args.runs.size();) {
    RunList list;
    list.count = 0;
    int64_t rows = 0;
    for (; at < args.runs.size() && list.count < RunList::kMost; ++at) {
      const attention::Run& r = args.runs[at];
      if (r.q_rows == 0) continue;
      list.run[list.count++] = {r.q_begin, r.position, static_cast<int32_t>(r.q_rows),
                                static_cast<int32_t>(r.block_row), rows};
      rows += r.q_rows;
    }
    if (rows == 0) continue;
    const auto run = [&](auto* kernel, int64_t words) {
      kernel<<<GridFor(2 * rows * width / words, 256, int64_t{1} << 30), 256, 0, Stream(ctx)>>>(
          a, list, rows, mask);
      return Launched();
    };
    if (size == 4) {
      TARE_RETURN_IF_ERROR(vec ? run(&kv_cache_kernel<uint32_t, uint4>, 4)
                               : run(&kv_cache_kernel<uint32_t, uint32_t>, 1));
    } else {
      TARE_RETURN_IF_ERROR(vec ? run(&kv_cache_kernel<uint16_t, uint4>, 8)
                               : run(&kv_cache_kernel<uint16_t, uint16_t>, 1));
    }
  }
  return Ok();
}

}  // namespace tare::ops::kv_cache
