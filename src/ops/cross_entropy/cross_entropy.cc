#include "ops/cross_entropy/cross_entropy.h"
#include "ops/cross_entropy/cross_entropy_cuda.h"

#include "numerics/lanes.h"
#include "ops/cuda_entry.h"
#include "ops/rows.h"

namespace tare::ops::cross_entropy {
namespace {

Status Check(const Ctx& ctx, int64_t rows, const uint8_t* mask, int64_t global_count) {
  TARE_RETURN_IF_ERROR(CheckRows("cross_entropy", rows));
  TARE_RETURN_IF_ERROR(CheckPointer("cross_entropy", "mask", mask, rows));
  if (rows > 0 && global_count < 1) {
    return InvalidArgument("cross_entropy: global_count is {}; at least 1", global_count);
  }
  for (int64_t t = 0; IsHost(ctx) && t < rows; ++t) {
    if (mask[t] > 1)
      return InvalidArgument("cross_entropy: the mask of token {} is {}; 0 or 1", t, mask[t]);
  }
  return Ok();
}

float WeightOf(const float* weight, int64_t t, int64_t global_count) {
  const float share = static_cast<float>(1.0 / static_cast<double>(global_count));
  return weight == nullptr ? share : weight[t] * share;
}

}  // namespace

Status Forward(const Ctx& ctx, const Params& params, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("cross_entropy", ctx));
  TARE_RETURN_IF_ERROR(Check(ctx, args.rows, args.mask, args.global_count));
  TARE_RETURN_IF_ERROR(CheckUnits(args.units, args.rows).Annotate("cross_entropy"));
  TARE_RETURN_IF_ERROR(CheckPointer("cross_entropy", "logprob", args.logprob, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("cross_entropy", "loss", args.loss, args.rows));
  TARE_WITH_CUDA_RETURN("cross_entropy", ctx, ForwardCuda(ctx, params, args));
  (void)params;
  std::vector<float> losses(static_cast<size_t>(args.rows), 0.0f);
  for (int64_t t = 0; t < args.rows; ++t) {
    if (args.mask[t] == 0) continue;
    const float loss = -(args.logprob[t] * WeightOf(args.weight, t, args.global_count));
    if (!std::isfinite(loss)) {
      return InvalidArgument("cross_entropy: the loss of token {} is not finite (logprob {})", t,
                             args.logprob[t]);
    }
    losses[static_cast<size_t>(t)] = loss;
  }
  if (args.token_loss != nullptr) std::copy(losses.begin(), losses.end(), args.token_loss);
  for (const TokenUnit& unit : args.units) {
    *args.loss +=
        static_cast<double>(numerics::LanesSum<32>(losses.data() + unit.begin, unit.rows));
  }
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("cross_entropy", ctx));
  TARE_RETURN_IF_ERROR(Check(ctx, args.rows, args.mask, args.global_count));
  TARE_RETURN_IF_ERROR(CheckPointer("cross_entropy", "dlogprob", args.dlogprob, args.rows));
  TARE_WITH_CUDA_RETURN("cross_entropy", ctx, BackwardCuda(ctx, params, args));
  (void)params;
  for (int64_t t = 0; t < args.rows; ++t) {
    const bool valid = args.mask[t] != 0;
    const float d = valid ? -(WeightOf(args.weight, t, args.global_count) * args.dloss) : 0.0f;
    if (!std::isfinite(d))
      return InvalidArgument("cross_entropy: the gradient of token {} is not finite", t);
    args.dlogprob[t] = d;
  }
  return Ok();
}

}  // namespace tare::ops::cross_entropy
