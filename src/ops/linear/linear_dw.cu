// The Hopper kernels of dW, one for each entry of kDwConfigs.

#include <array>
#include <iterator>
#include <utility>

#include "ops/linear/gpu_gradient.cuh"
#include "ops/linear/linear_cuda.h"

namespace tare::ops::linear::gpu {
namespace {

template <int kIndex>
struct Dw {
  static constexpr GemmConfig kConfig = kDwConfigs[kIndex];
};

template <int... kIndex>
std::array<const void*, sizeof...(kIndex)> Kernels(std::integer_sequence<int, kIndex...>) {
  return {reinterpret_cast<const void*>(&linear_gradient_kernel<Dw<kIndex>>)...};
}

}  // namespace

const void* DwKernel(int config) {
  static const auto kernels = Kernels(std::make_integer_sequence<int, std::size(kDwConfigs)>());
  return kernels.at(config);
}

}  // namespace tare::ops::linear::gpu
