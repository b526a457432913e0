#pragma once

// The gradient and one-step audit: the trainer's gradients of every parameter, and two updates of
// its optimizer, against float64 (trainer/plain_model.h), which shares no operator with them. What
// it asks, in this order, with tolerances that stand here before any result:
//
//   loss      |loss - loss64| <= 1e-3 * (1 + |loss64|)
//   gradient  of each parameter, |g - G| / |G| <= 5e-3 (2-norms). The model runs in f32: what lies
//             between is the short polynomial of attention's exponential, 2^-13 of each
//             probability, and f32 roundings. Random over a dozen places in six layers that is
//             4e-4; ten times it.
//   bf16      the same parameters with bf16 weights and activations: 0.1. A path has some 120
//             roundings of 2^-9: 2.1 %; five times it.
//   cuts      the gradient of one micro-batch and of one sequence each: equal in every bit
//   step      masters after each of two updates from the trainer's own gradient: within 1e-3 of the
//             learning rate and two f32 roundings of the master; the deployed copy is its bf16
//
// The data exercises what the faults need: ratios away from 1 on both sides of the clip, masked
// tokens whose slots hold what no loss may see, sequences of other lengths than a reduction's
// groups, temperatures, shares of valid tokens that differ between micro-batches.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "models/config.h"
#include "tensor/tensor.h"

namespace tare::trainer {

inline constexpr double kGradientTolerance = 5e-3;
inline constexpr double kBf16Tolerance = 0.1;
inline constexpr double kLossTolerance = 1e-3;

// |g - G| / |G| of a gradient `g` (as many elements as `want`) against its reference G in f64; 1
// where the reference is zero and the gradient is not; infinity where any element is not finite.
double GradientError(const float* g, const std::vector<double>& want);

struct AuditRow {
  std::string name;
  int64_t elements = 0;
  double error = 0;        // |g - G| / |G|; of a step: in units of its tolerance
  double worst = 0;        // largest |g - G|
  int64_t worst_at = -1;   // its index
  int64_t equal_bits = 0;  // elements whose f32 is the rounded f64
  bool within = false;
};

struct AuditReport {
  std::string loss;  // "grpo", "token-mean", "cross-entropy"
  double value = 0, value64 = 0;
  bool loss_within = false;
  bool cuts_equal = false;
  std::string cut_differs;  // a parameter, or why the loss was refused
  std::vector<AuditRow> gradient, bf16, step;
  std::string refused;  // the trainer would not give a gradient or a step, and why
  // SHA-256 over the reference's gradient: a fault of the trainer must not move it (C7-02).
  std::string reference;
  bool pass() const;
  std::string first_finding() const;  // empty on a pass
  Json ToJson() const;
};

struct AuditInput {
  models::ModelConfig config;
  std::vector<std::pair<std::string, Tensor>> tensors;  // Hugging Face names
};
// MINI; or the first `layers` layers of a checkpoint (0: all).
Result<AuditInput> MiniAuditInput();
Result<AuditInput> CheckpointAuditInput(const std::string& path, int64_t layers);

// One report per loss.
Result<std::vector<AuditReport>> Audit(ThreadPool* pool, const AuditInput& input);

}  // namespace tare::trainer
