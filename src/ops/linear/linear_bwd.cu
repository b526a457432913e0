// The Hopper kernels of dX, one for each entry of kDxConfigs.

#include <array>
#include <iterator>
#include <utility>

#include "ops/linear/gpu_gemm.cuh"
#include "ops/linear/linear_cuda.h"

namespace tare::ops::linear::gpu {
namespace {

template <int kIndex>
struct Dx {
  static constexpr GemmConfig kConfig = kDxConfigs[kIndex];
};

template <int... kIndex>
std::array<const void*, sizeof...(kIndex)> Kernels(std::integer_sequence<int, kIndex...>) {
  return {reinterpret_cast<const void*>(&linear_wgmma_kernel<Dx<kIndex>, GemmRuns>)...};
}

}  // namespace

const void* DxKernel(int config) {
  static const auto kernels = Kernels(std::make_integer_sequence<int, std::size(kDxConfigs)>());
  return kernels.at(config);
}

}  // namespace tare::ops::linear::gpu
