#include "ops/cuda/bench.h"

#include <algorithm>

#include "ops/cuda/bench_kernels.h"
#include "tensor/cuda_status.h"

namespace tare::ops::cuda {
namespace {

constexpr size_t kFlushBytes = size_t{256} << 20;

}  // namespace

Result<Bench> Bench::Create() {
  Bench bench;
  TARE_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&bench.stream_, cudaStreamNonBlocking));
  TARE_CUDA_RETURN_IF_ERROR(cudaEventCreate(&bench.begin_));
  TARE_CUDA_RETURN_IF_ERROR(cudaEventCreate(&bench.end_));
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&bench.flush_, kFlushBytes));
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(reinterpret_cast<void**>(&bench.sink_), 256));
  TARE_CUDA_RETURN_IF_ERROR(cudaMemset(bench.flush_, 1, kFlushBytes));
  return bench;
}

Status Bench::Enqueue(Flush flush) const {
  switch (flush) {
    case Flush::kRead:
      return LaunchReadAll(flush_, kFlushBytes, sink_, stream_);
    case Flush::kWrite:
      TARE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(flush_, 0, kFlushBytes, stream_));
      return Ok();
    case Flush::kNone:
      return Ok();
  }
  return Ok();
}

Result<cudaGraphExec_t> Bench::Capture(const std::function<Status()>* call, int calls,
                                       Flush flush) const {
  TARE_CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  Status status;
  for (int i = 0; i < calls && status.ok(); ++i) {
    status = Enqueue(flush);
    if (status.ok() && call != nullptr) status = (*call)();
  }
  cudaGraph_t graph = nullptr;
  const Status ended = CudaToStatus(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture",
                                    __FILE__, __LINE__);
  TARE_RETURN_IF_ERROR(status);
  TARE_RETURN_IF_ERROR(ended);
  cudaGraphExec_t exec = nullptr;
  TARE_CUDA_RETURN_IF_ERROR(cudaGraphInstantiate(&exec, graph, 0));
  TARE_CUDA_RETURN_IF_ERROR(cudaGraphDestroy(graph));
  return exec;
}

Result<double> Bench::Launch(cudaGraphExec_t graph) const {
  TARE_CUDA_RETURN_IF_ERROR(cudaEventRecord(begin_, stream_));
  TARE_CUDA_RETURN_IF_ERROR(cudaGraphLaunch(graph, stream_));
  TARE_CUDA_RETURN_IF_ERROR(cudaEventRecord(end_, stream_));
  TARE_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(end_));
  float ms = 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&ms, begin_, end_));
  return static_cast<double>(ms) * 1000.0;
}

Result<std::vector<Timing>> Bench::Time(const std::vector<Arm>& arms, int calls, int rounds,
                                        Flush flush) {
  std::vector<cudaGraphExec_t> graphs;
  for (const Arm& arm : arms) {
    TARE_RETURN_IF_ERROR(arm.call().Annotate(arm.name));  // loads the kernel outside of the capture
    TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_));
    auto graph = Capture(&arm.call, calls, flush);
    if (!graph.ok()) return graph.status().Annotate(arm.name);
    graphs.push_back(*graph);
  }
  cudaGraphExec_t empty = nullptr;
  if (flush != Flush::kNone) {
    TARE_ASSIGN_OR_RETURN(empty, Capture(nullptr, calls, flush));
  }
  std::vector<std::vector<double>> times(arms.size());
  std::vector<double> flushes;
  for (int round = -1; round < rounds; ++round) {  // the first one warms up
    double flush_us = 0;
    if (empty != nullptr) {
      TARE_ASSIGN_OR_RETURN(flush_us, Launch(empty));
      if (round >= 0) flushes.push_back(flush_us);
    }
    for (size_t turn = 0; turn < arms.size(); ++turn) {
      // Another arm goes first in each round: a hot card slows whoever follows a heavy one.
      const size_t i = (turn + static_cast<size_t>(round + 1) * 5) % arms.size();
      TARE_ASSIGN_OR_RETURN(const double us, Launch(graphs[i]));
      if (round >= 0) times[i].push_back(us);
    }
  }
  std::sort(flushes.begin(), flushes.end());
  const double flush_us = flushes.empty() ? 0 : flushes[flushes.size() / 2];
  std::vector<Timing> result;
  for (auto& list : times) {
    std::sort(list.begin(), list.end());
    const auto of = [&](double us) { return (us - flush_us) / calls; };
    result.push_back({of(list[list.size() / 2]), of(list.front()), of(list.back())});
  }
  for (cudaGraphExec_t graph : graphs) TARE_CUDA_RETURN_IF_ERROR(cudaGraphExecDestroy(graph));
  if (empty != nullptr) TARE_CUDA_RETURN_IF_ERROR(cudaGraphExecDestroy(empty));
  return result;
}

Result<std::string> DeviceFacts() {
  cudaDeviceProp properties;
  int device = 0, driver = 0, runtime = 0, clock_khz = 0, memory_khz = 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  TARE_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, device));
  TARE_CUDA_RETURN_IF_ERROR(cudaDriverGetVersion(&driver));
  TARE_CUDA_RETURN_IF_ERROR(cudaRuntimeGetVersion(&runtime));
  TARE_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device));
  TARE_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, device));
  return fmt::format(
      "\"device\": \"{}\", \"compute\": \"{}.{}\", \"sms\": {}, \"l2_bytes\": {}, \"cuda_driver\": "
      "{}, "
      "\"cuda_runtime\": {}, \"max_sm_mhz\": {}, \"max_memory_mhz\": {}",
      properties.name, properties.major, properties.minor, properties.multiProcessorCount,
      properties.l2CacheSize, driver, runtime, clock_khz / 1000, memory_khz / 1000);
}

}  // namespace tare::ops::cuda
