#pragma once

// The one forward of Tare. Prefill, decode, scoring and training call the same function on a ragged
// batch of token runs; what differs is where K and V come from (packed in the batch, or pages of a
// cache) and whether a tape records. No bit of a row depends on the runs beside it, their order,
// the chunk it came in, the page size, `row_align`, the scratch, or whether a tape or a tap is
// present (with ctx.batch_invariance kOn).

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "models/model.h"
#include "ops/attention/attention.h"
#include "ops/dispatch/dispatch.h"
#include "ops/op.h"
#include "ops/units.h"
#include "tensor/tap.h"
#include "tensor/tensor.h"

namespace tare::models {

// K and V of every layer in pages. The cache holds no sequence: which page belongs to whom is the
// block table of each Batch. 2 * layers * num_pages * page_size * kv_heads * head_dim elements.
class KvCache {
 public:
  static Result<KvCache> Create(const ModelConfig& config, int64_t num_pages, int64_t page_size,
                                Device device = Device::kCpu);
  static int64_t BytesPerPage(const ModelConfig& config, int64_t page_size);

  int64_t num_pages() const { return num_pages_; }
  int64_t page_size() const { return page_size_; }
  Tensor& k(int64_t layer) { return k_[layer]; }  // [num_pages, page_size, kv_heads, head_dim]
  Tensor& v(int64_t layer) { return v_[layer]; }

 private:
  int64_t num_pages_ = 0, page_size_ = 0;
  std::vector<Tensor> k_, v_;
};

// Consecutive tokens of one sequence, at absolute positions position, position + 1, ...
struct TokenRun {
  std::span<const int32_t> tokens;
  // Without a cache 0: the run is a whole sequence. With one, the keys before `position` must be in
  // the pages already.
  int64_t position = 0;
  int32_t block_row = 0;  // with a cache: row of Batch::block_table

  // The next token whose logprob is wanted at each row, or -1; as long as `tokens`, or empty for
  // none.
  std::span<const int32_t> targets;
  float temperature = 1.0f;  // of the logprobs; finite and above 0
  // The last rows whose whole logits are wanted: 1 to sample, tokens.size() for all.
  int64_t logit_rows = 0;

  // Read by a tap alone.
  std::string name;     // of the sequence, for people
  TokenHash history{};  // over the tokens before `position`
};

struct Batch {
  std::vector<TokenRun> runs;
  // Pages, or null: K and V are packed in the batch.
  KvCache* cache = nullptr;
  std::span<const int32_t> block_table;  // [block_rows, max_pages], host memory
  int64_t block_rows = 0;
  int64_t max_pages = 0;
  // Runs start at multiples of this many rows, zeros between (16 for the sm90-mma kernels of a
  // GPU).
  int64_t row_align = 1;
  bool entropy = false;  // of the rows with a target
  // What a tap's frame says.
  TapPhase phase = TapPhase::kScore;
  std::string weight_version;
  int64_t step = 0;
};

// Where the rows of a batch lie: run r has rows [row_of_run[r], + tokens) of `rows`.
struct BatchLayout {
  int64_t rows = 0;
  std::vector<int64_t> row_of_run;
};
// kInvalidArgument for an empty run, negative numbers or an overflow.
Result<BatchLayout> LayOut(const Batch& batch);

struct ForwardOutput {
  // One entry per target that is not -1, in order of run and row. Host memory.
  std::vector<float> logprob;
  std::vector<float> entropy;  // when Batch::entropy
  // The rows asked for by logit_rows, in order of run and row: [count, vocab] in logits_dtype on
  // the model's device; undefined when none. Owned by the Scratch: valid until its next use.
  Tensor logits;
};

class Tape;

// Buffers that calls reuse, so that a decode step allocates nothing. One per thread of calls. Also
// the workspace of device kernels.
class Scratch {
 public:
  // Content unspecified. The same slot gives the same memory: what it held before is lost.
  Result<Tensor> Get(const char* slot, DType dtype, Shape shape, Device device);
  int64_t size_bytes() const;
  void Clear() {
    slots_.clear();
    spare_.clear();
  }

  // Whoever fills tape after tape says so once, and gives each back with Recycle when its Backward
  // is done: the next one then takes the same memory. What comes from the kernel anew has to be
  // cleared by it, which costs as much as a tenth of a training step. Content unspecified.
  void KeepTapes() { keep_tapes_ = true; }
  Result<Tensor> Take(DType dtype, Shape shape, Device device);
  void Recycle(Tape* tape);
  void Recycle(Tensor* part);  // of a tape; it becomes empty

 private:
  std::map<std::string, Tensor, std::less<>> slots_;  // grown to the largest use
  bool keep_tapes_ = false;
  std::map<const void*, Tensor> taken_;  // by address: of tapes in use
  std::vector<Tensor> spare_;            // of tapes given back, [elements]
};

struct TapeOptions {
  // Keep only the residual stream at each layer's start, and compute the layer again in Backward.
  // Gradients have the same bits.
  bool recompute = false;
  // Logits up to this size are kept; above it Backward computes them again, row block by row block.
  // Same bits.
  int64_t max_logit_bytes = int64_t{256} << 20;
};

// What Backward needs of a Forward, and no more. Filled by Forward, used once by Backward.
class Tape {
 public:
  explicit Tape(const TapeOptions& options = {}) : options(options) {}

  int64_t size_bytes() const;
  // Calls `call` for every tensor that the tape may hold.
  void ForEach(const std::function<void(Tensor*)>& call);

  // Internal to Forward and Backward.
  struct Layer {
    void ForEach(const std::function<void(Tensor*)>& call);

    Tensor h_in, rstd_in, x_attn;  // residual stream [T, H], its norm
    Tensor qkv;                 // [T, qkv_width]: q and k after rope, or (qk_norm) before the norms
    Tensor qk, rstd_q, rstd_k;  // qk_norm: [T, q_width + kv_width] after rope
    Tensor attn, lse2;
    Tensor h_mid, rstd_mid, x_mlp;
    Tensor gate_up, act;  // [T, 2I], [T, I]; MoE: [R, ...] in routed order
    Tensor router_ids, router_weights, router_probs, expert_out;  // MoE
    Tensor router_logits;      // only under the planted fault router.decision_recomputed
    ops::dispatch::Plan plan;  // MoE
    Tensor token_of, row_of;   // MoE: the plan on the device
  };
  TapeOptions options;
  BatchLayout layout;
  std::vector<Layer> layers;
  Tensor h_final, rstd_final, x_final;
  Tensor logits;                     // of rows with a target, or undefined
  std::vector<int64_t> target_rows;  // rows with a target, ascending
  Tensor max, log_sum, entropy;      // f32, per entry of target_rows
  bool filled = false;
  int64_t generation = 0;  // of the model's weights
};

// Gradients: f32, one tensor per parameter, added to by Backward. `batch_segments` D > 1 keeps one
// slot per contiguous run of the global batch; FinishGradients adds them as a balanced tree. A tied
// embedding has two halves (head first, then table) that FinishGradients adds once.
class Gradients {
 public:
  static Result<Gradients> Zeros(const Model& model, int32_t batch_segments = 1);

  // Slot 0 after FinishGradients: [shape of the parameter].
  const Tensor& of(int parameter) const { return final_[parameter]; }
  std::vector<Tensor>& all() { return final_; }
  Status SetZero();

  // Internal: where Backward adds. For a tied embedding `half` 0 is the head, 1 the table.
  float* slot(int parameter, int32_t batch_segment, int half = 0);

  int32_t batch_segments() const { return batch_segments_; }

 private:
  friend Status FinishGradients(const ops::Ctx& ctx, const Model& model, Gradients* gradients);
  int32_t batch_segments_ = 1;
  int tied_ = -1;                // the tied parameter, or -1
  std::vector<Tensor> storage_;  // [D, halves, count]
  std::vector<Tensor> final_;    // views of slot 0
};

// Runs the model. Errors: kInvalidArgument (a token outside the vocabulary, a position beyond the
// rope tables, a block table that does not cover a run, a NaN router logit: run and row are named),
// kUnsupported (an operator that is not built for the device), kExhausted.
// `tape` needs a batch without cache whose runs start at position 0. `tap` may be null.
Result<ForwardOutput> Forward(const ops::Ctx& ctx, const Model& model, const Batch& batch,
                              Scratch* scratch, Tape* tape = nullptr, Tap* tap = nullptr);

struct LossGradient {
  std::span<const float> dlogprob;  // as ForwardOutput::logprob
  std::span<const float> dentropy;  // as ForwardOutput::entropy, or empty
};

// Adds the gradients of one recorded batch into slot `batch_segment`. Sums over tokens run by units
// (ops/units.h) in the order of the runs: a caller that cuts the global batch into micro-batches in
// order gets the same bits for every cut. The batch and the model must be those of the Forward;
// weights that were opened for writing since are kPrecondition.
Status Backward(const ops::Ctx& ctx, const Model& model, const Batch& batch,
                const LossGradient& loss, Tape* tape, Scratch* scratch, Gradients* gradients,
                int32_t batch_segment = 0, Tap* tap = nullptr);

// Adds the batch segments, then head and table of a tied embedding. Once per optimizer step.
Status FinishGradients(const ops::Ctx& ctx, const Model& model, Gradients* gradients);

}  // namespace tare::models
