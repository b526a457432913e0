#pragma once

// The audit of a device: a whole model runs forward and backward there and again on the CPU, from
// the same weights and tokens, and every bit of every operator's output is compared: what each
// layer hands on, logprobs and entropies, the gradient of the residual stream at each layer, and
// the gradient of every parameter. Agreement means that any of the two may stand for the other;
// disagreement names the first tensor in the order of execution, the operator it came out of, and
// the bits.

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "models/model.h"
#include "ops/op.h"

namespace tare::models {

struct AuditOptions {
  Profile profile = Profile::kSm90Mma;
  bool backward = true;
  // Runs start at multiples of this on both sides.
  int64_t row_align = 16;
  // The sides that planted faults name: the CPU is the trainer's, the device the rollout's.
  fault::Side cpu_side = fault::Side::kTrainer;
  fault::Side device_side = fault::Side::kRollout;
};

struct AuditDifference {
  std::string name, op;
  Shape shape;
  int64_t element = 0;
  uint64_t cpu_bits = 0, device_bits = 0;
  int64_t differing = 0;  // elements of this tensor
};

struct AuditCount {
  int64_t tensors = 0, elements = 0, differing = 0;
};

struct AuditReport {
  AuditCount forward, backward, gradients;
  std::map<std::string, AuditCount> by_op;
  std::vector<AuditDifference> differences;  // one per differing tensor, in order of execution
  double cpu_seconds = 0, device_seconds = 0;
  bool agrees() const { return differences.empty(); }
};

// `make(device)` gives the same model on either device. `sequences`: whole token sequences, each of
// at least two tokens; every next token is a target. Errors: kUnsupported without a device, and
// whatever Forward and Backward refuse.
Result<AuditReport> Audit(ThreadPool* pool,
                          const std::function<Result<Model>(const ModelOptions&)>& make,
                          const std::vector<std::vector<int32_t>>& sequences,
                          const AuditOptions& options = {});

// One decoder layer of Qwen3-8B's shape (hidden 4,096, 32 query and 8 KV heads of 128, q/k norm,
// 12,288 wide) over a vocabulary of `vocab`, with weights from a counter-based generator.
ModelConfig Qwen3LayerConfig(int64_t vocab);
// Every tensor of a configuration, bell-shaped with a standard deviation of 1 / sqrt(fan in), norms
// near 1: for shapes whose real weights are not at hand.
Result<std::vector<std::pair<std::string, Tensor>>> RandomTensors(const ModelConfig& config,
                                                                  uint64_t seed);

}  // namespace tare::models
