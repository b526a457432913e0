#pragma once

// The model once more, in plain differentiable arithmetic: textbook formulas in one floating-point
// type without intermediate rounding, forward and backward, one sequence after another. It shares
// no operator, no tree and no elementary function with the product, on purpose:
//   PlainModel<double>  the witness of the gradient audit (trainer/audit.h)
//   PlainModel<float>   what stands behind the surrogate arm of finetuning
// It reads the product's parameters and their fused layout, and the routers' decisions, which a
// witness may not make anew. It uses the C library's functions and promises no bits: no value of it
// reaches a model that is delivered.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "models/model.h"
#include "tensor/tap.h"

namespace tare::trainer {

// By layer: the chosen experts of all rows of a batch in order, top_k each.
using RouterDecisions = std::map<int, std::vector<int32_t>>;

// Collects them from a forward, and hands everything on to another tap (which may be null).
class DecisionTap : public Tap {
 public:
  explicit DecisionTap(Tap* next) : next_(next) {}
  void BeginFrame(const TapFrame& frame) override;
  void Emit(const TapPoint& point, const Tensor& value) override;
  void EndFrame() override;
  RouterDecisions decisions;

 private:
  Tap* next_;
};

template <typename Real>
class PlainModel {
 public:
  struct Run {
    std::span<const int32_t> tokens;  // the last one is a target only
    int64_t prompt_tokens = 1;        // targets are tokens [prompt_tokens, size)
    double temperature = 1.0;
    std::span<const Real> dlogprob;  // one per target; empty: no backward
  };

  // kUnsupported: a rope scaling, or a device other than the CPU.
  static Result<PlainModel> Create(ThreadPool* pool, const models::Model& model);

  // The weights as they are now; exact.
  void Load(const models::Model& model);
  void ZeroGradients();
  // From here on what an operator hands on to the next, forward and backward, is rounded to one of
  // the two bf16 beside it, drawn by `seed` with the nearer one the likelier: what is left of a
  // gradient when its model keeps its activations in bf16, whoever's code it is. nullopt: nothing
  // is rounded, as at first.
  void KeepInBf16(std::optional<uint64_t> seed) { seed_ = seed; }
  // Logprobs of the targets, one list per run; adds the gradients of the runs that have a dlogprob.
  Result<std::vector<std::vector<Real>>> Compute(std::span<const Run> runs,
                                                 const RouterDecisions& decisions);

  // The experts that the last Compute sent rows to, noted where it did so: what the witness used,
  // to be held against what the product decided.
  const RouterDecisions& used_decisions() const { return used_; }

  const std::vector<Real>& weight(int parameter) const { return weights_[at(parameter)]; }
  std::vector<Real>& mutable_weight(int parameter) { return weights_[at(parameter)]; }
  // In the shape of the parameter; empty before ZeroGradients.
  const std::vector<Real>& gradient(int parameter) const { return gradients_[at(parameter)]; }

 private:
  using Vec = std::vector<Real>;
  struct Layer;   // what backward reads of one layer
  struct Expert;  // of one routed row
  PlainModel(ThreadPool* pool, const models::Model& model);
  static size_t at(int parameter) { return static_cast<size_t>(parameter); }

  void Linear(const Vec& x, int64_t rows, const Real* w, int64_t n, int64_t k, const Real* bias,
              Vec* y) const;
  // dx is set, dw and dbias are added to.
  void LinearBackward(const Vec& dy, int64_t rows, const Vec& x, const Real* w, int64_t n,
                      int64_t k, Vec* dx, Real* dw, Real* dbias) const;
  void Norm(const Real* x, int64_t width, const Vec& w, Real* rstd, Real* y) const;
  void NormBackward(const Real* x, int64_t width, const Vec& w, Real rstd, const Real* dy, Real* dx,
                    Real* dw) const;
  void Rotate(Real* x, int64_t position, bool back) const;
  void Attention(int64_t layer, int64_t rows, Layer* s);
  void AttentionBackward(int64_t layer, int64_t rows, const Layer& s, const Vec& dout, Vec* dqkv);
  void Experts(int64_t layer, int64_t rows, const int32_t* ids, Layer* s, Vec* out) const;
  void ExpertsBackward(int64_t layer, int64_t rows, const int32_t* ids, const Layer& s,
                       const Vec& dout, Vec* dx);
  void Gate(const Vec& gate_up, int64_t rows, int64_t width, Vec* act) const;
  void GateBackward(const Vec& gate_up, int64_t rows, int64_t width, const Vec& dact,
                    Vec* dgate_up) const;
  void Store(Vec* values);  // as KeepInBf16 says
  const Real* W(int parameter) const {
    return parameter < 0 ? nullptr : weights_[at(parameter)].data();
  }
  Real* G(int parameter) { return parameter < 0 ? nullptr : gradients_[at(parameter)].data(); }

  ThreadPool* pool_;
  models::ModelConfig c_;
  std::vector<models::LayerParameters> ids_;
  int embedding_, final_norm_, head_;
  std::vector<Vec> weights_, gradients_;
  RouterDecisions used_;
  std::optional<uint64_t> seed_;
  uint64_t stored_ = 0;  // calls of Store in this Compute
};

extern template class PlainModel<float>;
extern template class PlainModel<double>;

}  // namespace tare::trainer
