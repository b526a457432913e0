#pragma once

// How a CUDA kernel refuses a value. On the CPU an operator looks at its arguments before it
// writes; on a device the arguments are not there to be looked at without waiting, so the kernel
// does it: a bad row writes nothing that a reader may trust (zeros, or -1 for an index), never
// reads or writes outside its operands, and leaves its name in one word of device memory. Whoever
// synchronises the stream asks for it once. The lowest row wins, as on the CPU.
//
// The word belongs to the device, as CUDA's own sticky errors do: with several streams the reader
// hears of the first refusal of any of them.

#include <cstdint>

#include "base/status.h"
#include "tensor/device.h"

namespace tare::ops::cuda {

enum class Refusal : uint8_t {
  kEmbeddingId = 1,
  kRopePosition,
  kLogprobTarget,
  kLogprobTemperature,
  kSamplingNan,
  kSamplingMaximum,
  kSamplingTemperature,
  kSamplingTopK,
  kSamplingTopP,
  kSamplingMinP,
  kSamplingPosition,
  kSamplingSample,
  kSamplingTarget,
  kSamplingEmptySet,
  kRouterNan,
  kRouterId,
  kDispatchToken,
  kDispatchRow,
  kCombineRow,
  kMask,
  kSequenceTokens,
  kLossNotFinite,
  kGradientNotFinite,
  kQuantizeNotFinite,
  kCrossEntropyLoss,
  kCrossEntropyGradient,
  kGradNormNotFinite,
};

// All ones, or row << 32 | column << 8 | Refusal. Device memory of the calling thread's device.
Result<unsigned long long*> RefusalWord();

// Waits for `stream`, then kInvalidArgument with the operator, row and column of the lowest refusal
// since the last call, or OK. Clears it.
Status TakeRefusal(StreamHandle stream);

}  // namespace tare::ops::cuda
