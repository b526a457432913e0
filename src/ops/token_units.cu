#include "ops/token_units_cuda.h"

#include "ops/cuda/rows.cuh"

namespace tare::ops {
namespace {

__global__ void __launch_bounds__(256)
    sum_batch_segments_kernel(float* grad, int segments, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * 256) {
    for (int step = 1; step < segments; step *= 2) {
      for (int slot = 0; slot + step < segments; slot += 2 * step) {
        float* a = grad + slot * count + i;
        *a = numerics::Add(*a, grad[(slot + step) * count + i]);
      }
    }
  }
}

__global__ void __launch_bounds__(256) add_kernel(float* to, const float* from, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * 256) {
    to[i] = numerics::Add(to[i], from[i]);
  }
}

}  // namespace

Status AddCuda(const Ctx& ctx, float* to, const float* from, int64_t count) {
  if (count == 0) return Ok();
  add_kernel<<<cuda::GridFor(count, 256, int64_t{1} << 30), 256, 0, cuda::Stream(ctx)>>>(to, from,
                                                                                         count);
  return cuda::Launched();
}

Status SumBatchSegmentsCuda(const Ctx& ctx, float* grad, int32_t batch_segments, int64_t count) {
  sum_batch_segments_kernel<<<cuda::GridFor(count, 256), 256, 0, cuda::Stream(ctx)>>>(
      grad, batch_segments, count);
  return cuda::Launched();
}

}  // namespace tare::ops
