#include "ops/cuda/cublas_peer.h"
#include "tensor/cuda_status.h"

#include <dlfcn.h>

#include <cstdlib>

namespace tare::ops::cuda {
namespace {

// The few declarations needed, as in cublas_api.h.
using Handle = void*;
using CreateFn = int (*)(Handle*);
using SetStreamFn = int (*)(Handle, cudaStream_t);
using SetWorkspaceFn = int (*)(Handle, void*, size_t);
using GetVersionFn = int (*)(Handle, int*);
using GemmExFn = int (*)(Handle, int trans_a, int trans_b, int m, int n, int k, const void* alpha,
                         const void* a, int a_type, int lda, const void* b, int b_type, int ldb,
                         const void* beta, void* c, int c_type, int ldc, int compute_type,
                         int algo);
using GroupedFn = int (*)(Handle, const int* trans_a, const int* trans_b, const int* m,
                          const int* n, const int* k, const void* alpha, const void* const* a,
                          int a_type, const int* lda, const void* const* b, int b_type,
                          const int* ldb, const void* beta, void* const* c, int c_type,
                          const int* ldc, int groups, const int* group_size, int compute_type);
constexpr int kNoTranspose = 0, kTranspose = 1;
constexpr int kTypeF32 = 0, kTypeBf16 = 14;
constexpr int kComputeF32 = 68;
constexpr int kDefaultAlgo = -1;
constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what PyTorch gives it on Hopper

}  // namespace

Result<CublasPeer> CublasPeer::Open() {
  void* library = nullptr;
  const char* named = std::getenv("TARE_CUBLAS");
  for (const char* path : {named, "libcublas.so.13", "libcublas.so.12"}) {
    if (path != nullptr && library == nullptr) library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  }
  if (library == nullptr) {
    return Error(Code::kNotFound,
                 "cuBLAS not found; set TARE_CUBLAS to the path of libcublas.so.13: {}", dlerror());
  }
  const auto create = reinterpret_cast<CreateFn>(dlsym(library, "cublasCreate_v2"));
  const auto get_version = reinterpret_cast<GetVersionFn>(dlsym(library, "cublasGetVersion_v2"));
  CublasPeer peer;
  peer.gemm_ = dlsym(library, "cublasGemmEx");
  peer.grouped_ = dlsym(library, "cublasGemmGroupedBatchedEx");
  peer.set_workspace_ = dlsym(library, "cublasSetWorkspace_v2");
  peer.set_stream_ = dlsym(library, "cublasSetStream_v2");
  if (create == nullptr || peer.set_stream_ == nullptr || peer.set_workspace_ == nullptr ||
      get_version == nullptr || peer.gemm_ == nullptr) {
    return Unsupported("the cuBLAS that was found lacks an entry point of its v2 interface");
  }
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&peer.workspace_, kWorkspaceBytes));
  int version = 0;
  if (create(&peer.handle_) != 0 || get_version(peer.handle_, &version) != 0) {
    return Error(Code::kInternal, "cuBLAS could not be set up");
  }
  peer.version_ = std::to_string(version);
  return peer;
}

Status CublasPeer::Gemm(cudaStream_t stream, bool trans_a, bool trans_b, int64_t m, int64_t n,
                        int64_t k, const void* a, const void* b, void* d, bool d_f32,
                        bool accumulate) const {
  // Column-major cuBLAS sees d as [n, m] = b a.
  const float alpha = 1.0f;
  const float beta = accumulate ? 1.0f : 0.0f;
  // Setting the stream gives up the workspace, so both are set before every call.
  int status = reinterpret_cast<SetStreamFn>(set_stream_)(handle_, stream);
  if (status == 0)
    status = reinterpret_cast<SetWorkspaceFn>(set_workspace_)(handle_, workspace_, kWorkspaceBytes);
  if (status != 0)
    return Error(Code::kInternal, "cuBLAS refused its stream or workspace: status {}", status);
  status = reinterpret_cast<GemmExFn>(gemm_)(
      handle_, trans_b ? kNoTranspose : kTranspose, trans_a ? kTranspose : kNoTranspose,
      static_cast<int>(n), static_cast<int>(m), static_cast<int>(k), &alpha, b, kTypeBf16,
      static_cast<int>(trans_b ? n : k), a, kTypeBf16, static_cast<int>(trans_a ? m : k), &beta, d,
      d_f32 ? kTypeF32 : kTypeBf16, static_cast<int>(n), kComputeF32, kDefaultAlgo);
  if (status != 0) return Error(Code::kInternal, "cublasGemmEx gave status {}", status);
  return Ok();
}

CublasPeer::Groups CublasPeer::HostGroups(bool trans_b, int64_t n, int64_t k,
                                          std::span<const Group> groups,
                                          std::vector<const void*>* addresses) {
  Groups g;
  std::vector<const void*> as, ds;
  addresses->clear();
  for (const Group& group : groups) {
    if (group.m == 0) continue;
    as.push_back(group.a), addresses->push_back(group.b), ds.push_back(group.d);
    // Column-major: d as [n, m] = b a, as in Gemm.
    g.n.push_back(static_cast<int>(n)), g.m.push_back(static_cast<int>(group.m));
    g.k.push_back(static_cast<int>(k));
    g.trans_b.push_back(trans_b ? kNoTranspose : kTranspose), g.trans_a.push_back(kNoTranspose);
    g.ldb.push_back(static_cast<int>(trans_b ? n : k)), g.lda.push_back(static_cast<int>(k));
    g.ldc.push_back(static_cast<int>(n));
    g.alpha.push_back(1.0f), g.beta.push_back(0.0f), g.size.push_back(1);
  }
  addresses->insert(addresses->end(), as.begin(), as.end());
  addresses->insert(addresses->end(), ds.begin(), ds.end());
  return g;
}

Result<CublasPeer::Groups> CublasPeer::MakeGroups(bool trans_b, int64_t n, int64_t k,
                                                  std::span<const Group> groups) const {
  std::vector<const void*> on_host;
  Groups g = HostGroups(trans_b, n, k, groups, &on_host);
  void* addresses = nullptr;
  TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&addresses, on_host.size() * sizeof(void*) + 1));
  TARE_CUDA_RETURN_IF_ERROR(cudaMemcpy(addresses, on_host.data(), on_host.size() * sizeof(void*),
                                       cudaMemcpyHostToDevice));
  g.addresses = static_cast<const void**>(addresses);
  return g;
}

Result<const CublasPeer*> NativePeer() {
  thread_local Result<CublasPeer> peer = CublasPeer::Open();
  TARE_RETURN_IF_ERROR(peer.status());
  return &*peer;
}

Status CublasPeer::GemmGrouped(cudaStream_t stream, const Groups& g) const {
  if (grouped_ == nullptr) return Unsupported("this cuBLAS has no cublasGemmGroupedBatchedEx");
  int status = reinterpret_cast<SetStreamFn>(set_stream_)(handle_, stream);
  if (status == 0)
    status = reinterpret_cast<SetWorkspaceFn>(set_workspace_)(handle_, workspace_, kWorkspaceBytes);
  const size_t count = g.m.size();
  const void** const b = g.addresses;
  if (status == 0) {
    status = reinterpret_cast<GroupedFn>(grouped_)(
        handle_, g.trans_b.data(), g.trans_a.data(), g.n.data(), g.m.data(), g.k.data(),
        g.alpha.data(), b, kTypeBf16, g.ldb.data(), b + count, kTypeBf16, g.lda.data(),
        g.beta.data(), const_cast<void* const*>(b + 2 * count), kTypeBf16, g.ldc.data(),
        static_cast<int>(count), g.size.data(), kComputeF32);
  }
  if (status != 0)
    return Error(Code::kInternal, "cublasGemmGroupedBatchedEx gave status {}", status);
  return Ok();
}

}  // namespace tare::ops::cuda
