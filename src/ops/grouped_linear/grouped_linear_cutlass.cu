// CUTLASS 4.2's grouped GEMM for Hopper (pointer arrays, tensor maps made on the device), in the
// three tiles that its own examples and profiler favour for bf16.

#include "ops/grouped_linear/grouped_linear_cutlass.h"

#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>

#include "tensor/cuda_status.h"

namespace tare::ops::grouped_linear {
namespace {

using cute::_1;
using cute::_128;
using cute::_2;
using cute::_256;
using cute::_64;
using cute::Shape;
using Element = cutlass::bfloat16_t;
using ProblemShape = cutlass::gemm::GroupProblemShape<Shape<int, int, int>>;
constexpr int kAlignment = 8;

struct Few {
  static constexpr const char* kName = "64x128x64 ping-pong";
  using Tile = Shape<_64, _128, _64>;
  using Cluster = Shape<_1, _1, _1>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};
struct Some {
  static constexpr const char* kName = "128x128x64 ping-pong, cluster 2x1";
  using Tile = Shape<_128, _128, _64>;
  using Cluster = Shape<_2, _1, _1>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};
struct Many {
  static constexpr const char* kName = "128x256x64 cooperative, cluster 2x1";
  using Tile = Shape<_128, _256, _64>;
  using Cluster = Shape<_2, _1, _1>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

template <class Config, bool kTransB>
struct Grouped {
  using LayoutA = cutlass::layout::RowMajor;
  using LayoutB =
      std::conditional_t<kTransB, cutlass::layout::RowMajor, cutlass::layout::ColumnMajor>;
  using LayoutD = cutlass::layout::RowMajor;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Config::Tile,
      typename Config::Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, void,
      LayoutD*, kAlignment, Element, LayoutD*, kAlignment, typename Config::Epilogue,
      cutlass::epilogue::fusion::LinearCombination<Element, float, void>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA*, kAlignment, Element,
      LayoutB*, kAlignment, float, typename Config::Tile, typename Config::Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      typename Config::Mainloop>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<
      cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue>>;
};

template <typename T>
Status Upload(const std::vector<T>& host, T** there) {
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(reinterpret_cast<void**>(there), host.size() * sizeof(T)));
  TARE_CUDA_RETURN_IF_ERROR(
      cudaMemcpy(*there, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return Ok();
}

Status Check(cutlass::Status status, const char* what) {
  if (status == cutlass::Status::kSuccess) return Ok();
  return Error(Code::kInternal, "CUTLASS {}: {}", what, cutlassGetStatusString(status));
}

template <class Config, bool kTransB>
Status Add(int64_t n, int64_t k, std::span<const cuda::CublasPeer::Group> groups,
           std::vector<CutlassCall>* calls) {
  using Gemm = typename Grouped<Config, kTransB>::Gemm;
  using StrideA = typename Gemm::GemmKernel::InternalStrideA;
  using StrideB = typename Gemm::GemmKernel::InternalStrideB;
  using StrideD = typename Gemm::GemmKernel::InternalStrideD;
  std::vector<typename ProblemShape::UnderlyingProblemShape> problems;
  std::vector<const Element*> a, b;
  std::vector<Element*> d;
  std::vector<StrideA> sa;
  std::vector<StrideB> sb;
  std::vector<StrideD> sd;
  const int ni = static_cast<int>(n), ki = static_cast<int>(k);
  for (const auto& g : groups) {
    if (g.m == 0) continue;
    const int m = static_cast<int>(g.m);
    problems.push_back({m, ni, ki});
    a.push_back(static_cast<const Element*>(g.a));
    b.push_back(static_cast<const Element*>(g.b));
    d.push_back(static_cast<Element*>(g.d));
    sa.push_back(cutlass::make_cute_packed_stride(StrideA{}, {m, ki, 1}));
    sb.push_back(cutlass::make_cute_packed_stride(StrideB{}, {ni, ki, 1}));
    sd.push_back(cutlass::make_cute_packed_stride(StrideD{}, {m, ni, 1}));
  }
  typename ProblemShape::UnderlyingProblemShape* problems_there = nullptr;
  const Element **a_there = nullptr, **b_there = nullptr;
  Element** d_there = nullptr;
  StrideA* sa_there = nullptr;
  StrideB* sb_there = nullptr;
  StrideD* sd_there = nullptr;
  TARE_RETURN_IF_ERROR(Upload(problems, &problems_there));
  TARE_RETURN_IF_ERROR(Upload(a, &a_there));
  TARE_RETURN_IF_ERROR(Upload(b, &b_there));
  TARE_RETURN_IF_ERROR(Upload(d, &d_there));
  TARE_RETURN_IF_ERROR(Upload(sa, &sa_there));
  TARE_RETURN_IF_ERROR(Upload(sb, &sb_there));
  TARE_RETURN_IF_ERROR(Upload(sd, &sd_there));
  cutlass::KernelHardwareInfo hardware;
  hardware.device_id = 0;
  hardware.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(0);
  typename Gemm::Arguments args{cutlass::gemm::GemmUniversalMode::kGrouped,
                                {static_cast<int>(problems.size()), problems_there, nullptr},
                                {a_there, sa_there, b_there, sb_there},
                                {{}, nullptr, nullptr, d_there, sd_there},
                                hardware};
  args.epilogue.thread.alpha = 1.0f;
  args.epilogue.thread.beta = 0.0f;
  const size_t bytes = Gemm::get_workspace_size(args);
  void* workspace = nullptr;
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&workspace, bytes + 256));
  auto gemm = std::make_shared<Gemm>();
  TARE_RETURN_IF_ERROR(Check(gemm->can_implement(args), Config::kName));
  TARE_RETURN_IF_ERROR(Check(gemm->initialize(args, workspace), Config::kName));
  calls->push_back(
      {Config::kName, [gemm](cudaStream_t stream) { return Check(gemm->run(stream), "run"); }});
  return Ok();
}

}  // namespace

Result<std::vector<CutlassCall>> MakeCutlassCalls(bool trans_b, int64_t n, int64_t k,
                                                  std::span<const cuda::CublasPeer::Group> groups) {
  std::vector<CutlassCall> calls;
  if (trans_b) {
    TARE_RETURN_IF_ERROR((Add<Few, true>(n, k, groups, &calls)));
    TARE_RETURN_IF_ERROR((Add<Some, true>(n, k, groups, &calls)));
    TARE_RETURN_IF_ERROR((Add<Many, true>(n, k, groups, &calls)));
  } else {
    TARE_RETURN_IF_ERROR((Add<Few, false>(n, k, groups, &calls)));
    TARE_RETURN_IF_ERROR((Add<Some, false>(n, k, groups, &calls)));
    TARE_RETURN_IF_ERROR((Add<Many, false>(n, k, groups, &calls)));
  }
  return calls;
}

}  // namespace tare::ops::grouped_linear
