// cross_entropy on CUDA.

#include "ops/cross_entropy/cross_entropy_cuda.h"
#include "ops/cuda/unit_sums.cuh"

namespace tare::ops::cross_entropy {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

struct KernelArgs {
  int64_t rows;
  const float *logprob, *weight;
  const uint8_t* mask;
  float share, dloss;
  float* out;  // token losses, or dlogprob
  unsigned long long* refused;
};

__device__ __forceinline__ float WeightOf(const KernelArgs& a, int64_t t) {
  return a.weight == nullptr ? a.share : Mul(a.weight[t], a.share);
}
__device__ __forceinline__ float LossOf(const KernelArgs& a, int64_t t) {
  if (a.mask[t] == 0) return 0.0f;
  const float loss = -Mul(a.logprob[t], WeightOf(a, t));
  return Finite(loss) ? loss : 0.0f;
}

__global__ void __launch_bounds__(256)
    cross_entropy_tokens_kernel(const __grid_constant__ KernelArgs a) {
  const int64_t t = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (t >= a.rows) return;
  if (a.mask[t] > 1) Refuse(a.refused, Refusal::kMask, t);
  if (a.mask[t] != 0 && !Finite(-Mul(a.logprob[t], WeightOf(a, t))))
    Refuse(a.refused, Refusal::kCrossEntropyLoss, t);
  if (a.out != nullptr) a.out[t] = LossOf(a, t);
}

__global__ void __launch_bounds__(1024)
    cross_entropy_sum_kernel(const __grid_constant__ KernelArgs a, double* loss,
                             const __grid_constant__ UnitList units) {
  AddUnitSums(units, loss, [&](int64_t t) { return LossOf(a, t); });
}

__global__ void __launch_bounds__(256)
    cross_entropy_backward_kernel(const __grid_constant__ KernelArgs a) {
  const int64_t t = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (t >= a.rows) return;
  if (a.mask[t] > 1) Refuse(a.refused, Refusal::kMask, t);
  float d = a.mask[t] != 0 ? -Mul(WeightOf(a, t), a.dloss) : 0.0f;
  if (!Finite(d)) {
    Refuse(a.refused, Refusal::kCrossEntropyGradient, t);
    d = 0.0f;
  }
  a.out[t] = d;
}

float ShareOf(int64_t count) { return static_cast<float>(1.0 / static_cast<double>(count)); }

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params&, const Args& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  TARE_RETURN_IF_ERROR(CheckDeviceRows("cross_entropy", args.rows));
  if (args.rows == 0) return Ok();
  const KernelArgs a = {
      args.rows, args.logprob,    args.weight, args.mask, ShareOf(args.global_count),
      1.0f,      args.token_loss, refused};
  cross_entropy_tokens_kernel<<<static_cast<unsigned>((a.rows + 255) / 256), 256, 0, Stream(ctx)>>>(
      a);
  TARE_RETURN_IF_ERROR(Launched());
  return ForUnits(args.units, [&](const UnitList& list) {
    cross_entropy_sum_kernel<<<1, 1024, 0, Stream(ctx)>>>(a, args.loss, list);
    return Launched();
  });
}

Status BackwardCuda(const Ctx& ctx, const Params&, const BackwardArgs& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  if (args.rows == 0) return Ok();
  const KernelArgs a = {
      args.rows,  nullptr,       args.weight, args.mask, ShareOf(args.global_count),
      args.dloss, args.dlogprob, refused};
  cross_entropy_backward_kernel<<<static_cast<unsigned>((a.rows + 255) / 256), 256, 0,
                                  Stream(ctx)>>>(a);
  return Launched();
}

}  // namespace tare::ops::cross_entropy
