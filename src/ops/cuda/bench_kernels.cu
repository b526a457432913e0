#include "ops/cuda/bench_kernels.h"
#include "tensor/cuda_status.h"

namespace tare::ops::cuda {
namespace {

__global__ void __launch_bounds__(512)
    read_all_kernel(const uint4* data, size_t count, uint32_t* sink) {
  uint32_t folded = 0;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
#pragma unroll 4
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const uint4 v = data[i];
    folded ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (folded == 0x9E3779B9u) *sink = folded;  // keeps the loads; practically never true
}

__global__ void __launch_bounds__(512) copy_kernel(const uint4* from, uint4* to, size_t count) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j * stride < count) v[j] = from[i + j * stride];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j * stride < count) to[i + j * stride] = v[j];
    }
  }
}

__global__ void __launch_bounds__(256)
    count_differences_kernel(const uint16_t* a, const uint16_t* b, size_t words,
                             unsigned long long* count, unsigned long long* first) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += stride) {
    if (a[i] != b[i]) {
      atomicAdd(count, 1ull);
      atomicMin(first, static_cast<unsigned long long>(i));
    }
  }
}

}  // namespace

Status LaunchReadAll(const void* data, size_t bytes, uint32_t* sink, StreamHandle stream) {
  read_all_kernel<<<132 * 4, 512, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(data), bytes / 16, sink);
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

Status LaunchCopy(const void* from, void* to, size_t bytes, StreamHandle stream) {
  copy_kernel<<<132 * 4, 512, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(from), static_cast<uint4*>(to), bytes / 16);
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

Status LaunchCountDifferences(const void* a, const void* b, size_t words, unsigned long long* count,
                              unsigned long long* first, StreamHandle stream) {
  count_differences_kernel<<<132 * 8, 256, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint16_t*>(a), static_cast<const uint16_t*>(b), words, count, first);
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

}  // namespace tare::ops::cuda
