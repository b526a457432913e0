#include "ops/cuda/refusal.h"

#include <cuda_runtime.h>

#include <array>
#include <atomic>

#include "tensor/cuda_status.h"

namespace tare::ops::cuda {
namespace {

__device__ unsigned long long refusal_word = ~0ull;

constexpr int kMostDevices = 64;

Status Describe(unsigned long long word) {
  const int64_t row = static_cast<int64_t>(word >> 32);
  const int64_t column = static_cast<int64_t>((word >> 8) & 0xffffff);
  switch (static_cast<Refusal>(word & 0xff)) {
    case Refusal::kEmbeddingId:
      return InvalidArgument("embedding: row {} has a token ID outside the vocabulary", row);
    case Refusal::kRopePosition:
      return InvalidArgument("rope: row {} is at a position outside the table", row);
    case Refusal::kLogprobTarget:
      return InvalidArgument("logprob: row {} has a target outside [-1, vocabulary)", row);
    case Refusal::kLogprobTemperature:
      return InvalidArgument("logprob: row {} has a temperature that is not finite and above 0",
                             row);
    case Refusal::kSamplingNan:
      return InvalidArgument("sampling: row {} has a NaN logit", row);
    case Refusal::kSamplingMaximum:
      return InvalidArgument("sampling: the largest logit of row {} is not finite", row);
    case Refusal::kSamplingTemperature:
      return InvalidArgument("sampling: row {} has a temperature that is not finite, at least 0",
                             row);
    case Refusal::kSamplingTopK:
      return InvalidArgument("sampling: row {} has a top_k below 0", row);
    case Refusal::kSamplingTopP:
      return InvalidArgument("sampling: row {} has a top_p outside (0, 1]", row);
    case Refusal::kSamplingMinP:
      return InvalidArgument("sampling: row {} has a min_p outside [0, 1]", row);
    case Refusal::kSamplingPosition:
      return InvalidArgument("sampling: row {} is at a position below 0", row);
    case Refusal::kSamplingSample:
      return InvalidArgument("sampling: row {} has a sample index below 0", row);
    case Refusal::kSamplingTarget:
      return InvalidArgument("sampling: row {} has a target outside the vocabulary", row);
    case Refusal::kSamplingEmptySet:
      return InvalidArgument("sampling: the candidate set of row {} is empty", row);
    case Refusal::kRouterNan:
      return InvalidArgument("router: the logit of row {} expert {} is NaN", row, column);
    case Refusal::kRouterId:
      return InvalidArgument("router: row {} slot {} names no expert", row, column);
    case Refusal::kDispatchToken:
      return InvalidArgument("dispatch: row {} names a token outside the input", row);
    case Refusal::kDispatchRow:
      return InvalidArgument("dispatch: row {} slot {} names a row outside the buffer", row,
                             column);
    case Refusal::kCombineRow:
      return InvalidArgument("combine: row {} slot {} names a row outside the buffer", row, column);
    case Refusal::kMask:
      return InvalidArgument("the mask of token {} is neither 0 nor 1", row);
    case Refusal::kSequenceTokens:
      return InvalidArgument("policy_loss: token {} counts, but its sequence has no valid token",
                             row);
    case Refusal::kLossNotFinite:
      return InvalidArgument("policy_loss: the loss of token {} is not finite", row);
    case Refusal::kGradientNotFinite:
      return InvalidArgument("policy_loss: the gradient of token {} is not finite", row);
    case Refusal::kQuantizeNotFinite:
      return InvalidArgument("quantize: row {} column {} is not finite", row, column);
    case Refusal::kCrossEntropyLoss:
      return InvalidArgument("cross_entropy: the loss of token {} is not finite", row);
    case Refusal::kCrossEntropyGradient:
      return InvalidArgument("cross_entropy: the gradient of token {} is not finite", row);
    case Refusal::kGradNormNotFinite:
      return InvalidArgument(
          "grad_norm: the square sum of leaf {} is not finite (leaves of all gradients, in the "
          "order "
          "of names, rows and blocks)",
          row);
  }
  return Error(Code::kInternal, "a kernel left the refusal {:#018x}", word);
}

}  // namespace

Result<unsigned long long*> RefusalWord() {
  static std::array<std::atomic<unsigned long long*>, kMostDevices> known;
  int device = 0;
  TARE_CUDA_RETURN_IF_ERROR(cudaGetDevice(&device));
  if (device < 0 || device >= kMostDevices)
    return Unsupported("CUDA device {}; at most {} are known", device, kMostDevices);
  std::atomic<unsigned long long*>& slot = known[static_cast<size_t>(device)];
  if (slot.load() == nullptr) {
    void* address = nullptr;
    TARE_CUDA_RETURN_IF_ERROR(cudaGetSymbolAddress(&address, refusal_word));
    slot.store(static_cast<unsigned long long*>(address));
  }
  return slot.load();
}

Status TakeRefusal(StreamHandle handle) {
  TARE_ASSIGN_OR_RETURN(unsigned long long* const word, RefusalWord());
  const auto stream = static_cast<cudaStream_t>(handle);
  unsigned long long value = 0;
  TARE_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(&value, word, sizeof(value), cudaMemcpyDeviceToHost, stream));
  TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  if (value == ~0ull) return Ok();
  TARE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(word, 0xff, sizeof(value), stream));
  TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  return Describe(value);
}

}  // namespace tare::ops::cuda
