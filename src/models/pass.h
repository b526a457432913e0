#pragma once

// What Forward and Backward share: a batch on the device, and the layer as a sequence of operators.
// Internal to src/models.

#include <span>
#include <string>
#include <vector>

#include "models/forward.h"

namespace tare::models {

// A batch laid out and copied to the device.
struct Prepared {
  BatchLayout layout;
  Tensor ids;          // i32 [T]; 0 in padding
  Tensor positions;    // i32 [T]; 0 in padding
  Tensor valid;        // u8 [T]
  Tensor block_table;  // i32 [block_rows, max_pages], with a cache
  std::vector<ops::attention::Run> runs;
  int64_t max_keys = 0;
  bool padded = false;
};
// Checks every token, position and block.
Result<Prepared> Prepare(const Model& model, const Batch& batch);

// A host array on `device`.
Result<Tensor> ToDevice(const void* data, DType dtype, Shape shape, Device device);
// Rows `rows` of x [T, W] (contiguous) gathered into out [rows.size(), W].
Status GatherRows(const ops::Ctx& ctx, const Tensor& x, std::span<const int64_t> rows, Tensor* out);
// Row i of `x` to row rows[i] of out [T, W] (-1: nowhere); the others become +0. Others than -1 are
// distinct.
Status ScatterRows(const ops::Ctx& ctx, const Tensor& x, std::span<const int64_t> rows,
                   Tensor* out);
Status SetZero(Tensor* t);

// Names and emits what a forward computed. With a null tap every call is one branch.
class Reporter {
 public:
  Reporter(Tap* tap, const Model& model, const Batch& batch, const Prepared& prepared,
           fault::Side side);
  ~Reporter();
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  bool on() const { return tap_ != nullptr; }
  // Layer -1: `name` as it is; else "layers.N." in front. Inputs are full names.
  void Emit(int layer, const std::string& name, const char* op, const Tensor& value,
            std::vector<std::string> inputs, TapRole role = TapRole::kValue,
            bool reads_history = false);
  // Columns [begin, begin + width) of value [T, W].
  void EmitColumns(int layer, const std::string& name, const char* op, const Tensor& value,
                   int64_t begin, int64_t width, std::vector<std::string> inputs);
  // Routed rows put back in (token, slot) order: [T, top_k * W], zeros where a slot has no expert.
  void EmitSlots(int layer, const std::string& name, const char* op, const Tensor& routed,
                 const ops::dispatch::Plan& plan, std::vector<std::string> inputs);
  std::string Name(int layer, const std::string& name) const;
  void EmitEmbedding(const Model& model, const Prepared& prepared, const Tensor& out);
  // Ends the frame; then the logprobs as a frame of their own, whose rows are the target tokens.
  void EndWithLogprobs(std::span<const float> logprob, std::span<const float> entropy);

 private:
  void Close();

  Tap* tap_;
  const Model& model_;
  const Batch& batch_;
  fault::Side side_;
  bool open_ = false;
};

// The layer that a recompute fills again and again; its memory goes back to the scratch.
struct SpareLayer {
  explicit SpareLayer(Scratch* scratch) : scratch(scratch) {}
  ~SpareLayer() {
    layer.ForEach([this](Tensor* t) { scratch->Recycle(t); });
  }
  SpareLayer(const SpareLayer&) = delete;
  SpareLayer& operator=(const SpareLayer&) = delete;
  Scratch* scratch;
  Tape::Layer layer;
};

// One decoder layer. Buffers come from the scratch, or are kept in `saved` when that is not null.
class LayerPass {
 public:
  LayerPass(const ops::Ctx& ctx, const Model& model, const Batch& batch, const Prepared& prepared,
            Scratch* scratch, Reporter* reporter)
      : ctx_(ctx),
        model_(model),
        config_(model.config()),
        batch_(batch),
        prepared_(prepared),
        scratch_(scratch),
        reporter_(reporter) {}

  // In: `x` [T, H], the output of what came before, and `h` [T, H], the residual stream without it;
  // h undefined: x is the stream itself (after the embedding, or in a recompute).
  // Out: `x` the MLP's output, `h` the stream it is to be added to.
  Status Run(int64_t layer, Tensor* x, Tensor* h, Tape::Layer* saved);
  // A recompute needs what backward reads, not the layer's output: x is then unspecified after Run.
  void set_backward_only() { backward_only_ = true; }

 private:
  Result<Tensor> Buffer(const char* slot, Tensor* keep, DType dtype, Shape shape);
  Status Attention(int64_t layer, const Tensor& x, Tensor* out, Tape::Layer* saved);
  Status Mlp(int64_t layer, const Tensor& x, Tensor* out, Tape::Layer* saved);
  Status Experts(int64_t layer, const Tensor& x, Tensor* out, Tape::Layer* saved);
  Status Linear(const ops::linear::Params& params, int weight, int bias, const Tensor& x,
                Tensor* y);

  const ops::Ctx& ctx_;
  const Model& model_;
  const ModelConfig& config_;
  const Batch& batch_;
  const Prepared& prepared_;
  Scratch* scratch_;
  Reporter* reporter_;
  bool backward_only_ = false;
};

// ctx with a workspace of at least `bytes` from the scratch (CUDA; the CPU needs none).
Result<ops::Ctx> WithWorkspace(const ops::Ctx& ctx, Scratch* scratch, size_t bytes);

// x W^T (+ bias) of one parameter through the linear operator.
Status RunLinear(const ops::Ctx& ctx, const Model& model, const ops::linear::Params& params,
                 int weight, int bias, const void* x, int64_t rows, void* y, Scratch* scratch);

}  // namespace tare::models
