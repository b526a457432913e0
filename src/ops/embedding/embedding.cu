// embedding on CUDA. Forward: a block's threads copy one row. Backward: a block for each token that
// is the first of its id in the unit; it finds the others and sums them by lanes(32) over the unit.

#include "ops/cuda/eights.cuh"
#include "ops/embedding/embedding_cuda.h"

namespace tare::ops::embedding {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

template <typename E, typename T, int kGroup>
__global__ void __launch_bounds__(256)
    embedding_forward_kernel(int64_t rows, int64_t vocab, int64_t hidden, float scale,
                             const int32_t* ids, const void* table, void* out,
                             unsigned long long* refused) {
  const int64_t per_row = hidden / kGroup, total = rows * per_row;
  for (int64_t at = int64_t{blockIdx.x} * 256 + threadIdx.x; at < total;
       at += int64_t{gridDim.x} * 256) {
    const auto [row, group] = PlaceOf(at, per_row);
    const int64_t i = group * kGroup;
    const int64_t id = ids[row];
    const bool good = id >= 0 && id < vocab;
    if (!good && i == 0) Refuse(refused, Refusal::kEmbeddingId, row);
    T* to = static_cast<T*>(out) + row * hidden + i;
    const E* from = static_cast<const E*>(table) + (good ? id : 0) * hidden + i;
    float v[kGroup];
    if constexpr (kGroup == 8) {
      Load8(from, v);
    } else {
      v[0] = Widen(from[0]);
    }
#pragma unroll
    for (int e = 0; e < kGroup; ++e) {
      if (scale != 1.0f) v[e] = Mul(v[e], scale);
      if (!good) v[e] = 0.0f;
    }
    if constexpr (kGroup == 8) {
      Store8(v, to);
    } else {
      Put(v[0], to);
    }
  }
}

constexpr int kMostRows = 4096;  // of a unit
constexpr int kColumns = 128;

template <typename G>
__global__ void __launch_bounds__(kColumns)
    embedding_backward_kernel(int64_t vocab, int64_t hidden, float scale, const int32_t* ids,
                              const void* dout, float* dtable, int64_t begin, int rows,
                              unsigned long long* refused) {
  // The unit's tokens of this id by (lane, position), and where each lane's begin.
  __shared__ uint16_t token[kMostRows];
  __shared__ int lane_begin[33];
  __shared__ int lane_count[32];
  __shared__ int earlier;
  __shared__ float lanes[32][kColumns];
  const int mine = blockIdx.x;
  const int32_t id = ids[begin + mine];
  if (id < 0 || id >= vocab) {
    if (threadIdx.x == 0) Refuse(refused, Refusal::kEmbeddingId, begin + mine);
    return;
  }
  if (threadIdx.x == 0) earlier = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < mine; i += kColumns) {
    if (ids[begin + i] == id) earlier = 1;
  }
  __syncthreads();
  if (earlier != 0) return;
  // Lane l has positions l, l + 32, ...: thread l counts, then writes its own.
  if (threadIdx.x < 32) {
    int count = 0;
    for (int i = threadIdx.x; i < rows; i += 32) count += ids[begin + i] == id ? 1 : 0;
    lane_count[threadIdx.x] = count;
    __syncwarp();
    int first = 0;
    for (unsigned l = 0; l < threadIdx.x; ++l) first += lane_count[l];
    lane_begin[threadIdx.x] = first;
    if (threadIdx.x == 31) lane_begin[32] = first + count;
    for (int i = threadIdx.x; i < rows; i += 32) {
      if (ids[begin + i] == id) token[first++] = static_cast<uint16_t>(i);
    }
  }
  __syncthreads();
  const int count = lane_begin[32];
  for (int64_t c = threadIdx.x; c < hidden; c += kColumns) {
    const G* dy = static_cast<const G*>(dout) + begin * hidden + c;
    float* to = dtable + static_cast<int64_t>(id) * hidden + c;
    float sum;
    if (count == 1) {
      // The tree adds +0 from every other lane, which changes nothing: a lane is never -0.
      sum = Fma(Widen(dy[int64_t{token[0]} * hidden]), scale, 0.0f);
    } else {
      for (int l = 0; l < 32; ++l) {
        float acc = 0.0f;
        for (int k = lane_begin[l]; k < lane_begin[l + 1]; ++k)
          acc = Fma(Widen(dy[int64_t{token[k]} * hidden]), scale, acc);
        lanes[l][threadIdx.x] = acc;
      }
      for (int half = 16; half >= 1; half /= 2) {
        for (int l = 0; l < half; ++l)
          lanes[l][threadIdx.x] = Add(lanes[l][threadIdx.x], lanes[l + half][threadIdx.x]);
      }
      sum = lanes[0][threadIdx.x];
    }
    Put(Add(*to, sum), to);
  }
}

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  if (args.rows == 0) return Ok();
  const bool vec = p.hidden % 8 == 0 && Aligned16({args.table, args.out});
  return WithRowDType(p.table_dtype, [&](auto e) {
    return WithRowDType(p.dtype, [&](auto t) -> Status {
      using E = decltype(e);
      using T = decltype(t);
      const unsigned grid = GridFor(args.rows * p.hidden / (vec ? 8 : 1), 256, int64_t{1} << 30);
      if (vec) {
        embedding_forward_kernel<E, T, 8><<<grid, 256, 0, Stream(ctx)>>>(
            args.rows, p.vocab, p.hidden, p.scale, args.ids, args.table, args.out, refused);
      } else {
        embedding_forward_kernel<E, T, 1><<<grid, 256, 0, Stream(ctx)>>>(
            args.rows, p.vocab, p.hidden, p.scale, args.ids, args.table, args.out, refused);
      }
      return Launched();
    });
  });
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  TARE_RETURN_IF_ERROR(CheckDeviceRows("embedding", args.rows));
  return WithRowDType(p.grad_dtype, [&](auto g) -> Status {
    for (const TokenUnit& unit : args.units) {
      embedding_backward_kernel<decltype(g)>
          <<<static_cast<unsigned>(unit.rows), kColumns, 0, Stream(ctx)>>>(
              p.vocab, p.hidden, p.scale, args.ids, args.dout, args.dtable, unit.begin,
              static_cast<int>(unit.rows), refused);
      TARE_RETURN_IF_ERROR(Launched());
    }
    return Ok();
  });
}

}  // namespace tare::ops::embedding
