// policy_loss on CUDA: the tokens of token.h, the units' sums by one block.

#include "ops/cuda/unit_sums.cuh"
#include "ops/policy_loss/policy_loss_cuda.h"
#include "ops/policy_loss/token.h"

namespace tare::ops::policy_loss {
namespace {

using namespace tare::ops::cuda;  // NOLINT(google-build-using-namespace)

struct KernelArgs {
  Params params;
  TokenInputs in;
  int64_t rows;
  const uint8_t* mask;
  int64_t global_count;
  const int32_t* sequence_tokens;
  float dloss;
  float *out, *dentropy;  // token losses; or dlogprob and dentropy
  unsigned long long* refused;
  bool multiply, detached, local_count;  // planted faults
};

// The divisor; under the fault, the valid tokens of this call, counted by every caller.
__device__ int64_t CountOf(const KernelArgs& a) {
  if (!a.local_count) return a.global_count;
  int64_t count = 0;
  for (int64_t t = 0; t < a.rows; ++t) count += a.mask[t];
  return count < 1 ? 1 : count;
}

// True when the token counts and may be weighed.
__device__ bool Counts(const KernelArgs& a, int64_t t, bool tell) {
  const uint8_t mask = a.mask[t];
  if (mask > 1) {
    if (tell) Refuse(a.refused, Refusal::kMask, t);
    return false;
  }
  if (mask == 0) return a.multiply;
  if (a.params.normalise == Normalise::kSequence && a.sequence_tokens[t] < 1) {
    if (tell) Refuse(a.refused, Refusal::kSequenceTokens, t);
    return false;
  }
  return true;
}

__device__ float LossOf(const KernelArgs& a, int64_t t, int64_t count, bool tell) {
  if (!Counts(a, t, tell)) return 0.0f;
  const Token token = Evaluate(a.params, a.in, t, false);
  float loss = Mul(token.loss, WeightOf(a.params, count, a.sequence_tokens, t));
  if (a.multiply) return numerics::Canonical(Mul(loss, static_cast<float>(a.mask[t])));
  if (Finite(loss)) return loss;
  if (tell) Refuse(a.refused, Refusal::kLossNotFinite, t);
  return 0.0f;
}

__global__ void __launch_bounds__(256)
    policy_loss_tokens_kernel(const __grid_constant__ KernelArgs a) {
  const int64_t t = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (t >= a.rows) return;
  const float loss = LossOf(a, t, CountOf(a), true);
  if (a.out != nullptr) a.out[t] = loss;
}

__global__ void __launch_bounds__(1024)
    policy_loss_sum_kernel(const __grid_constant__ KernelArgs a, double* loss,
                           const __grid_constant__ UnitList units) {
  const int64_t count = CountOf(a);
  AddUnitSums(units, loss, [&](int64_t t) { return LossOf(a, t, count, false); });
}

// Exact counts of this call, by one block.
__global__ void __launch_bounds__(1024)
    policy_loss_counts_kernel(const __grid_constant__ KernelArgs a, int64_t* valid,
                              int64_t* clipped) {
  __shared__ unsigned long long total[2];
  if (threadIdx.x < 2) total[threadIdx.x] = 0;
  __syncthreads();
  unsigned long long mine[2] = {0, 0};
  for (int64_t t = threadIdx.x; t < a.rows; t += 1024) {
    if (a.mask[t] != 1) continue;
    ++mine[0];
    if (Evaluate(a.params, a.in, t, false).clipped) ++mine[1];
  }
  atomicAdd(&total[0], mine[0]);
  atomicAdd(&total[1], mine[1]);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (valid != nullptr) *valid = static_cast<int64_t>(total[0]);
  if (clipped != nullptr) *clipped = static_cast<int64_t>(total[1]);
}

__global__ void __launch_bounds__(256)
    policy_loss_backward_kernel(const __grid_constant__ KernelArgs a) {
  const int64_t t = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (t >= a.rows) return;
  float dlogprob = 0.0f, dentropy = 0.0f;
  if (Counts(a, t, true)) {
    const float weight = Mul(WeightOf(a.params, CountOf(a), a.sequence_tokens, t), a.dloss);
    dlogprob = Mul(Evaluate(a.params, a.in, t, a.detached).dlogprob, weight);
    dentropy = Mul(-a.params.entropy_coef, weight);
    if (a.multiply) {
      dlogprob = Mul(dlogprob, static_cast<float>(a.mask[t]));
      dentropy = Mul(dentropy, static_cast<float>(a.mask[t]));
    } else if (!Finite(dlogprob)) {
      Refuse(a.refused, Refusal::kGradientNotFinite, t);
      dlogprob = 0.0f;
    }
  }
  Put(dlogprob, a.out + t);
  if (a.dentropy != nullptr) Put(dentropy, a.dentropy + t);
}

unsigned Blocks(int64_t rows) { return static_cast<unsigned>((rows + 255) / 256); }

}  // namespace

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  TARE_RETURN_IF_ERROR(CheckDeviceRows("policy_loss", args.rows));
  const KernelArgs a = {
      params,
      {args.logprob, args.old_logprob, args.ref_logprob, args.entropy, args.advantage},
      args.rows,
      args.mask,
      args.global_count,
      args.sequence_tokens,
      1.0f,
      args.token_loss,
      nullptr,
      refused,
      fault::Active(kMaskByMultiply, ctx.side),
      false,
      fault::Active(kLocalCount, ctx.side)};
  if (a.rows > 0) {
    policy_loss_tokens_kernel<<<Blocks(a.rows), 256, 0, Stream(ctx)>>>(a);
    TARE_RETURN_IF_ERROR(Launched());
    TARE_RETURN_IF_ERROR(ForUnits(args.units, [&](const UnitList& list) {
      policy_loss_sum_kernel<<<1, 1024, 0, Stream(ctx)>>>(a, args.loss, list);
      return Launched();
    }));
  }
  if (args.valid_tokens == nullptr && args.clipped_tokens == nullptr) return Ok();
  policy_loss_counts_kernel<<<1, 1024, 0, Stream(ctx)>>>(a, args.valid_tokens, args.clipped_tokens);
  return Launched();
}

Status BackwardCuda(const Ctx& ctx, const Params& params, const BackwardArgs& args) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const refused, RefusalWord());
  if (args.rows == 0) return Ok();
  const KernelArgs a = {params,
                        {args.logprob, args.old_logprob, args.ref_logprob, nullptr, args.advantage},
                        args.rows,
                        args.mask,
                        args.global_count,
                        args.sequence_tokens,
                        args.dloss,
                        args.dlogprob,
                        args.dentropy,
                        refused,
                        fault::Active(kMaskByMultiply, ctx.side),
                        fault::Active(kDetached, ctx.side),
                        fault::Active(kLocalCount, ctx.side)};
  policy_loss_backward_kernel<<<Blocks(a.rows), 256, 0, Stream(ctx)>>>(a);
  return Launched();
}

}  // namespace tare::ops::policy_loss
