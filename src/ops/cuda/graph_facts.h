#pragma once

// Test support: what a captured CUDA graph holds. A capture in thread-local mode already refuses a
// cudaMalloc of the capturing thread; what it would let through (allocations in stream order) is
// seen here. The launches are the printable launch configurations of a call.

#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"

namespace tare::ops::cuda {

struct GraphFacts {
  std::vector<std::string> launches;  // "rmsnorm_forward_kernel grid=33x1x1 block=128 shared=0"
  int allocations = 0;                // nodes that allocate or free memory
};

// The function's own name: no namespaces, template arguments or parameters.
inline std::string KernelName(const void* function) {
  const char* mangled = nullptr;
  if (cudaFuncGetName(&mangled, function) != cudaSuccess || mangled == nullptr) return "?";
  int status = 0;
  char* text = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? text : mangled;
  std::free(text);
  const std::string anonymous = "(anonymous namespace)::";
  for (size_t at; (at = name.find(anonymous)) != std::string::npos;)
    name.erase(at, anonymous.size());
  name = name.substr(0, name.find_first_of("<("));
  if (const size_t at = name.rfind("::"); at != std::string::npos) name = name.substr(at + 2);
  if (const size_t at = name.rfind(' '); at != std::string::npos) name = name.substr(at + 1);
  return name;
}

inline GraphFacts FactsOf(cudaGraph_t graph) {
  GraphFacts facts;
  size_t count = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &count), cudaSuccess);
  std::vector<cudaGraphNode_t> nodes(count);
  EXPECT_EQ(cudaGraphGetNodes(graph, nodes.data(), &count), cudaSuccess);
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    EXPECT_EQ(cudaGraphNodeGetType(node, &type), cudaSuccess);
    facts.allocations += type == cudaGraphNodeTypeMemAlloc || type == cudaGraphNodeTypeMemFree;
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams p = {};
    if (cudaGraphKernelNodeGetParams(node, &p) !=
        cudaSuccess) {  // loaded by the driver's interface
      (void)cudaGetLastError();
      facts.launches.emplace_back("a library's kernel");
      continue;
    }
    facts.launches.push_back(fmt::format(
        "{} grid={}x{}x{} block={} shared={}", KernelName(p.func), p.gridDim.x, p.gridDim.y,
        p.gridDim.z, p.blockDim.x * p.blockDim.y * p.blockDim.z, p.sharedMemBytes));
  }
  return facts;
}

// Captures `call` on `stream`, expects it to allocate nothing, and replays it `times`. The launches
// of the capture.
inline std::vector<std::string> CaptureAndReplay(cudaStream_t stream,
                                                 const std::function<Status()>& call,
                                                 int times = 2) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Status status = call();
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << status.ToString();
  EXPECT_TRUE(status.ok()) << status.ToString();
  if (graph == nullptr || !status.ok()) return {};
  const GraphFacts facts = FactsOf(graph);
  EXPECT_EQ(facts.allocations, 0);
  EXPECT_FALSE(facts.launches.empty());
  EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int i = 0; i < times; ++i) EXPECT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  return facts.launches;
}

}  // namespace tare::ops::cuda
