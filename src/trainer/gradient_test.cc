// Whole-model gradients and one optimizer step of MINI against float64, written here from the
// formulas (C7-01 to C7-03, C7-09). The reference shares no operator with the product: a plain
// forward in f64, differentiated by central differences along our own gradient, parameter by
// parameter. If g is ours and G the true one, the slope along g / |g| is <G, g> / |g|, which is |g|
// when they agree.
//
// Tolerance, fixed before the first result: 5 % of |g| for each parameter. bf16 rounds by up to
// 2^-9; some sixty roundings lie on a path through six layers, whose random sum is sqrt(60) * 2^-9
// = 1.5 %; three times that. Router decisions are those of the model under test, as the reference
// may not decide anew.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <optional>

#include "models/mini.h"
#include "trainer/plain_model.h"
#include "trainer/trainer.h"

namespace tare::trainer {
namespace {

constexpr double kTolerance = 0.05;
using Vec = std::vector<double>;
using Weights = std::map<std::string, Vec>;

ThreadPool& Pool() {
  static auto* pool = new ThreadPool(2);
  return *pool;
}

// Collects the routers' choices, by layer, rows in the order of the batch.
class Decisions : public Tap {
 public:
  void BeginFrame(const TapFrame&) override {}
  void EndFrame() override {}
  void Emit(const TapPoint& point, const Tensor& value) override {
    if (point.role != TapRole::kDiscrete || value.dtype() != DType::kI32) return;
    std::vector<int32_t>& ids = by_layer[point.layer];
    ids.insert(ids.end(), value.as<int32_t>(), value.as<int32_t>() + value.elements());
  }
  std::map<int, std::vector<int32_t>> by_layer;
};

Vec MatVec(const Vec& w, int64_t rows, const Vec& x) {
  Vec y(static_cast<size_t>(rows), 0.0);
  const size_t k = x.size();
  for (size_t r = 0; r < y.size(); ++r) {
    double sum = 0;
    for (size_t i = 0; i < k; ++i) sum += w[r * k + i] * x[i];
    y[r] = sum;
  }
  return y;
}

Vec Norm(const double* x, size_t n, const Vec& w, double eps) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const double r = 1 / std::sqrt(sum / static_cast<double>(n) + eps);
  Vec y(n);
  for (size_t i = 0; i < n; ++i) y[i] = x[i] * r * w[i];
  return y;
}

void Rotate(double* x, int64_t n, int64_t position, double theta) {
  for (int64_t i = 0; i < n / 2; ++i) {
    const double angle = static_cast<double>(position) *
                         std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(n));
    const double a = x[i], b = x[i + n / 2];
    x[i] = a * std::cos(angle) - b * std::sin(angle);
    x[i + n / 2] = b * std::cos(angle) + a * std::sin(angle);
  }
}

Vec Mlp(const Weights& w, const std::string& prefix, int64_t width, int64_t hidden, const Vec& x) {
  Vec g = MatVec(w.at(prefix + "gate_proj.weight"), width, x);
  const Vec u = MatVec(w.at(prefix + "up_proj.weight"), width, x);
  for (size_t i = 0; i < g.size(); ++i) g[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
  return MatVec(w.at(prefix + "down_proj.weight"), hidden, g);
}

void Add(Vec* to, const Vec& x) {
  for (size_t i = 0; i < x.size(); ++i) (*to)[i] += x[i];
}

// Mean negative logprob of the targets.
double Loss64(const models::ModelConfig& c, const Weights& w,
              const std::vector<Sequence>& sequences,
              const std::map<int, std::vector<int32_t>>& decisions) {
  double loss = 0;
  int64_t count = 0, first_row = 0;
  const size_t d = static_cast<size_t>(c.head_dim), hidden = static_cast<size_t>(c.hidden);
  for (const Sequence& s : sequences) {
    const size_t rows = s.tokens.size() - 1;
    std::vector<Vec> h(rows);
    for (size_t t = 0; t < rows; ++t) {
      const Vec& e = w.at("model.embed_tokens.weight");
      const auto at =
          e.begin() + static_cast<ptrdiff_t>(s.tokens[t]) * static_cast<ptrdiff_t>(hidden);
      h[t].assign(at, at + static_cast<ptrdiff_t>(hidden));
    }
    for (size_t l = 0; l < c.layers.size(); ++l) {
      const std::string p = fmt::format("model.layers.{}.", l);
      std::vector<Vec> q(rows), k(rows), v(rows);
      for (size_t t = 0; t < rows; ++t) {
        const Vec x = Norm(h[t].data(), hidden, w.at(p + "input_layernorm.weight"), c.norm_eps);
        q[t] = MatVec(w.at(p + "self_attn.q_proj.weight"), c.q_width(), x);
        k[t] = MatVec(w.at(p + "self_attn.k_proj.weight"), c.kv_width(), x);
        v[t] = MatVec(w.at(p + "self_attn.v_proj.weight"), c.kv_width(), x);
        for (auto* pair : {&q[t], &k[t]}) {
          const Vec& norm =
              w.at(p + (pair == &q[t] ? "self_attn.q_norm.weight" : "self_attn.k_norm.weight"));
          for (size_t head = 0; head < pair->size() / d; ++head) {
            const Vec y = Norm(pair->data() + head * d, d, norm, c.norm_eps);
            std::copy(y.begin(), y.end(), pair->begin() + static_cast<ptrdiff_t>(head * d));
            Rotate(pair->data() + head * d, c.head_dim, static_cast<int64_t>(t), c.rope.theta);
          }
        }
      }
      const int64_t window = c.layers[l].window;
      for (size_t t = 0; t < rows; ++t) {
        Vec out(static_cast<size_t>(c.q_width()), 0.0);
        for (size_t head = 0; head < static_cast<size_t>(c.q_heads); ++head) {
          const size_t kv = head / static_cast<size_t>(c.q_heads / c.kv_heads);
          const size_t begin = window > 0 && static_cast<int64_t>(t) + 1 > window
                                   ? t + 1 - static_cast<size_t>(window)
                                   : 0;
          Vec weight;
          double sum = c.layers[l].sink ? std::exp(w.at(p + "self_attn.sinks")[head]) : 0.0;
          for (size_t j = begin; j <= t; ++j) {
            double score = 0;
            for (size_t i = 0; i < d; ++i) score += q[t][head * d + i] * k[j][kv * d + i];
            weight.push_back(std::exp(score / std::sqrt(static_cast<double>(d))));
            sum += weight.back();
          }
          for (size_t j = begin; j <= t; ++j) {
            for (size_t i = 0; i < d; ++i)
              out[head * d + i] += weight[j - begin] / sum * v[j][kv * d + i];
          }
        }
        Add(&h[t], MatVec(w.at(p + "self_attn.o_proj.weight"), c.hidden, out));
      }
      for (size_t t = 0; t < rows; ++t) {
        const Vec x =
            Norm(h[t].data(), hidden, w.at(p + "post_attention_layernorm.weight"), c.norm_eps);
        if (!c.layers[l].moe) {
          Add(&h[t], Mlp(w, p + "mlp.", c.intermediate, c.hidden, x));
          continue;
        }
        Vec scores = MatVec(w.at(p + "mlp.gate.weight"), c.experts, x);
        const int32_t* ids = decisions.at(static_cast<int>(l)).data() +
                             (first_row + static_cast<int64_t>(t)) * c.top_k;
        double sum = 0;
        for (int64_t i = 0; i < c.top_k; ++i) sum += std::exp(scores[static_cast<size_t>(ids[i])]);
        for (int64_t i = 0; i < c.top_k; ++i) {
          Vec y = Mlp(w, fmt::format("{}mlp.experts.{}.", p, ids[i]), c.expert_intermediate,
                      c.hidden, x);
          for (double& value : y) value *= std::exp(scores[static_cast<size_t>(ids[i])]) / sum;
          Add(&h[t], y);
        }
      }
    }
    for (size_t t = static_cast<size_t>(s.prompt_tokens) - 1; t < rows; ++t) {
      const Vec logits = MatVec(w.at("lm_head.weight"), c.vocab,
                                Norm(h[t].data(), hidden, w.at("model.norm.weight"), c.norm_eps));
      double sum = 0;
      for (const double z : logits) sum += std::exp(z);
      loss += std::log(sum) - logits[static_cast<size_t>(s.tokens[t + 1])];
      ++count;
    }
    first_row += static_cast<int64_t>(rows);
  }
  return loss / static_cast<double>(count);
}

struct Audit {
  std::map<std::string, double> off;  // by parameter: |slope / |g| - 1|
  double loss = 0, loss64 = 0;
  double worst() const {
    double most = 0;
    for (const auto& [name, value] : off) most = std::max(most, value);
    return most;
  }
};

// `only`: parameters whose name contains it; empty: all.
Audit AuditGradients(const std::string& only = "") {
  models::ModelOptions model_options;
  model_options.side = fault::Side::kTrainer;
  Result<models::Model> model = models::MiniModel(&Pool(), model_options);
  const auto t = Trainer::Create(&Pool(), std::move(model).value(), {}).value();
  const models::ModelConfig& c = t->model().config();
  std::vector<Sequence> sequences;
  for (int i = 0; i < 2; ++i) {
    Sequence s;
    s.prompt_tokens = 2;
    for (int k = 0; k < 13 + 9 * i; ++k)
      s.tokens.push_back((i * 131 + k * 53 + 7) % static_cast<int>(c.vocab));
    sequences.push_back(std::move(s));
  }
  Decisions decisions;
  const Result<LossReport> report =
      t->Accumulate(sequences, Loss::kCrossEntropy, {}, "theta0", &decisions);
  EXPECT_TRUE(report.ok()) << report.status().ToString();
  Weights w;
  for (const auto& [name, tensor] : t->model().NamedTensors().value()) {
    Vec& values = w[name];
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      uint32_t word = static_cast<uint32_t>(tensor.as<uint16_t>()[i]) << 16;
      float value;
      std::memcpy(&value, &word, 4);
      values.push_back(value);
    }
  }
  Audit audit;
  audit.loss = report->loss;
  audit.loss64 = Loss64(c, w, sequences, decisions.by_layer);
  for (size_t i = 0; i < t->model().parameters().size(); ++i) {
    const models::Parameter& p = t->model().parameters()[i];
    if (p.name.find(only) == std::string::npos) continue;
    const Tensor& g = t->gradient(static_cast<int>(i));
    double square = 0;
    for (int64_t k = 0; k < g.elements(); ++k)
      square += static_cast<double>(g.as<float>()[k]) * g.as<float>()[k];
    const double length = std::sqrt(square);
    if (length == 0) {
      audit.off[p.name] = 1;
      continue;
    }
    const double eps = 1e-4;
    const int64_t per_row = g.dim(0) == 0 ? 0 : g.elements() / g.dim(0);
    const auto moved = [&](double by) {
      Weights at = w;
      for (const models::ParameterPart& part : p.parts) {
        Vec& values = at.at(part.name);
        const float* from = g.as<float>() + part.row * per_row;
        for (size_t k = 0; k < values.size(); ++k) values[k] += by * from[k] / length;
      }
      return Loss64(c, at, sequences, decisions.by_layer);
    };
    const double slope = (moved(eps) - moved(-eps)) / (2 * eps);
    audit.off[p.name] = std::fabs(slope / length - 1);
  }
  return audit;
}

TEST(Gradient, WholeModelAgreesWithFloat64) {
  const Audit audit = AuditGradients();
  EXPECT_NEAR(audit.loss, audit.loss64, 0.02);
  EXPECT_GT(audit.off.size(), 40u);
  for (const auto& [name, off] : audit.off) EXPECT_LT(off, kTolerance) << name;
  RecordProperty("worst", fmt::format("{}", audit.worst()));
  fmt::print("{} parameters; largest departure from float64 {:.4f}\n", audit.off.size(),
             audit.worst());
}

// The witness of the audit (trainer/plain_model.h) against the forward written here, which is other
// code: equal logprobs, and its gradient has the slope that differences of this forward have.
TEST(Gradient, TheWitnessAgreesWithDifferences) {
  models::ModelOptions model_options;
  const auto t =
      Trainer::Create(&Pool(), std::move(models::MiniModel(&Pool(), model_options)).value(), {})
          .value();
  const models::ModelConfig& c = t->model().config();
  std::vector<Sequence> list(1);
  list[0].prompt_tokens = 2;
  for (int k = 0; k < 21; ++k)
    list[0].tokens.push_back((k * k * 7 + k * 53 + 7) % static_cast<int>(c.vocab));
  DecisionTap decisions(nullptr);
  ASSERT_TRUE(t->Score(list, "theta0", &decisions).ok());
  PlainModel<double> plain = PlainModel<double>::Create(&Pool(), t->model()).value();
  const size_t targets = static_cast<size_t>(list[0].targets());
  const Vec dlogprob(targets, -1.0 / static_cast<double>(targets));
  const PlainModel<double>::Run run{list[0].tokens, 2, 1.0, dlogprob};
  plain.ZeroGradients();
  const auto logprob = plain.Compute(std::span(&run, 1), decisions.decisions).value();
  // What it sent its rows to is noted by itself: the same here, and its own where it is given other
  // decisions or more of them than it has rows.
  EXPECT_EQ(plain.used_decisions(), decisions.decisions);
  {
    PlainModel<double> other = PlainModel<double>::Create(&Pool(), t->model()).value();
    const PlainModel<double>::Run forward{list[0].tokens, 2, 1.0, {}};
    RouterDecisions given = decisions.decisions;
    ASSERT_FALSE(given.empty());
    std::vector<int32_t>& row = given.begin()->second;
    std::swap(row[0], row[1]);
    ASSERT_TRUE(other.Compute(std::span(&forward, 1), given).ok());
    EXPECT_EQ(other.used_decisions(), given);
    EXPECT_NE(other.used_decisions(), decisions.decisions);
    row.push_back(0);
    ASSERT_TRUE(other.Compute(std::span(&forward, 1), given).ok());
    EXPECT_NE(other.used_decisions(), given);
  }
  // With activations in bf16 it moves, by what bf16 is; a draw is its seed's, and taking the
  // rounding away again gives the bits of before.
  {
    PlainModel<double> other = PlainModel<double>::Create(&Pool(), t->model()).value();
    const auto gradients = [&](std::optional<uint64_t> seed) {
      other.KeepInBf16(seed);
      other.ZeroGradients();
      EXPECT_TRUE(other.Compute(std::span(&run, 1), decisions.decisions).ok());
      std::vector<Vec> out;
      for (size_t i = 0; i < t->model().parameters().size(); ++i)
        out.push_back(other.gradient(static_cast<int>(i)));
      return out;
    };
    const std::vector<Vec> exact = gradients(std::nullopt), one = gradients(1), two = gradients(2);
    EXPECT_EQ(gradients(1), one);
    EXPECT_EQ(gradients(std::nullopt), exact);
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_NE(one[i], exact[i]);
      EXPECT_NE(one[i], two[i]);
      double square = 0, moved = 0;
      for (size_t k = 0; k < exact[i].size(); ++k) {
        square += exact[i][k] * exact[i][k];
        moved += (one[i][k] - exact[i][k]) * (one[i][k] - exact[i][k]);
      }
      const double share = std::sqrt(moved / square);
      EXPECT_GT(share, std::ldexp(1, -10)) << t->model().parameters()[i].name;
      EXPECT_LT(share, 0.25) << t->model().parameters()[i].name;
    }
  }
  Weights w;
  for (const auto& [name, tensor] : t->model().NamedTensors().value()) {
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      const uint32_t word = static_cast<uint32_t>(tensor.as<uint16_t>()[i]) << 16;
      float value;
      std::memcpy(&value, &word, 4);
      w[name].push_back(value);
    }
  }
  double loss = 0;
  for (const double v : logprob[0]) loss -= v / static_cast<double>(targets);
  EXPECT_NEAR(loss, Loss64(c, w, list, decisions.decisions), 1e-10);
  for (size_t i = 0; i < t->model().parameters().size(); ++i) {
    const models::Parameter& p = t->model().parameters()[i];
    const std::vector<double>& g = plain.gradient(static_cast<int>(i));
    double square = 0;
    for (const double v : g) square += v * v;
    const double length = std::sqrt(square), eps = 1e-4;
    ASSERT_GT(length, 0) << p.name;
    const int64_t per_row = p.value.elements() / p.value.dim(0);
    const auto moved = [&](double by) {
      Weights at = w;
      for (const models::ParameterPart& part : p.parts) {
        Vec& values = at.at(part.name);
        for (size_t k = 0; k < values.size(); ++k)
          values[k] += by * g[static_cast<size_t>(part.row * per_row) + k] / length;
      }
      return Loss64(c, at, list, decisions.decisions);
    };
    EXPECT_NEAR((moved(eps) - moved(-eps)) / (2 * eps) / length, 1, 1e-3) << p.name;
  }
}

// Backward faults leave every forward bit as it is and are caught here.
TEST(Gradient, PlantedFaultsAreCaught) {
  const std::pair<const char*, const char*> faults[] = {
      {"gate.detached_forward@trainer", "gate_up"},
      {"rope.gradient_not_rotated_back@trainer", "qkv"},
      {"attention.sink_gradient_missing@trainer", "sink"}};
  for (const auto& [fault, parameter] : faults) {
    const fault::Scoped planted(fault);
    EXPECT_GT(AuditGradients(parameter).worst(), kTolerance) << fault;
  }
}

// One step of AdamW with clip, in float64 from the formula, moments at zero. Tolerance: masters
// within 1e-3 of the learning rate plus one f32 rounding, as only f32 roundings lie between.
double WorstStep(const std::string& planted) {
  const fault::Scoped scope(planted);
  models::ModelOptions model_options;
  model_options.side = fault::Side::kTrainer;
  Options options;
  options.adamw.weight_decay = 0.1f;
  options.max_gradient_norm = 0.05f;
  // Small against some gradients and large against others, so that its place shows.
  options.adamw.eps = 1e-4f;
  const auto t = Trainer::Create(
                     &Pool(), std::move(models::MiniModel(&Pool(), model_options)).value(), options)
                     .value();
  Sequence s;
  for (int k = 0; k < 20; ++k) s.tokens.push_back(k * 17 % 500);
  EXPECT_TRUE(t->Accumulate(std::vector<Sequence>{s}, Loss::kCrossEntropy, {}, "theta0").ok());
  std::vector<Tensor> before;
  double square = 0;
  for (size_t i = 0; i < t->masters().size(); ++i) {
    before.push_back(t->masters()[i].Clone().value());
    const Tensor& g = t->gradient(static_cast<int>(i));
    for (int64_t k = 0; k < g.elements(); ++k)
      square += static_cast<double>(g.as<float>()[k]) * g.as<float>()[k];
  }
  const double factor = std::min(1.0, 0.05 / (std::sqrt(square) + 1e-6)), lr = 1e-3;
  EXPECT_TRUE(t->Apply(1e-3f).ok());
  double worst = 0;
  for (size_t i = 0; i < before.size(); ++i) {
    const models::ParameterKind kind = t->model().parameters()[i].kind;
    const bool decays =
        kind == models::ParameterKind::kLinear || kind == models::ParameterKind::kEmbedding;
    for (int64_t k = 0; k < before[i].elements(); ++k) {
      const double g = t->gradient(static_cast<int>(i)).as<float>()[k] * factor,
                   w = before[i].as<float>()[k];
      // With bias correction the first step's moments are g and g * g.
      const double want = w * (1 - (decays ? lr * 0.1 : 0)) - lr * g / (std::sqrt(g * g) + 1e-4);
      const double off = std::fabs(t->masters()[i].as<float>()[k] - want);
      worst = std::max(worst, off / (1e-3 * lr + 1.2e-7 * std::fabs(w)));
    }
  }
  return worst;
}

TEST(Gradient, OneStepAgreesWithFloat64) {
  const double worst = WorstStep("");
  EXPECT_LT(worst, 1.0);
  for (const char* fault : {"adamw.no_bias_correction@trainer", "adamw.coupled_decay@trainer",
                            "adamw.eps_inside_root@trainer", "grad_norm.clip_by_shard@trainer"}) {
    EXPECT_GT(WorstStep(fault), 1.0) << fault;
  }
}

}  // namespace
}  // namespace tare::trainer
