#include "trainer/plain_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace tare::trainer {
namespace {

// Independent partial sums, so that the compiler may use its vector registers.
template <typename Real>
Real Dot(const Real* a, const Real* b, int64_t n) {
  constexpr int kLanes = 16;
  Real lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lane[j] += a[i + j] * b[i + j];
  }
  Real sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (int j = 0; j < kLanes; ++j) sum += lane[j];
  return sum;
}

template <typename Real>
void AddScaled(Real* to, Real factor, const Real* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

// f(z) and f'(z) of the activation.
template <typename Real>
std::pair<Real, Real> Activate(ops::gate::Activation kind, Real z) {
  const Real half = Real(0.5);
  switch (kind) {
    case ops::gate::Activation::kSilu: {
      const Real s = 1 / (1 + std::exp(-z));
      return {z * s, s * (1 + z * (1 - s))};
    }
    case ops::gate::Activation::kGeluTanh: {
      const Real a = Real(0.7978845608028653559), b = Real(0.044715);
      const Real t = std::tanh(a * (z + b * z * z * z));
      return {half * z * (1 + t),
              half * (1 + t) + half * z * (1 - t * t) * a * (1 + 3 * b * z * z)};
    }
    case ops::gate::Activation::kGeluErf: {
      const Real cdf = half * (1 + std::erf(z * Real(0.7071067811865475244)));
      return {z * cdf, cdf + z * Real(0.3989422804014326779) * std::exp(-half * z * z)};
    }
  }
  return {0, 0};
}

// 32 even bits of a counter (the finisher of SplitMix64).
uint32_t Even(uint64_t counter) {
  counter = (counter ^ (counter >> 30)) * 0xBF58476D1CE4E5B9ull;
  counter = (counter ^ (counter >> 27)) * 0x94D049BB133111EBull;
  return static_cast<uint32_t>((counter ^ (counter >> 31)) >> 32);
}

// One of the two bf16 beside f, the further the rarer.
float RoundAtRandom(float f, uint32_t random) {
  uint32_t word;
  std::memcpy(&word, &f, sizeof word);
  if ((word & 0x7F800000u) == 0x7F800000u) return f;
  word = (word + (random >> 16)) & 0xFFFF0000u;
  std::memcpy(&f, &word, sizeof f);
  return f;
}

}  // namespace

void DecisionTap::BeginFrame(const TapFrame& frame) {
  if (next_ != nullptr) next_->BeginFrame(frame);
}
void DecisionTap::EndFrame() {
  if (next_ != nullptr) next_->EndFrame();
}
void DecisionTap::Emit(const TapPoint& point, const Tensor& value) {
  if (point.role == TapRole::kDiscrete && value.dtype() == DType::kI32) {
    std::vector<int32_t>& ids = decisions[point.layer];
    ids.insert(ids.end(), value.as<int32_t>(), value.as<int32_t>() + value.elements());
  }
  if (next_ != nullptr) next_->Emit(point, value);
}

template <typename Real>
struct PlainModel<Real>::Layer {
  Vec h_in, rstd_in, x_attn;  // stream, 1 / rms, normed
  Vec qkv;                    // as projected
  Vec q, k, rstd_q, rstd_k;   // after head norms and rope
  Vec attn, log_sum;          // attention's output; log of its denominator by row and head
  Vec h_mid, rstd_mid, x_mlp;
  Vec gate_up, act;             // dense
  Vec probs;                    // router: over all experts
  std::vector<Expert> experts;  // rows * top_k
  std::vector<int32_t> used;    // experts in the order in which rows were sent to them
};

template <typename Real>
struct PlainModel<Real>::Expert {
  Vec gate_up, act, out;
  Real weight = 0;
};

template <typename Real>
PlainModel<Real>::PlainModel(ThreadPool* pool, const models::Model& model)
    : pool_(pool),
      c_(model.config()),
      embedding_(model.embedding()),
      final_norm_(model.final_norm()),
      head_(model.head()) {
  for (size_t l = 0; l < c_.layers.size(); ++l)
    ids_.push_back(model.layer(static_cast<int64_t>(l)));
  Load(model);
}

template <typename Real>
Result<PlainModel<Real>> PlainModel<Real>::Create(ThreadPool* pool, const models::Model& model) {
  if (model.device() != Device::kCpu) return Unsupported("the plain model runs on the CPU alone");
  if (model.config().rope.scaling != ops::rope::Scaling::kNone)
    return Unsupported("the plain model has no rope scaling; {} is asked for",
                       ops::rope::ScalingName(model.config().rope.scaling));
  return PlainModel(pool, model);
}

template <typename Real>
void PlainModel<Real>::Load(const models::Model& model) {
  weights_.resize(model.parameters().size());
  for (size_t i = 0; i < weights_.size(); ++i) {
    const Tensor& value = model.parameters()[i].value;
    weights_[i].resize(static_cast<size_t>(value.elements()));
    Real* out = weights_[i].data();
    pool_->ParallelRanges(value.elements(), 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        if (value.dtype() == DType::kF32) {
          out[k] = value.as<float>()[k];
        } else {
          const uint32_t word = static_cast<uint32_t>(value.as<uint16_t>()[k]) << 16;  // bf16
          float f;
          std::memcpy(&f, &word, sizeof f);
          out[k] = f;
        }
      }
    });
  }
}

template <typename Real>
void PlainModel<Real>::Store(Vec* values) {
  if (!seed_) return;
  const uint64_t base = (*seed_ << 40) + (stored_++ << 32);
  pool_->ParallelRanges(
      static_cast<int64_t>(values->size()), 1 << 14, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          Real& v = (*values)[static_cast<size_t>(i)];
          const auto n = static_cast<uint64_t>(i);
          v = RoundAtRandom(static_cast<float>(v), Even((base + n) * 0x9E3779B97F4A7C15ull));
        }
      });
}

template <typename Real>
void PlainModel<Real>::ZeroGradients() {
  gradients_.resize(weights_.size());
  for (size_t i = 0; i < weights_.size(); ++i) gradients_[i].assign(weights_[i].size(), Real(0));
}

template <typename Real>
void PlainModel<Real>::Linear(const Vec& x, int64_t rows, const Real* w, int64_t n, int64_t k,
                              const Real* bias, Vec* y) const {
  y->assign(static_cast<size_t>(rows * n), Real(0));
  pool_->ParallelRanges(n, 32, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t t = 0; t < rows; ++t) {
        (*y)[static_cast<size_t>(t * n + i)] =
            Dot(x.data() + t * k, w + i * k, k) + (bias == nullptr ? Real(0) : bias[i]);
      }
    }
  });
}

template <typename Real>
void PlainModel<Real>::LinearBackward(const Vec& dy, int64_t rows, const Vec& x, const Real* w,
                                      int64_t n, int64_t k, Vec* dx, Real* dw, Real* dbias) const {
  dx->assign(static_cast<size_t>(rows * k), Real(0));
  // A few rows at a time share each row of the weight.
  constexpr int64_t kRows = 8;
  pool_->ParallelRanges((rows + kRows - 1) / kRows, 1, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kRows, last = std::min(rows, end * kRows);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t t = first; t < last; ++t)
        AddScaled(dx->data() + t * k, dy[static_cast<size_t>(t * n + i)], w + i * k, k);
    }
  });
  pool_->ParallelRanges(n, 32, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t t = 0; t < rows; ++t) {
        const Real d = dy[static_cast<size_t>(t * n + i)];
        AddScaled(dw + i * k, d, x.data() + t * k, k);
        if (dbias != nullptr) dbias[i] += d;
      }
    }
  });
}

// y = x / sqrt(mean(x^2) + eps) * w
template <typename Real>
void PlainModel<Real>::Norm(const Real* x, int64_t width, const Vec& w, Real* rstd, Real* y) const {
  *rstd =
      1 / std::sqrt(Dot(x, x, width) / static_cast<Real>(width) + static_cast<Real>(c_.norm_eps));
  for (int64_t i = 0; i < width; ++i) y[i] = x[i] * *rstd * w[static_cast<size_t>(i)];
}

// dx is set, dw added to.
template <typename Real>
void PlainModel<Real>::NormBackward(const Real* x, int64_t width, const Vec& w, Real rstd,
                                    const Real* dy, Real* dx, Real* dw) const {
  Real along = 0;
  for (int64_t i = 0; i < width; ++i) {
    along += dy[i] * w[static_cast<size_t>(i)] * x[i];
    dw[i] += dy[i] * x[i] * rstd;
  }
  const Real pull = along * rstd * rstd * rstd / static_cast<Real>(width);
  for (int64_t i = 0; i < width; ++i)
    dx[i] = dy[i] * w[static_cast<size_t>(i)] * rstd - x[i] * pull;
}

template <typename Real>
void PlainModel<Real>::Rotate(Real* x, int64_t position, bool back) const {
  const int64_t half = c_.rope.rotary_dim / 2;
  const bool split = c_.rope.layout == ops::rope::Layout::kHalfSplit;
  for (int64_t i = 0; i < half; ++i) {
    const double angle =
        static_cast<double>(position) *
        std::pow(c_.rope.theta, -static_cast<double>(i) / static_cast<double>(half));
    const Real cosine = static_cast<Real>(std::cos(angle));
    const Real sine = static_cast<Real>(back ? -std::sin(angle) : std::sin(angle));
    Real& a = x[split ? i : 2 * i];
    Real& b = x[split ? i + half : 2 * i + 1];
    const Real rotated = a * cosine - b * sine;
    b = b * cosine + a * sine;
    a = rotated;
  }
}

template <typename Real>
void PlainModel<Real>::Attention(int64_t layer, int64_t rows, Layer* s) {
  const models::LayerParameters& id = ids_[static_cast<size_t>(layer)];
  const int64_t d = c_.head_dim, width = c_.qkv_width();
  s->q.resize(static_cast<size_t>(rows * c_.q_width()));
  s->k.resize(static_cast<size_t>(rows * c_.kv_width()));
  s->rstd_q.assign(static_cast<size_t>(rows * c_.q_heads), Real(1));
  s->rstd_k.assign(static_cast<size_t>(rows * c_.kv_heads), Real(1));
  for (int64_t t = 0; t < rows; ++t) {
    const auto turn = [&](int64_t heads, int64_t column, int norm, Vec* out, Vec* rstd) {
      for (int64_t h = 0; h < heads; ++h) {
        const Real* from = s->qkv.data() + t * width + column + h * d;
        Real* to = out->data() + (t * heads + h) * d;
        if (norm >= 0) {
          Norm(from, d, weights_[at(norm)], rstd->data() + t * heads + h, to);
        } else {
          std::copy(from, from + d, to);
        }
        Rotate(to, t, false);
      }
    };
    turn(c_.q_heads, 0, id.q_norm, &s->q, &s->rstd_q);
    turn(c_.kv_heads, c_.q_width(), id.k_norm, &s->k, &s->rstd_k);
  }
  Store(&s->q);
  Store(&s->k);
  s->attn.assign(static_cast<size_t>(rows * c_.q_width()), Real(0));
  s->log_sum.assign(static_cast<size_t>(rows * c_.q_heads), Real(0));
  const Real scale = 1 / std::sqrt(static_cast<Real>(d));
  const int64_t window = c_.layers[static_cast<size_t>(layer)].window;
  pool_->ParallelRanges(rows, 4, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      for (int64_t h = 0; h < c_.q_heads; ++h) {
        const int64_t kv = h / (c_.q_heads / c_.kv_heads);
        const int64_t begin = window > 0 ? std::max<int64_t>(0, t + 1 - window) : 0;
        const Real* q = s->q.data() + (t * c_.q_heads + h) * d;
        Vec score(static_cast<size_t>(t + 1 - begin));
        Real most = id.sink >= 0 ? weights_[at(id.sink)][static_cast<size_t>(h)]
                                 : -std::numeric_limits<Real>::infinity();
        for (int64_t j = begin; j <= t; ++j) {
          Real& z = score[static_cast<size_t>(j - begin)];
          z = Dot(q, s->k.data() + (j * c_.kv_heads + kv) * d, d) * scale;
          most = std::max(most, z);
        }
        Real sum =
            id.sink >= 0 ? std::exp(weights_[at(id.sink)][static_cast<size_t>(h)] - most) : Real(0);
        for (const Real z : score) sum += std::exp(z - most);
        Real* out = s->attn.data() + (t * c_.q_heads + h) * d;
        for (int64_t j = begin; j <= t; ++j) {
          const Real p = std::exp(score[static_cast<size_t>(j - begin)] - most) / sum;
          AddScaled(out, p, s->qkv.data() + j * width + c_.q_width() + c_.kv_width() + kv * d, d);
        }
        s->log_sum[static_cast<size_t>(t * c_.q_heads + h)] = most + std::log(sum);
      }
    }
  });
}

template <typename Real>
void PlainModel<Real>::AttentionBackward(int64_t layer, int64_t rows, const Layer& s,
                                         const Vec& dout, Vec* dqkv) {
  const models::LayerParameters& id = ids_[static_cast<size_t>(layer)];
  const int64_t d = c_.head_dim, width = c_.qkv_width(), v_at = c_.q_width() + c_.kv_width();
  const int64_t per = c_.q_heads / c_.kv_heads;
  const Real scale = 1 / std::sqrt(static_cast<Real>(d));
  const int64_t window = c_.layers[static_cast<size_t>(layer)].window;
  dqkv->assign(static_cast<size_t>(rows * width), Real(0));
  Vec dq(s.q.size(), Real(0)), dk(s.k.size(), Real(0));
  // One group of heads shares its keys and values, and is one piece of work.
  pool_->ParallelRanges(c_.kv_heads, 1, [&](int64_t first, int64_t last) {
    for (int64_t kv = first; kv < last; ++kv) {
      for (int64_t h = kv * per; h < (kv + 1) * per; ++h) {
        for (int64_t t = 0; t < rows; ++t) {
          const int64_t begin = window > 0 ? std::max<int64_t>(0, t + 1 - window) : 0;
          const size_t qh = static_cast<size_t>(t * c_.q_heads + h);
          const Real* q = s.q.data() + qh * static_cast<size_t>(d);
          const Real* g = dout.data() + qh * static_cast<size_t>(d);
          const Real along = Dot(g, s.attn.data() + qh * static_cast<size_t>(d), d);
          for (int64_t j = begin; j <= t; ++j) {
            const Real* key = s.k.data() + (j * c_.kv_heads + kv) * d;
            const Real* value = s.qkv.data() + j * width + v_at + kv * d;
            const Real p = std::exp(Dot(q, key, d) * scale - s.log_sum[qh]);
            AddScaled(dqkv->data() + j * width + v_at + kv * d, p, g, d);
            const Real dz = p * (Dot(g, value, d) - along) * scale;
            AddScaled(dq.data() + qh * static_cast<size_t>(d), dz, key, d);
            AddScaled(dk.data() + (j * c_.kv_heads + kv) * d, dz, q, d);
          }
          if (id.sink >= 0) {
            const Real p = std::exp(weights_[at(id.sink)][static_cast<size_t>(h)] - s.log_sum[qh]);
            gradients_[at(id.sink)][static_cast<size_t>(h)] -= p * along;
          }
        }
      }
    }
  });
  for (int64_t t = 0; t < rows; ++t) {
    const auto back = [&](int64_t heads, int64_t column, int norm, Vec* d_of, const Vec& rstd) {
      for (int64_t h = 0; h < heads; ++h) {
        Real* g = d_of->data() + (t * heads + h) * d;
        Rotate(g, t, true);
        Real* to = dqkv->data() + t * width + column + h * d;
        if (norm >= 0) {
          NormBackward(s.qkv.data() + t * width + column + h * d, d, weights_[at(norm)],
                       rstd[static_cast<size_t>(t * heads + h)], g, to, G(norm));
        } else {
          std::copy(g, g + d, to);
        }
      }
    };
    back(c_.q_heads, 0, id.q_norm, &dq, s.rstd_q);
    back(c_.kv_heads, c_.q_width(), id.k_norm, &dk, s.rstd_k);
  }
}

template <typename Real>
void PlainModel<Real>::Gate(const Vec& gate_up, int64_t rows, int64_t width, Vec* act) const {
  act->resize(static_cast<size_t>(rows * width));
  for (int64_t t = 0; t < rows; ++t) {
    const Real* g = gate_up.data() + t * 2 * width;
    for (int64_t i = 0; i < width; ++i)
      (*act)[static_cast<size_t>(t * width + i)] =
          Activate(c_.activation, g[i]).first * g[width + i];
  }
}

template <typename Real>
void PlainModel<Real>::GateBackward(const Vec& gate_up, int64_t rows, int64_t width,
                                    const Vec& dact, Vec* dgate_up) const {
  dgate_up->resize(static_cast<size_t>(rows * 2 * width));
  for (int64_t t = 0; t < rows; ++t) {
    const Real* g = gate_up.data() + t * 2 * width;
    Real* d = dgate_up->data() + t * 2 * width;
    for (int64_t i = 0; i < width; ++i) {
      const auto [value, slope] = Activate(c_.activation, g[i]);
      const Real da = dact[static_cast<size_t>(t * width + i)];
      d[i] = da * slope * g[width + i];
      d[width + i] = da * value;
    }
  }
}

template <typename Real>
void PlainModel<Real>::Experts(int64_t layer, int64_t rows, const int32_t* chosen, Layer* s,
                               Vec* out) const {
  const models::LayerParameters& id = ids_[static_cast<size_t>(layer)];
  const int64_t width = c_.expert_intermediate, hidden = c_.hidden;
  Vec logits;
  Linear(s->x_mlp, rows, W(id.router), c_.experts, hidden, nullptr, &logits);
  s->probs.resize(logits.size());
  s->experts.assign(static_cast<size_t>(rows * c_.top_k), Expert{});
  out->assign(static_cast<size_t>(rows * hidden), Real(0));
  for (int64_t t = 0; t < rows; ++t) {
    Real* p = s->probs.data() + t * c_.experts;
    const Real* z = logits.data() + t * c_.experts;
    const Real most = *std::max_element(z, z + c_.experts);
    Real sum = 0, taken = 0;
    for (int64_t e = 0; e < c_.experts; ++e) sum += p[e] = std::exp(z[e] - most);
    for (int64_t e = 0; e < c_.experts; ++e) p[e] /= sum;
    for (int64_t i = 0; i < c_.top_k; ++i) taken += p[chosen[t * c_.top_k + i]];
    const Vec x(s->x_mlp.begin() + t * hidden, s->x_mlp.begin() + (t + 1) * hidden);
    for (int64_t i = 0; i < c_.top_k; ++i) {
      const int64_t e = chosen[t * c_.top_k + i];
      Expert& x_of = s->experts[static_cast<size_t>(t * c_.top_k + i)];
      s->used.push_back(static_cast<int32_t>(e));
      x_of.weight = c_.renormalise ? p[e] / taken : p[e];
      Linear(x, 1, W(id.gate_up) + e * 2 * width * hidden, 2 * width, hidden, nullptr,
             &x_of.gate_up);
      Gate(x_of.gate_up, 1, width, &x_of.act);
      Linear(x_of.act, 1, W(id.down) + e * hidden * width, hidden, width, nullptr, &x_of.out);
      AddScaled(out->data() + t * hidden, x_of.weight, x_of.out.data(), hidden);
    }
  }
}

template <typename Real>
void PlainModel<Real>::ExpertsBackward(int64_t layer, int64_t rows, const int32_t* chosen,
                                       const Layer& s, const Vec& dout, Vec* dx) {
  const models::LayerParameters& id = ids_[static_cast<size_t>(layer)];
  const int64_t width = c_.expert_intermediate, hidden = c_.hidden;
  Vec dlogits(static_cast<size_t>(rows * c_.experts), Real(0));
  Vec dx_experts(static_cast<size_t>(rows * hidden), Real(0));
  for (int64_t t = 0; t < rows; ++t) {
    const Real* g = dout.data() + t * hidden;
    const Vec x(s.x_mlp.begin() + t * hidden, s.x_mlp.begin() + (t + 1) * hidden);
    Vec dweight(static_cast<size_t>(c_.top_k));
    for (int64_t i = 0; i < c_.top_k; ++i) {
      const int64_t e = chosen[t * c_.top_k + i];
      const Expert& x_of = s.experts[static_cast<size_t>(t * c_.top_k + i)];
      dweight[static_cast<size_t>(i)] = Dot(g, x_of.out.data(), hidden);
      Vec dy(g, g + hidden), dact, dgate_up, part;
      for (Real& v : dy) v *= x_of.weight;
      LinearBackward(dy, 1, x_of.act, W(id.down) + e * hidden * width, hidden, width, &dact,
                     G(id.down) + e * hidden * width, nullptr);
      GateBackward(x_of.gate_up, 1, width, dact, &dgate_up);
      LinearBackward(dgate_up, 1, x, W(id.gate_up) + e * 2 * width * hidden, 2 * width, hidden,
                     &part, G(id.gate_up) + e * 2 * width * hidden, nullptr);
      AddScaled(dx_experts.data() + t * hidden, Real(1), part.data(), hidden);
    }
    const Real* p = s.probs.data() + t * c_.experts;
    Real* dz = dlogits.data() + t * c_.experts;
    Real mean = 0;
    for (int64_t i = 0; i < c_.top_k; ++i) {
      const Expert& x_of = s.experts[static_cast<size_t>(t * c_.top_k + i)];
      mean += x_of.weight * dweight[static_cast<size_t>(i)];
    }
    if (!c_.renormalise) {
      for (int64_t e = 0; e < c_.experts; ++e) dz[e] = -p[e] * mean;
    }
    for (int64_t i = 0; i < c_.top_k; ++i) {
      const int64_t e = chosen[t * c_.top_k + i];
      const Real w = s.experts[static_cast<size_t>(t * c_.top_k + i)].weight;
      dz[e] += w * (dweight[static_cast<size_t>(i)] - (c_.renormalise ? mean : Real(0)));
    }
  }
  LinearBackward(dlogits, rows, s.x_mlp, W(id.router), c_.experts, hidden, dx, G(id.router),
                 nullptr);
  AddScaled(dx->data(), Real(1), dx_experts.data(), rows * hidden);
}

template <typename Real>
Result<std::vector<std::vector<Real>>> PlainModel<Real>::Compute(std::span<const Run> runs,
                                                                 const RouterDecisions& decisions) {
  std::vector<Vec> logprobs;
  const int64_t hidden = c_.hidden;
  int64_t first_row = 0;
  used_.clear();
  stored_ = 0;
  for (const Run& run : runs) {
    const int64_t rows = static_cast<int64_t>(run.tokens.size()) - 1;
    const int64_t targets = rows + 1 - run.prompt_tokens;
    if (rows < 1 || run.prompt_tokens < 1 || targets < 1)
      return InvalidArgument("plain model: {} tokens with a prompt of {}", rows + 1,
                             run.prompt_tokens);
    if (!run.dlogprob.empty() &&
        (static_cast<int64_t>(run.dlogprob.size()) != targets || gradients_.empty())) {
      return InvalidArgument("plain model: {} gradients for {} targets", run.dlogprob.size(),
                             targets);
    }
    const auto norm = [&](const Vec& h, int weight, Vec* rstd, Vec* y) {
      rstd->resize(static_cast<size_t>(rows));
      y->resize(h.size());
      for (int64_t t = 0; t < rows; ++t)
        Norm(h.data() + t * hidden, hidden, weights_[at(weight)], rstd->data() + t,
             y->data() + t * hidden);
      Store(y);
    };
    const auto ids_of = [&](size_t layer) -> const int32_t* {
      const auto found = decisions.find(static_cast<int>(layer));
      if (found == decisions.end() ||
          static_cast<int64_t>(found->second.size()) < (first_row + rows) * c_.top_k)
        return nullptr;
      return found->second.data() + first_row * c_.top_k;
    };

    Vec h(static_cast<size_t>(rows * hidden));
    for (int64_t t = 0; t < rows; ++t) {
      const Real* row =
          W(embedding_) + static_cast<int64_t>(run.tokens[static_cast<size_t>(t)]) * hidden;
      std::copy(row, row + hidden, h.begin() + t * hidden);
    }
    std::vector<Layer> layers(c_.layers.size());
    for (size_t l = 0; l < layers.size(); ++l) {
      Layer& s = layers[l];
      const models::LayerParameters& id = ids_[l];
      Vec out;
      s.h_in = h;
      norm(h, id.input_norm, &s.rstd_in, &s.x_attn);
      Linear(s.x_attn, rows, W(id.qkv), c_.qkv_width(), hidden, W(id.qkv_bias), &s.qkv);
      Store(&s.qkv);
      Attention(static_cast<int64_t>(l), rows, &s);
      Store(&s.attn);
      Linear(s.attn, rows, W(id.o), hidden, c_.q_width(), W(id.o_bias), &out);
      Store(&out);
      AddScaled(h.data(), Real(1), out.data(), rows * hidden);
      Store(&h);
      s.h_mid = h;
      norm(h, id.post_norm, &s.rstd_mid, &s.x_mlp);
      if (c_.layers[l].moe) {
        const int32_t* chosen = ids_of(l);
        if (chosen == nullptr)
          return InvalidArgument("plain model: no router decisions for layer {}", l);
        Experts(static_cast<int64_t>(l), rows, chosen, &s, &out);
        std::vector<int32_t>& used = used_[static_cast<int>(l)];
        used.insert(used.end(), s.used.begin(), s.used.end());
      } else {
        Linear(s.x_mlp, rows, W(id.gate_up), 2 * c_.intermediate, hidden, W(id.gate_up_bias),
               &s.gate_up);
        Store(&s.gate_up);
        Gate(s.gate_up, rows, c_.intermediate, &s.act);
        Store(&s.act);
        Linear(s.act, rows, W(id.down), hidden, c_.intermediate, W(id.down_bias), &out);
      }
      Store(&out);
      AddScaled(h.data(), Real(1), out.data(), rows * hidden);
      Store(&h);
    }
    Vec rstd, x;
    norm(h, final_norm_, &rstd, &x);
    // Rows from the last one of the prompt on have a target.
    const int64_t from = run.prompt_tokens - 1;
    const Vec x_of(x.begin() + from * hidden, x.end());
    Vec logits;
    Linear(x_of, targets, W(head_), c_.vocab, hidden, nullptr, &logits);
    Vec logprob(static_cast<size_t>(targets));
    const Real inverse = static_cast<Real>(1 / run.temperature);
    pool_->ParallelRanges(targets, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Real* z = logits.data() + i * c_.vocab;
        for (int64_t v = 0; v < c_.vocab; ++v) z[v] *= inverse;
        const Real most = *std::max_element(z, z + c_.vocab);
        Real sum = 0;
        for (int64_t v = 0; v < c_.vocab; ++v) sum += std::exp(z[v] - most);
        const Real log_sum = most + std::log(sum);
        const int64_t target = run.tokens[static_cast<size_t>(run.prompt_tokens + i)];
        logprob[static_cast<size_t>(i)] = z[target] - log_sum;
        if (run.dlogprob.empty()) continue;
        // In place: the gradient of the logits.
        const Real d = run.dlogprob[static_cast<size_t>(i)] * inverse;
        for (int64_t v = 0; v < c_.vocab; ++v) z[v] = -d * std::exp(z[v] - log_sum);
        z[target] += d;
      }
    });
    logprobs.push_back(std::move(logprob));
    if (run.dlogprob.empty()) {
      first_row += rows;
      continue;
    }

    Vec dx_of, g(static_cast<size_t>(rows * hidden), Real(0)), dnormed(g), branch;
    LinearBackward(logits, targets, x_of, W(head_), c_.vocab, hidden, &dx_of, G(head_), nullptr);
    Store(&dx_of);
    std::copy(dx_of.begin(), dx_of.end(), dnormed.begin() + from * hidden);
    // g becomes the gradient of the stream; each branch adds to it.
    const auto norm_back = [&](const Vec& stream, int weight, const Vec& rms, const Vec& dy,
                               bool add) {
      Vec dx(static_cast<size_t>(hidden));
      for (int64_t t = 0; t < rows; ++t) {
        NormBackward(stream.data() + t * hidden, hidden, weights_[at(weight)],
                     rms[static_cast<size_t>(t)], dy.data() + t * hidden, dx.data(), G(weight));
        for (int64_t i = 0; i < hidden; ++i) {
          Real& to = g[static_cast<size_t>(t * hidden + i)];
          to = (add ? to : Real(0)) + dx[static_cast<size_t>(i)];
        }
      }
      Store(&g);
    };
    norm_back(h, final_norm_, rstd, dnormed, false);
    for (size_t l = layers.size(); l-- > 0;) {
      const Layer& s = layers[l];
      const models::LayerParameters& id = ids_[l];
      if (c_.layers[l].moe) {
        ExpertsBackward(static_cast<int64_t>(l), rows, ids_of(l), s, g, &dnormed);
      } else {
        Vec dact, dgate_up;
        LinearBackward(g, rows, s.act, W(id.down), hidden, c_.intermediate, &dact, G(id.down),
                       G(id.down_bias));
        Store(&dact);
        GateBackward(s.gate_up, rows, c_.intermediate, dact, &dgate_up);
        Store(&dgate_up);
        LinearBackward(dgate_up, rows, s.x_mlp, W(id.gate_up), 2 * c_.intermediate, hidden,
                       &dnormed, G(id.gate_up), G(id.gate_up_bias));
      }
      Store(&dnormed);
      norm_back(s.h_mid, id.post_norm, s.rstd_mid, dnormed, true);
      Vec dattn, dqkv;
      LinearBackward(g, rows, s.attn, W(id.o), hidden, c_.q_width(), &dattn, G(id.o), G(id.o_bias));
      Store(&dattn);
      AttentionBackward(static_cast<int64_t>(l), rows, s, dattn, &dqkv);
      Store(&dqkv);
      LinearBackward(dqkv, rows, s.x_attn, W(id.qkv), c_.qkv_width(), hidden, &dnormed, G(id.qkv),
                     G(id.qkv_bias));
      Store(&dnormed);
      norm_back(s.h_in, id.input_norm, s.rstd_in, dnormed, true);
    }
    for (int64_t t = 0; t < rows; ++t) {
      AddScaled(G(embedding_) + static_cast<int64_t>(run.tokens[static_cast<size_t>(t)]) * hidden,
                Real(1), g.data() + t * hidden, hidden);
    }
    first_row += rows;
  }
  return logprobs;
}

template class PlainModel<float>;
template class PlainModel<double>;

}  // namespace tare::trainer
