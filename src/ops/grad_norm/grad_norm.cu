// grad_norm on CUDA: a warp a leaf; the tree in f64 on the device, 2,048 leaves a block at a time,
// which cuts the balanced tree at whole subtrees.

#include "ops/cuda/rows.cuh"
#include "ops/grad_norm/grad_norm_cuda.h"

namespace tare::ops::grad_norm {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

constexpr int kWarps = 8;
constexpr int kSubtree = 2048;

template <bool kVec>
__global__ void __launch_bounds__(32 * kWarps)
    grad_norm_leaves_kernel(const float* data, int64_t begin, int64_t count, int64_t cols,
                            int64_t blocks, float* leaves) {
  const int lane = threadIdx.x % 32;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count;
       i += int64_t{gridDim.x} * kWarps) {
    const int64_t row = begin + i / blocks, at = i % blocks * kBlock;
    const int64_t width = cols - at < kBlock ? cols - at : kBlock;
    const float* g = data + row * cols + at;
    float v[kBlock / 128][4];
#pragma unroll
    for (int c = 0; c < kBlock / 128; ++c)
      Chunk<kVec>::Load(g + 128 * c, width - 128 * c, lane, v[c]);
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < kBlock / 128; ++c) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = Fma(v[c][e], v[c][e], acc[e]);
    }
    const float sum = Chunk<kVec>::Tree(acc);
    if (lane == 0) leaves[i] = sum;
  }
}

// out[b] = the balanced tree over in[b * kSubtree ..): pairs of neighbours, an odd last one
// carried.
template <typename In>
__global__ void __launch_bounds__(1024)
    grad_norm_tree_kernel(const In* in, int64_t count, double* out) {
  __shared__ double level[kSubtree];
  for (int64_t block = blockIdx.x; block * kSubtree < count; block += gridDim.x) {
    const int64_t first = block * kSubtree;
    int n = static_cast<int>(count - first < kSubtree ? count - first : kSubtree);
    for (int i = threadIdx.x; i < n; i += 1024) level[i] = static_cast<double>(in[first + i]);
    while (n > 1) {
      __syncthreads();
      double value = 0.0;
      const int i = static_cast<int>(threadIdx.x);
      const bool mine = i < (n + 1) / 2;
      if (mine)
        value = 2 * i + 1 < n ? numerics::Add(level[2 * i], level[2 * i + 1]) : level[2 * i];
      __syncthreads();
      if (mine) level[i] = value;
      n = (n + 1) / 2;
    }
    __syncthreads();
    if (threadIdx.x == 0) out[block] = level[0];
    __syncthreads();
  }
}

// The lowest leaf that is not finite.
__global__ void __launch_bounds__(256)
    grad_norm_check_kernel(const float* leaves, int64_t count, unsigned long long* bad) {
  for (int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * 256) {
    if ((__float_as_uint(leaves[i]) & 0x7f800000u) == 0x7f800000u)
      atomicMin(bad, static_cast<unsigned long long>(i));
  }
}

int64_t Subtrees(int64_t count) { return (count + kSubtree - 1) / kSubtree; }

}  // namespace

size_t WorkspaceBytesCuda(int64_t leaves) {
  // Leaves, two levels of subtrees that take turns, and two words.
  const int64_t tops = 2 * (Subtrees(leaves) + 1);
  return static_cast<size_t>((leaves * 4 + 7) / 8 * 8 + tops * 8 + 16);
}

Status LeavesCuda(const Ctx& ctx, const Entry& e, int64_t begin, int64_t end, float* leaves) {
  const int64_t blocks = BlocksPerRow(e.cols), count = (end - begin) * blocks;
  if (count == 0) return Ok();
  const bool vec = e.cols % 4 == 0 && Aligned4(e.data, DType::kF32);
  const auto run = [&](auto* kernel) {
    kernel<<<GridFor(count, kWarps, int64_t{1} << 30), 32 * kWarps, 0, Stream(ctx)>>>(
        e.data, begin, count, e.cols, blocks, leaves);
    return Launched();
  };
  return vec ? run(&grad_norm_leaves_kernel<true>) : run(&grad_norm_leaves_kernel<false>);
}

namespace {

// Where the tree over leaves [0, count) of the workspace stands once the stream has come so far:
// its sum, and the lowest leaf that is not finite or all ones.
struct Whole {
  const double* sum;
  const unsigned long long* bad;
};
Status TreeInWorkspace(const Ctx& ctx, int64_t count, Whole* whole) {
  auto* leaves = static_cast<float*>(ctx.workspace);
  auto* levels =
      reinterpret_cast<double*>(static_cast<uint8_t*>(ctx.workspace) + (count * 4 + 7) / 8 * 8);
  const int64_t tops = Subtrees(count) + 1;
  auto* word = reinterpret_cast<unsigned long long*>(levels + 2 * tops);
  TARE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(word, 0xff, 8, Stream(ctx)));
  grad_norm_check_kernel<<<GridFor(count, 256), 256, 0, Stream(ctx)>>>(leaves, count, word);
  TARE_RETURN_IF_ERROR(Launched());
  double* to = levels;
  grad_norm_tree_kernel<<<GridFor(Subtrees(count), 1), 1024, 0, Stream(ctx)>>>(leaves, count, to);
  TARE_RETURN_IF_ERROR(Launched());
  for (int64_t n = Subtrees(count); n > 1; n = Subtrees(n)) {
    double* next = to == levels ? levels + tops : levels;
    grad_norm_tree_kernel<<<GridFor(Subtrees(n), 1), 1024, 0, Stream(ctx)>>>(
        static_cast<const double*>(to), n, next);
    TARE_RETURN_IF_ERROR(Launched());
    to = next;
  }
  *whole = {to, word};
  return Ok();
}

__device__ __forceinline__ float NormOf(double sum) { return static_cast<float>(__dsqrt_rn(sum)); }

// One thread. With `first` the norm, the refusal and the factor; else the factor alone.
__global__ void grad_norm_finish_kernel(Whole whole, bool first, float max_norm,
                                        unsigned long long* refused, float* result) {
  const bool bad = *whole.bad != ~0ull;
  if (bad && first) Refuse(refused, Refusal::kGradNormNotFinite, static_cast<int64_t>(*whole.bad));
  const float norm = bad ? numerics::CanonicalNan() : NormOf(*whole.sum);
  if (first) result[0] = norm;
  const float limit = Div(max_norm, Add(norm, 1e-6f));
  result[1] = bad ? norm : max_norm > 0.0f && limit < 1.0f ? limit : 1.0f;
}

}  // namespace

// The tree on the host: waits for the stream. `bad` is the lowest leaf that is not finite, or -1.
Status TreeCuda(const Ctx& ctx, int64_t count, double* sum, int64_t* bad) {
  Whole whole;
  TARE_RETURN_IF_ERROR(TreeInWorkspace(ctx, count, &whole));
  unsigned long long first_bad = 0;
  TARE_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(sum, whole.sum, 8, cudaMemcpyDeviceToHost, Stream(ctx)));
  TARE_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(&first_bad, whole.bad, 8, cudaMemcpyDeviceToHost, Stream(ctx)));
  TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(Stream(ctx)));
  *bad = first_bad == ~0ull ? -1 : static_cast<int64_t>(first_bad);
  return Ok();
}

Status FinishCuda(const Ctx& ctx, int64_t count, int64_t clip_count, float max_norm,
                  float* result) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  Whole whole;
  TARE_RETURN_IF_ERROR(TreeInWorkspace(ctx, count, &whole));
  grad_norm_finish_kernel<<<1, 1, 0, Stream(ctx)>>>(whole, true, max_norm, refused, result);
  TARE_RETURN_IF_ERROR(Launched());
  if (clip_count == count) return Ok();
  TARE_RETURN_IF_ERROR(TreeInWorkspace(ctx, clip_count, &whole));
  grad_norm_finish_kernel<<<1, 1, 0, Stream(ctx)>>>(whole, false, max_norm, refused, result);
  return Launched();
}

}  // namespace tare::ops::grad_norm
