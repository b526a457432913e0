// The Hopper kernels of dX and dW, one for each entry of kDxConfigs and kDwConfigs.

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
template <int kIndex>
struct Dw {
  static constexpr GemmConfig kConfig = kDwConfigs[kIndex];
};

template <template <int> class Tag, int... kIndex>
std::array<const void*, sizeof...(kIndex)> Kernels(std::integer_sequence<int, kIndex...>) {
  return {reinterpret_cast<const void*>(&linear_wgmma_kernel<Tag<kIndex>, GemmRuns>)...};
}

}  // namespace

const void* DxKernel(int config) {
  static const auto kernels = Kernels<Dx>(std::make_integer_sequence<int, std::size(kDxConfigs)>());
  return kernels.at(config);
}

const void* DwKernel(int config) {
  static const auto kernels = Kernels<Dw>(std::make_integer_sequence<int, std::size(kDwConfigs)>());
  return kernels.at(config);
}

}  // namespace tare::ops::linear::gpu
