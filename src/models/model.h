#pragma once

// Model: a configuration and its weights, in the layout that Forward reads.
//
// Weights are stored fused: one tensor for q, k and v, one for gate and up, one per MoE layer for
// all experts. A *parameter* is one such stored tensor: the unit of gradients, moments and updates.
// Its *parts* are the Hugging Face tensors inside it, each a run of whole rows, so that a part is a
// contiguous view. The packed copies that the CPU kernels stream hold the same bits; whoever writes
// to a parameter calls Repack before the next Forward.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fault.h"
#include "base/status.h"
#include "base/thread_pool.h"
#include "models/config.h"
#include "ops/linear/linear.h"
#include "ops/rope/rope.h"
#include "tensor/tensor.h"

namespace tare {
class Checkpoint;
struct WeightHashItem;
}  // namespace tare

namespace tare::models {

struct ParameterPart {
  std::string name;  // "model.layers.3.self_attn.k_proj.weight"
  int64_t row = 0;   // first row inside the parameter
  Shape shape;       // of the part; [rows, ...] or [rows]
};

enum class ParameterKind : uint8_t { kEmbedding, kLinear, kNorm, kBias, kSink };

struct Parameter {
  std::string name;  // "layers.3.qkv": unique, stable; names the gradient too
  ParameterKind kind = ParameterKind::kLinear;
  Tensor value;  // [rows, ...], config.dtype, on the model's device
  std::vector<ParameterPart> parts;
};

// Indices into Model::parameters(); -1 where the model has none.
struct LayerParameters {
  int input_norm = -1, qkv = -1, qkv_bias = -1, q_norm = -1, k_norm = -1, sink = -1;
  int o = -1, o_bias = -1, post_norm = -1;
  int gate_up = -1, gate_up_bias = -1, down = -1, down_bias = -1;  // MoE: [E * 2I, H], [E * H, I]
  int router = -1;
};

struct ModelOptions {
  Device device = Device::kCpu;
  // CPU: keep packed copies (fast, the size of the weights again). Bits are the same without.
  bool pack = true;
  // Rope tables reach this far; 0: config.max_positions. A longer sequence is refused by Forward.
  int64_t max_positions = 0;
  // For the planted faults that act where a table is built.
  fault::Side side = fault::Side::kNone;
};

class Model {
 public:
  Model(Model&&) = default;
  Model& operator=(Model&&) = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // Every tensor of the architecture must be there with its shape, and none besides (rotary buffers
  // and a redundant tied head excepted, the head only if its bytes equal the embedding's):
  // kInvalidArgument lists what is missing or left over. f32 tensors are rounded once to
  // config.dtype. `memory`, when given, is a model that nothing uses any more: parameters of the
  // same shape and dtype take its memory, which is then gone from it. Fresh memory costs several
  // times the copy where the kernel gives what lies idle back to a host. `items`, when given, gets
  // what the weight hash is made of: digests of the parameters' bytes, taken when these had just
  // been written (CPU only).
  static Result<Model> Load(ThreadPool* pool, const Checkpoint& checkpoint,
                            const ModelOptions& options = {}, Model* memory = nullptr,
                            std::vector<WeightHashItem>* items = nullptr);
  // Named tensors (Hugging Face names) instead of a checkpoint.
  static Result<Model> FromTensors(ThreadPool* pool, const ModelConfig& config,
                                   const std::vector<std::pair<std::string, Tensor>>& tensors,
                                   const ModelOptions& options = {});
  // All parameters zero: for a trainer that restores into it.
  static Result<Model> Zeros(ThreadPool* pool, const ModelConfig& config,
                             const ModelOptions& options = {});

  // Names and shapes of the tensors that a configuration has, sorted by name.
  static std::vector<std::pair<std::string, Shape>> TensorShapes(const ModelConfig& config);

  const ModelConfig& config() const { return config_; }
  Device device() const { return options_.device; }
  const std::vector<Parameter>& parameters() const { return parameters_; }
  // A writer fills parameters_[i].value in place and then calls Repack.
  std::vector<Parameter>& mutable_parameters() {
    ++generation_;
    return parameters_;
  }
  // Counts the times that somebody asked to write: a tape of other weights is refused by Backward.
  int64_t generation() const { return generation_; }
  const LayerParameters& layer(int64_t l) const { return layers_[l]; }
  int embedding() const { return embedding_; }
  int final_norm() const { return final_norm_; }
  int head() const { return head_; }  // equals embedding() when tied

  // The model's tensors under their Hugging Face names, sorted by name: views of the storage on the
  // CPU, copies from another device. What a weight hash or a checkpoint is made of. A tied head is
  // not listed.
  Result<std::vector<std::pair<std::string, Tensor>>> NamedTensors() const;

  // Brings the packed copies and the f32 sink logits up to date with the parameters.
  Status Repack(ThreadPool* pool);

  // Internal to Forward and Backward.
  const ops::linear::PackedWeight* packed(int parameter) const;
  const std::vector<ops::linear::PackedWeight>& packed_experts(int parameter) const;
  const Tensor& sink_f32(int64_t layer) const { return sinks_[layer]; }
  const Tensor& rope_cos() const { return rope_cos_; }
  const Tensor& rope_sin() const { return rope_sin_; }
  int64_t max_positions() const { return max_positions_; }

 private:
  ModelConfig config_;
  ModelOptions options_;
  int64_t max_positions_ = 0;
  int64_t generation_ = 0;
  std::vector<Parameter> parameters_;
  std::vector<LayerParameters> layers_;
  int embedding_ = -1, final_norm_ = -1, head_ = -1;
  std::vector<std::vector<ops::linear::PackedWeight>> packed_;  // by parameter; several for experts
  std::vector<Tensor> sinks_;                                   // f32 [q_heads] by layer
  Tensor rope_cos_, rope_sin_;                                  // f32 [max_positions, rotary / 2]

  Model() = default;
  // parameters_ and layers_ from config_, values undefined.
  void Declare();
  static Result<Model> Build(ThreadPool* pool, const ModelConfig& config,
                             const ModelOptions& options, const std::vector<std::string>& names,
                             const std::function<Result<Tensor>(const std::string&)>& get,
                             Model* memory = nullptr, std::vector<WeightHashItem>* items = nullptr);
};

}  // namespace tare::models
