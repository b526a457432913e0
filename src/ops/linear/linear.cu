// The Hopper kernels of linear forward, one for each entry of kForwardConfigs.

#include <array>
#include <iterator>
#include <utility>

#include "ops/linear/gpu_gemm.cuh"
#include "ops/linear/linear_cuda.h"

namespace tare::ops::linear::gpu {
namespace {

template <int kIndex>
struct Forward {
  static constexpr GemmConfig kConfig = kForwardConfigs[kIndex];
};

template <int... kIndex>
std::array<const void*, sizeof...(kIndex)> Kernels(std::integer_sequence<int, kIndex...>) {
  return {reinterpret_cast<const void*>(&linear_wgmma_kernel<Forward<kIndex>, NoRuns>)...};
}

}  // namespace

const void* ForwardKernel(int config) {
  static const auto kernels =
      Kernels(std::make_integer_sequence<int, std::size(kForwardConfigs)>());
  return kernels.at(config);
}

}  // namespace tare::ops::linear::gpu
