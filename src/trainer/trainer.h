#pragma once

// Trainer: the side that changes parameters. It scores and trains with the one Forward of
// models/forward.h, so that its logprobs can equal the engine's in every bit; it never includes the
// engine. f32 master weights and moments, a deployed copy in the model's dtype, AdamW, global-norm
// clip. Sequences are in global-batch order; how they are cut into micro-batches moves no bit.

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/sha256.h"
#include "base/status.h"
#include "models/forward.h"
#include "models/model.h"
#include "ops/adamw/adamw.h"
#include "ops/op.h"
#include "ops/policy_loss/policy_loss.h"
#include "ops/trace.h"
#include "tensor/tap.h"

namespace tare::trainer {

template <typename Real>
class PlainModel;

// A prompt and what followed it. The targets are tokens [prompt_tokens, size).
struct Sequence {
  std::string name;
  std::vector<int32_t> tokens;
  int64_t prompt_tokens = 1;       // in [1, tokens.size())
  std::vector<uint8_t> mask;       // one per target, 1 enters the loss; empty: all
  float temperature = 1.0f;        // of the logprobs
  float advantage = 0.0f;          // policy loss
  std::vector<float> old_logprob;  // policy loss, one per target

  int64_t targets() const { return static_cast<int64_t>(tokens.size()) - prompt_tokens; }
};

struct Options {
  Profile profile = Profile::kIeeeF32;
  ops::BatchInvariance batch_invariance = ops::BatchInvariance::kOn;
  int64_t micro_batch_tokens = 4096;  // a micro-batch takes sequences up to this, and at least one
  float max_gradient_norm = 1.0f;     // global-norm clip; 0: none
  // The surrogate arm: the same forward, bit for bit, and behind it the gradients of plain
  // arithmetic (trainer/plain_model.h). A control for finetuning, never a path to deliver.
  bool surrogate = false;
  bool recompute = false;  // backward computes each layer again: less memory, equal bits
  ops::adamw::Params adamw;
};

// What one pass over the sequences gave: one vector per sequence, one value per target.
struct Logprobs {
  std::vector<std::vector<float>> values;
  int64_t forwards = 0;   // model calls
  int64_t launches = 0;   // operator kernels that the trace saw
  int64_t rows = 0;       // token rows computed
  bool recorded = false;  // a tape was recorded: the grad-enabled path
};

struct LossReport {
  double loss = 0;
  int64_t valid_tokens = 0;
  int64_t clipped_tokens = 0;
  int64_t backward_launches = 0;  // operator kernels of the backward walk that the trace saw
  int64_t ratio_not_one = 0;      // valid tokens whose logprob differs in a bit from old_logprob
  Logprobs logprobs;              // of the grad-enabled forward that the gradient belongs to
};

// One parameter's gradient and update.
struct ParameterReport {
  std::string name;
  int64_t elements = 0;
  int64_t gradient_nonzero = 0;
  int64_t gradient_non_finite = 0;
  float gradient_max_abs = 0;
  int64_t master_changed = 0;  // elements whose bits changed in this step
  int64_t deployed_changed = 0;
};

struct StepReport {
  int64_t step = 0;  // after this update
  float lr = 0;
  float gradient_norm = 0;
  float clip_factor = 1;
  bool skipped = false;  // a non-finite gradient: nothing was changed
  std::string skipped_why;
  std::vector<ParameterReport> parameters;
};

enum class Loss : uint8_t { kPolicy, kCrossEntropy };

class Trainer {
 public:
  // Masters start as the exact f32 values of the model's parameters, moments as zero.
  static Result<std::unique_ptr<Trainer>> Create(ThreadPool* pool, models::Model model,
                                                 const Options& options);
  ~Trainer();

  const models::Model& model() const { return model_; }
  const Options& options() const { return options_; }
  int64_t step() const { return step_; }

  // The no-grad path. `version` names the weights in a tap's frames.
  Result<Logprobs> Score(std::span<const Sequence> sequences, const std::string& version,
                         Tap* tap = nullptr);
  // The grad-enabled forward alone: as in Accumulate, the tape recorded and dropped.
  Result<Logprobs> RecordedForward(std::span<const Sequence> sequences, const std::string& version,
                                   Tap* tap = nullptr);
  // Zeroes the gradients, then forward, loss and backward over all sequences. `policy` is read for
  // kPolicy only. kInvalidArgument: lengths that do not fit, no valid token, a non-finite loss.
  Result<LossReport> Accumulate(std::span<const Sequence> sequences, Loss loss,
                                const ops::policy_loss::Params& policy, const std::string& version,
                                Tap* tap = nullptr);
  // Clip, AdamW, deployed copy, packed copies. A non-finite gradient skips the step and says so.
  // `deploy` false leaves the deployed copy as it was, as a planted fault wants it.
  Result<StepReport> Apply(float lr, bool deploy = true);

  // Gradient of a parameter after Accumulate.
  const Tensor& gradient(int parameter) const { return gradients_->of(parameter); }
  models::Gradients& gradients() { return *gradients_; }

  // Canonical hash of the deployed weights (tensor/weight_hash.h), 64 hex digits.
  Result<std::string> DeployedHash() const;
  // The same over the f32 masters, under the parameters' own names.
  Result<std::string> MasterHash() const;

  // State for checkpoints: masters, m and v by parameter, f32.
  std::vector<Tensor>& masters() { return master_; }
  std::vector<Tensor>& first_moments() { return m_; }
  std::vector<Tensor>& second_moments() { return v_; }
  void set_step(int64_t step) { step_ = step; }
  // How long the parts of the last Accumulate took.
  struct Times {
    int64_t forward_ns = 0, loss_ns = 0, backward_ns = 0;
  };
  const Times& times() const { return times_; }
  // After masters were written: the deployed copy and the packed copies follow.
  Status DeployMasters();

 private:
  Trainer(ThreadPool* pool, models::Model model, const Options& options);
  ops::Ctx MakeCtx(ops::LaunchTrace* trace) const;
  struct Pass;
  Status RunPass(std::span<const Sequence> sequences, Pass* pass);

  ThreadPool* pool_;
  models::Model model_;
  Options options_;
  models::Scratch scratch_;
  std::unique_ptr<models::Gradients> gradients_;
  std::vector<Tensor> master_, m_, v_;
  std::unique_ptr<PlainModel<float>> plain_;  // of the surrogate arm
  Times times_;
  int64_t step_ = 0;
};

}  // namespace tare::trainer
