#pragma once

// The operators' Params that a configuration implies: one place, so that forward, backward and the
// list of contracts cannot differ.

#include "models/config.h"
#include "ops/attention/attention.h"
#include "ops/combine/combine.h"
#include "ops/dispatch/dispatch.h"
#include "ops/embedding/embedding.h"
#include "ops/gate/gate.h"
#include "ops/grouped_linear/grouped_linear.h"
#include "ops/headnorm/headnorm.h"
#include "ops/kv_cache/kv_cache.h"
#include "ops/linear/linear.h"
#include "ops/logprob/logprob.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"
#include "ops/router/router.h"

namespace tare::models {

inline ops::linear::Params LinearOf(const ModelConfig& c, int64_t n, int64_t k, bool bias) {
  ops::linear::Params p;
  p.n = n;
  p.k = k;
  p.x_dtype = p.w_dtype = p.y_dtype = p.bias_dtype = c.dtype;
  p.bias = bias;
  p.dy_dtype = p.dx_dtype = p.backward_operand = c.dtype;
  return p;
}
// Its input gradient flows into a norm, so it has the dtype of the residual stream's gradient.
inline ops::linear::Params QkvParams(const ModelConfig& c) {
  ops::linear::Params p = LinearOf(c, c.qkv_width(), c.hidden, c.qkv_bias);
  p.parts = {c.q_width(), c.kv_width(), c.kv_width()};
  p.dx_segments = c.segments;
  p.dx_dtype = c.grad_dtype;
  return p;
}
inline ops::linear::Params OParams(const ModelConfig& c) {
  ops::linear::Params p = LinearOf(c, c.hidden, c.q_width(), c.o_bias);
  p.segments = c.segments;
  p.segment_unit = c.head_dim;
  p.dy_dtype = c.grad_dtype;
  return p;
}
inline ops::linear::Params GateUpParams(const ModelConfig& c) {
  ops::linear::Params p = LinearOf(c, 2 * c.intermediate, c.hidden, c.mlp_bias);
  p.parts = {c.intermediate, c.intermediate};
  p.dx_segments = c.segments;
  p.dx_dtype = c.grad_dtype;
  return p;
}
inline ops::linear::Params DownParams(const ModelConfig& c) {
  ops::linear::Params p = LinearOf(c, c.hidden, c.intermediate, c.mlp_bias);
  p.segments = c.segments;
  p.dy_dtype = c.grad_dtype;
  return p;
}
inline ops::linear::Params HeadParams(const ModelConfig& c) {
  ops::linear::Params p = LinearOf(c, c.vocab, c.hidden, false);
  p.y_dtype = c.logits_dtype;
  p.dx_segments = 8;
  p.dx_vocabulary_leaves = true;
  p.dx_dtype = c.grad_dtype;
  return p;
}
inline ops::linear::Params RouterLinearParams(const ModelConfig& c) {
  ops::linear::Params p = LinearOf(c, c.experts, c.hidden, false);
  p.y_dtype = DType::kF32;
  p.dy_dtype = DType::kF32;
  p.dx_dtype = c.grad_dtype;
  return p;
}
inline ops::grouped_linear::Params ExpertGateUpParams(const ModelConfig& c) {
  ops::linear::Params p = LinearOf(c, 2 * c.expert_intermediate, c.hidden, false);
  p.parts = {c.expert_intermediate, c.expert_intermediate};
  p.dx_dtype = c.grad_dtype;
  return {c.experts, p};
}
inline ops::grouped_linear::Params ExpertDownParams(const ModelConfig& c) {
  ops::linear::Params p = LinearOf(c, c.hidden, c.expert_intermediate, false);
  p.dy_dtype = c.grad_dtype;
  return {c.experts, p};
}

inline ops::embedding::Params EmbeddingParams(const ModelConfig& c) {
  return {.vocab = c.vocab,
          .hidden = c.hidden,
          .dtype = c.dtype,
          .table_dtype = c.dtype,
          .grad_dtype = c.grad_dtype};
}
inline ops::rmsnorm::Params NormParams(const ModelConfig& c, bool add_residual) {
  return {.hidden = c.hidden,
          .dtype = c.dtype,
          .weight_dtype = c.dtype,
          .residual_dtype = c.residual_dtype,
          .grad_dtype = c.grad_dtype,
          .eps = c.norm_eps,
          .add_residual = add_residual};
}
inline ops::headnorm::Params HeadNormParams(const ModelConfig& c, int64_t heads) {
  return {.heads = heads,
          .head_dim = c.head_dim,
          .dtype = c.dtype,
          .weight_dtype = c.dtype,
          .grad_dtype = c.dtype,
          .eps = c.norm_eps};
}
inline ops::attention::Params AttentionParams(const ModelConfig& c, const LayerConfig& layer) {
  ops::attention::Params p;
  p.q_heads = c.q_heads;
  p.kv_heads = c.kv_heads;
  p.head_dim = c.head_dim;
  p.dtype = c.dtype;
  // IEEE division and square root: correctly rounded, the same everywhere.
  p.scale = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(c.head_dim)));
  p.window = layer.window;
  p.sink = layer.sink;
  return p;
}
inline ops::kv_cache::Params KvCacheParams(const ModelConfig& c) {
  return {.kv_heads = c.kv_heads, .head_dim = c.head_dim, .dtype = c.dtype};
}
inline ops::gate::Params GateParams(const ModelConfig& c, int64_t width) {
  return {.width = width, .activation = c.activation, .dtype = c.dtype, .grad_dtype = c.dtype};
}
inline ops::router::Params RouterParams(const ModelConfig& c) {
  return {.experts = c.experts,
          .top_k = c.top_k,
          .logits_dtype = DType::kF32,
          .grad_dtype = DType::kF32,
          .renormalise = c.renormalise};
}
inline ops::combine::Params CombineParams(const ModelConfig& c) {
  return {.hidden = c.hidden, .top_k = c.top_k, .dtype = c.dtype, .grad_dtype = c.grad_dtype};
}
inline ops::dispatch::Params DispatchParams(const ModelConfig& c) {
  return {.hidden = c.hidden, .top_k = c.top_k, .dtype = c.dtype, .grad_dtype = c.grad_dtype};
}
inline ops::logprob::Params LogprobParams(const ModelConfig& c) {
  return {.vocab = c.vocab, .logits_dtype = c.logits_dtype, .grad_dtype = c.dtype};
}

}  // namespace tare::models
