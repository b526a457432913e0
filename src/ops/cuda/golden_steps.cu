#include "ops/cuda/golden_steps.h"
#include "ops/cuda/sm90.cuh"
#include "tensor/cuda_status.h"

namespace tare::ops::cuda {
namespace {

using numerics::MmaType;

#define TARE_GOLDEN_STEP(shape, types, transposed)                 \
  asm volatile("wgmma.mma_async.sync.aligned." shape ".f32." types \
               " {%0, %1, %2, %3}, %4, %5, 1, 1, 1" transposed ";" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])    \
               : "l"(a), "l"(b))
template <MmaType kType>
__device__ __forceinline__ void Step(float (&d)[4], uint64_t a, uint64_t b) {
  if constexpr (kType == MmaType::kBF16) TARE_GOLDEN_STEP("m64n8k16", "bf16.bf16", ", 0, 0");
  if constexpr (kType == MmaType::kF16) TARE_GOLDEN_STEP("m64n8k16", "f16.f16", ", 0, 0");
  if constexpr (kType == MmaType::kE4M3) TARE_GOLDEN_STEP("m64n8k32", "e4m3.e4m3", "");
  if constexpr (kType == MmaType::kE5M2) TARE_GOLDEN_STEP("m64n8k32", "e5m2.e5m2", "");
}
#undef TARE_GOLDEN_STEP

// Rows of 32 bytes into rows of 128 in the swizzle of the matrix unit.
__device__ void Stage(const uint8_t* from, int rows, uint8_t* to) {
  for (int i = threadIdx.x; i < rows * 2; i += 128) {
    const int row = i / 2, chunk = i % 2;
    *reinterpret_cast<uint4*>(to + row * 128 + (chunk ^ (row % 8)) * 16) =
        *reinterpret_cast<const uint4*>(from + row * 32 + chunk * 16);
  }
}

template <MmaType kType>
__global__ void __launch_bounds__(128)
    golden_steps_kernel(const void* a_, const void* b_, const float* c, float* instruction,
                        float* function) {
  using T = typename numerics::MmaStorage<kType>::Type;
  constexpr int kK = 32 / sizeof(T);
  __shared__ __align__(1024) uint8_t a_tile[64 * 128];
  __shared__ __align__(1024) uint8_t b_tile[8 * 128];
  const int64_t tile = blockIdx.x;
  const T* a = static_cast<const T*>(a_) + tile * 64 * kK;
  const T* b = static_cast<const T*>(b_) + tile * 8 * kK;
  Stage(reinterpret_cast<const uint8_t*>(a), 64, a_tile);
  Stage(reinterpret_cast<const uint8_t*>(b), 8, b_tile);
  sm90::FenceProxyAsync();
  __syncthreads();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4,
            column = 2 * (lane % 4);
  const auto at = [&](int e) { return tile * 512 + (row + 8 * (e / 2)) * 8 + column + e % 2; };
  float d[4];
  for (int e = 0; e < 4; ++e) d[e] = c[at(e)];
  sm90::PinRegisters(d);
  sm90::WgmmaFence();
  Step<kType>(d, sm90::DescriptorKMajor(sm90::SharedAddress(a_tile)),
              sm90::DescriptorKMajor(sm90::SharedAddress(b_tile)));
  sm90::WgmmaCommit();
  sm90::WgmmaWait<0>();
  sm90::PinRegisters(d);
  for (int e = 0; e < 4; ++e) instruction[at(e)] = d[e];
  for (int i = threadIdx.x; i < 512; i += 128)
    function[tile * 512 + i] =
        numerics::Sm90Step<kType>(a + i / 8 * kK, b + i % 8 * kK, c[tile * 512 + i]);
}

}  // namespace

Status LaunchGoldenSteps(MmaType type, int64_t tiles, const void* a, const void* b, const float* c,
                         float* instruction, float* function) {
  const auto grid = static_cast<unsigned>(tiles);
  switch (type) {
    case MmaType::kBF16:
      golden_steps_kernel<MmaType::kBF16><<<grid, 128>>>(a, b, c, instruction, function);
      break;
    case MmaType::kF16:
      golden_steps_kernel<MmaType::kF16><<<grid, 128>>>(a, b, c, instruction, function);
      break;
    case MmaType::kE4M3:
      golden_steps_kernel<MmaType::kE4M3><<<grid, 128>>>(a, b, c, instruction, function);
      break;
    case MmaType::kE5M2:
      golden_steps_kernel<MmaType::kE5M2><<<grid, 128>>>(a, b, c, instruction, function);
      break;
  }
  TARE_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  return Ok();
}

}  // namespace tare::ops::cuda
