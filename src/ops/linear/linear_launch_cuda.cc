// Launch of the Hopper contraction kernels: tensor maps, grid, attributes.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "ops/cuda/tensor_map.h"
#include "ops/linear/gpu_gradient.h"
#include "ops/linear/linear_cuda.h"
#include "ops/trace.h"
#include "tensor/cuda_status.h"

namespace tare::ops::linear::gpu {
namespace {

constexpr int kMaxDevices = 16;
constexpr int kMaxConfigs = 64;

// What is asked of the driver once per kernel and device.
struct Prepared {
  std::once_flag once;
  Status status;
  int ctas = 0;  // CTAs that run at once, a multiple of the cluster
};

const void* KernelOf(const Schedule& schedule) {
  switch (schedule.pass) {
    case Pass::kForward:
      return ForwardKernel(schedule.config);
    case Pass::kDx:
      return DxKernel(schedule.config);
    case Pass::kDw:
      return DwKernel(schedule.config);
  }
  return nullptr;
}

Status Prepare(const void* kernel, const GemmConfig& config, int device, int* ctas) {
  TARE_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.shared_bytes()));
  int sms = 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  if (config.cluster() == 1) {
    *ctas = sms;
    return Ok();
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(config.cluster()), 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(sms / config.cluster() * config.cluster()));
  launch.blockDim = dim3(static_cast<unsigned>(config.threads()));
  launch.dynamicSmemBytes = static_cast<size_t>(config.shared_bytes());
  launch.attrs = &attribute;
  launch.numAttrs = 1;
  int clusters = 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch));
  if (clusters < 1)
    return Unsupported("no cluster of {} CTAs fits on this device", config.cluster());
  *ctas = clusters * config.cluster();
  return Ok();
}

// CTAs of the kernel that run at once on the current device.
Result<int> ActiveCtas(const Schedule& schedule, const void* kernel) {
  static std::array<std::array<std::array<Prepared, kMaxConfigs>, 3>, kMaxDevices> prepared;
  int device = 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  if (device >= kMaxDevices)
    return Unsupported("device {}: at most {} are supported", device, kMaxDevices);
  Prepared& p = prepared[static_cast<size_t>(device)][static_cast<size_t>(schedule.pass)]
                        [static_cast<size_t>(schedule.config)];
  std::call_once(p.once, [&] { p.status = Prepare(kernel, schedule.gemm(), device, &p.ctas); });
  if (!p.status.ok()) return p.status;
  return p.ctas;
}

int CeilDiv(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Whether columns 2j and 2j + 1 of y may be written as one aligned word.
bool Pairs(const Contraction& c) {
  const int64_t pair_bytes = c.y_dtype == DType::kF32 ? 8 : 4;
  return c.n % 2 == 0 && c.y_stride % 2 == 0 && reinterpret_cast<uintptr_t>(c.y) % pair_bytes == 0;
}

// What the kernels of all passes are told.
GemmArgs ArgsOf(const Contraction& c, const Schedule& schedule, int chains) {
  const GemmConfig& config = schedule.gemm();
  GemmArgs args = {};
  args.m = static_cast<int>(c.m);
  args.n = static_cast<int>(c.n);
  // Sharing b means that the CTAs of a cluster sit above each other, sharing a that they sit
  // abreast.
  args.tiles_m = CeilDiv(c.m, int64_t{config.bm} * config.cluster_m);
  args.tiles_n = CeilDiv(c.n, int64_t{config.bn} * config.cluster_n);
  args.group_m = std::clamp(schedule.group_m, 1, args.tiles_m);
  args.chains = chains;
  args.parts = c.parts;
  args.chain_length = c.runs[0].length;
  args.a_rows = config.bm;
  args.out_f32 = c.y_dtype == DType::kF32;
  args.pairs = Pairs(c);
  args.y = c.y;
  args.y_stride = c.y_stride;
  args.bias = c.bias;
  args.bias_f32 = c.bias_dtype == DType::kF32;
  return args;
}

Status LaunchKernel(const Schedule& schedule, const GemmArgs& args, void** parameters,
                    StreamHandle stream) {
  const GemmConfig& config = schedule.gemm();
  const void* kernel = KernelOf(schedule);
  TARE_ASSIGN_OR_RETURN(const int active, ActiveCtas(schedule, kernel));
  const int64_t clusters =
      std::min<int64_t>(active / config.cluster(), int64_t{args.tiles_m} * args.tiles_n);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(config.cluster()), 1, 1};
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(clusters * config.cluster()));
  launch.blockDim = dim3(static_cast<unsigned>(config.threads()));
  launch.dynamicSmemBytes = static_cast<size_t>(config.shared_bytes());
  launch.stream = static_cast<cudaStream_t>(stream);
  launch.attrs = &attribute;
  launch.numAttrs = config.cluster() > 1 ? 1 : 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaLaunchKernelExC(&launch, kernel, parameters));
  return Ok();
}

// kForward, kDx.
Status LaunchChains(const Contraction& c, const Schedule& schedule, StreamHandle stream) {
  const GemmConfig& config = schedule.gemm();
  const int cluster_a = config.cluster_n;
  const int cluster_b = config.cluster_m;
  const int chains = c.chains();
  GemmArgs args = ArgsOf(c, schedule, chains);
  const int64_t step = 8 * cluster_a;
  args.a_rows = static_cast<int>(std::min<int64_t>(config.bm, (c.m + step - 1) / step * step));
  args.out_tma = config.staged && !args.out_f32 && cuda::CanMap(c.y, c.m, c.n, c.y_stride);
  CUtensorMap map_a = {}, map_b = {}, map_y = {};
  TARE_RETURN_IF_ERROR(
      cuda::MapMatrix16(c.a, c.m, c.k, c.a_stride, args.a_rows / cluster_a, &map_a));
  if (config.trans_b) {
    TARE_RETURN_IF_ERROR(cuda::MapMatrix16(c.b, c.k, c.n, c.b_stride, config.bk, &map_b));
  } else {
    TARE_RETURN_IF_ERROR(
        cuda::MapMatrix16(c.b, c.n, c.k, c.b_stride, config.bn / cluster_b, &map_b));
  }
  if (args.out_tma) {
    TARE_RETURN_IF_ERROR(cuda::MapMatrix16(c.y, c.m, c.n, c.y_stride, 64, &map_y));
  }
  GemmRuns all_runs;
  NoRuns no_runs;
  const bool with_runs = schedule.pass != Pass::kForward;
  if (with_runs) std::copy_n(c.runs.data(), chains * c.parts, all_runs.runs);
  void* parameters[] = {&map_a, &map_b, &map_y, &args,
                        with_runs ? static_cast<void*>(&all_runs) : static_cast<void*>(&no_runs)};
  return LaunchKernel(schedule, args, parameters, stream);
}

// kDw: `count` units from `first` on.
Status LaunchUnits(const Contraction& c, const Schedule& schedule, int first, int count,
                   StreamHandle stream) {
  const GemmConfig& config = schedule.gemm();
  GemmArgs args = ArgsOf(c, schedule, count);
  GradientMaps maps = {};
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(
      c.a, c.k, c.m, c.a_stride, GradientBoxRows(config, config.bm, config.cluster_n), &maps.a));
  TARE_RETURN_IF_ERROR(
      cuda::MapMatrix16(c.b, c.k, c.n, c.b_stride,
                        GradientBoxRows(config, config.b_columns(), config.cluster_m), &maps.b));
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(c.a, c.k, c.m, c.a_stride, 16, &maps.short_a));
  TARE_RETURN_IF_ERROR(cuda::MapMatrix16(c.b, c.k, c.n, c.b_stride, 16, &maps.short_b));
  GemmRuns runs;
  std::copy_n(c.runs.data() + first, count, runs.runs);
  void* parameters[] = {&maps, &args, &runs};
  return LaunchKernel(schedule, args, parameters, stream);
}

// What the generic kernel's grid and parameters hold.
Status CheckGeneric(const Contraction& c) {
  constexpr int64_t kMaxRows = int64_t{65535} * 64;
  if (c.m > kMaxRows)
    return Unsupported("linear: {} rows in one generic CUDA launch; at most {}", c.m, kMaxRows);
  if (c.pass != Pass::kDw && (c.chains() > 8 || c.runs.size() > GemmRuns::kMax)) {
    return Unsupported("linear: {} chains of {} runs; at most 8 chains and {} runs in all",
                       c.chains(), c.parts, GemmRuns::kMax);
  }
  return Ok();
}

}  // namespace

bool CanUseGemm(const Contraction& c) {
  if (c.ieee || c.operand != DType::kBF16 || c.a_dtype != DType::kBF16 || c.b_dtype != DType::kBF16)
    return false;
  if (c.y_dtype == DType::kF16 || c.bias_dtype == DType::kF16) return false;
  if (c.m == 0 || c.n == 0 || c.k == 0 || c.runs.empty()) return false;
  const bool trans_a = c.pass == Pass::kDw;
  const bool trans_b = c.pass != Pass::kForward;
  if (!cuda::CanMap(c.a, trans_a ? c.k : c.m, trans_a ? c.m : c.k, c.a_stride)) return false;
  if (!cuda::CanMap(c.b, trans_b ? c.k : c.n, trans_b ? c.n : c.k, c.b_stride)) return false;
  // The kernel pads the end of every unit itself; it writes dw in pairs.
  if (c.pass == Pass::kDw) return c.y_dtype == DType::kF32 && Pairs(c);
  if (c.chains() > 1 && c.runs.size() > GemmRuns::kMax) return false;
  for (const Run& run : c.runs) {
    // A group that is cut short is padded by the copy engine, which only knows the tensor's end.
    if (run.length == 0) return false;
    if (run.length % 16 != 0 && (run.begin + run.length != c.k || c.parts > 1)) return false;
  }
  return true;
}

Status Launch(const Contraction& c, const Schedule& schedule, StreamHandle stream,
              LaunchTrace* trace) {
  if (c.m == 0 || c.n == 0) return Ok();
  if (schedule.config < 0) {
    TARE_RETURN_IF_ERROR(CheckGeneric(c));
    TARE_RETURN_IF_ERROR(LaunchGeneric(c, stream));
  } else {
    if (!CanUseGemm(c))
      return Unsupported("linear: {} cannot take this contraction", schedule.Kernel());
    const GemmConfig& config = schedule.gemm();
    const int chains = c.chains();
    if (c.pass == Pass::kDw) {
      // A launch holds as many units as its parameters do; the next one goes on where it stopped.
      for (int first = 0; first < chains; first += GemmRuns::kMax) {
        TARE_RETURN_IF_ERROR(
            LaunchUnits(c, schedule, first, std::min(GemmRuns::kMax, chains - first), stream));
      }
    } else {
      if (chains > (1 << config.levels)) {
        return Unsupported("linear: {} holds {} chains, not {}", schedule.Kernel(),
                           1 << config.levels, chains);
      }
      TARE_RETURN_IF_ERROR(LaunchChains(c, schedule, stream));
    }
  }
  if (trace != nullptr) {
    trace->Record(
        {c.pass == Pass::kForward ? "linear"
         : c.pass == Pass::kDx    ? "linear.dx"
                                  : "linear.dw",
         schedule.Kernel(), schedule.ToString(),
         fmt::format("{},{}->{}", DTypeName(c.a_dtype), DTypeName(c.b_dtype), DTypeName(c.y_dtype)),
         fmt::format("M={} N={} K={}", c.m, c.n, c.k)});
  }
  return Ok();
}

Status RunContraction(const Contraction& c, StreamHandle stream, LaunchTrace* trace) {
  if (!CanUseGemm(c)) return Launch(c, Schedule{.pass = c.pass}, stream, trace);
  int device = 0;
  Arch arch;
  TARE_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  TARE_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&arch.sms, cudaDevAttrMultiProcessorCount, device));
  return Launch(c, Pick(c.pass, c.m, c.n, c.k, c.chains(), arch), stream, trace);
}

}  // namespace tare::ops::linear::gpu
