#include "trainer/audit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>

#include "base/env.h"
#include "base/sha256.h"
#include "models/mini.h"
#include "models/model.h"
#include "tensor/checkpoint.h"
#include "trainer/plain_model.h"
#include "trainer/trainer.h"

namespace tare::trainer {
namespace {

using models::Model;
using models::ModelConfig;

constexpr float kClipLow = 0.2f, kClipHigh = 0.28f, kDual = 3.0f;

Result<std::unique_ptr<Trainer>> MakeTrainer(ThreadPool* pool, const AuditInput& input, DType dtype,
                                             int64_t micro_batch_tokens) {
  ModelConfig c = input.config;
  c.dtype = c.residual_dtype = c.rope.dtype = dtype;
  models::ModelOptions model_options;
  model_options.side = fault::Side::kTrainer;
  model_options.max_positions = 128;
  TARE_ASSIGN_OR_RETURN(Model model, Model::FromTensors(pool, c, input.tensors, model_options));
  Options options;
  options.micro_batch_tokens = micro_batch_tokens;
  options.max_gradient_norm = 0.05f;
  options.adamw.weight_decay = 0.1f;
  options.adamw.eps = 1e-4f;  // small against some gradients, large against others
  return Trainer::Create(pool, std::move(model), options);
}

std::vector<Sequence> Data(int64_t vocab) {
  std::vector<Sequence> list;
  const int lengths[] = {14, 23, 37};
  for (int i = 0; i < 3; ++i) {
    Sequence s;
    s.name = fmt::format("audit{}", i);
    s.prompt_tokens = 2 + 3 * i;
    for (int t = 0; t < lengths[i]; ++t) {
      s.tokens.push_back(
          static_cast<int32_t>((int64_t{i} * 131 + int64_t{t} * t * 17 + t * 53 + 7) % vocab));
    }
    s.temperature = i == 1 ? 0.8f : 1.0f;
    s.advantage = i == 1 ? -1.25f : i == 0 ? 0.75f : 0.5f;
    s.mask.assign(static_cast<size_t>(s.targets()), 1);
    for (size_t t = 1; t < s.mask.size(); t += 3 + static_cast<size_t>(i)) s.mask[t] = 0;
    list.push_back(std::move(s));
  }
  return list;
}

// Old logprobs from the reference's own: ratios exp(0.3), exp(-0.4), exp(0.1), exp(1.4) and so on,
// none near an edge of a clip, so that a rounding does not choose the branch. Masked slots hold
// what must not be read.
void PutOld(const std::vector<std::vector<double>>& logprob, std::vector<Sequence>* list) {
  const double offsets[] = {0.3, -0.4, 0.1, -0.1, 1.4, 0.05};
  size_t k = 0;
  for (size_t i = 0; i < list->size(); ++i) {
    Sequence& s = (*list)[i];
    s.old_logprob.clear();
    for (size_t t = 0; t < s.mask.size(); ++t, ++k) {
      const double old = logprob[i][t] - offsets[k % std::size(offsets)];
      s.old_logprob.push_back(s.mask[t] != 0 ? static_cast<float>(old)
                              : k % 2 == 0   ? std::numeric_limits<float>::quiet_NaN()
                                             : -200.0f);
    }
  }
}

// Loss and its gradient by logprob, in f64 from the formulas.
double LossOf(const std::string& kind, const std::vector<Sequence>& list,
              const std::vector<std::vector<double>>& logprob,
              std::vector<std::vector<double>>* gradient) {
  double valid = 0, loss = 0;
  for (const Sequence& s : list)
    valid += static_cast<double>(std::count(s.mask.begin(), s.mask.end(), 1));
  gradient->clear();
  for (size_t i = 0; i < list.size(); ++i) {
    const Sequence& s = list[i];
    const double own = static_cast<double>(std::count(s.mask.begin(), s.mask.end(), 1));
    std::vector<double>& g = gradient->emplace_back(s.mask.size(), 0.0);
    for (size_t t = 0; t < s.mask.size(); ++t) {
      if (s.mask[t] == 0) continue;
      if (kind == "cross-entropy") {
        loss -= logprob[i][t] / valid;
        g[t] = -1 / valid;
        continue;
      }
      const double weight =
          kind == "grpo" ? 1 / (static_cast<double>(list.size()) * own) : 1 / valid;
      const double ratio = std::exp(logprob[i][t] - static_cast<double>(s.old_logprob[t]));
      const double a = s.advantage;
      const double low = 1 - static_cast<double>(kClipLow),
                   high = 1 + static_cast<double>(kClipHigh);
      const double clipped = std::clamp(ratio, low, high) * a;
      double value = -ratio * a, slope = -ratio * a;
      if (clipped < ratio * a) value = -clipped, slope = 0;
      if (a < 0 && value > -static_cast<double>(kDual) * a)
        value = -static_cast<double>(kDual) * a, slope = 0;
      loss += value * weight;
      g[t] = slope * weight;
    }
  }
  return loss;
}

AuditRow Compare(const std::string& name, const float* g, const std::vector<double>& want,
                 double tolerance) {
  AuditRow row;
  row.name = name;
  row.elements = static_cast<int64_t>(want.size());
  bool any = false;  // a reference that is zero throughout is no witness
  for (size_t k = 0; k < want.size(); ++k) {
    const double d = static_cast<double>(g[k]) - want[k];
    any = any || want[k] != 0;
    row.equal_bits += g[k] == static_cast<float>(want[k]);
    if (std::fabs(d) > row.worst || row.worst_at < 0)
      row.worst = std::fabs(d), row.worst_at = static_cast<int64_t>(k);
  }
  row.error = GradientError(g, want);
  row.within = any && row.error <= tolerance;
  return row;
}

ops::policy_loss::Params PolicyOf(const std::string& kind) {
  ops::policy_loss::Params p;
  p.clip_low = kClipLow;
  p.clip_high = kClipHigh;
  p.dual_clip = kDual;
  p.normalise =
      kind == "grpo" ? ops::policy_loss::Normalise::kSequence : ops::policy_loss::Normalise::kToken;
  return p;
}

// Two updates from the trainer's own gradients, followed in f64.
Status AuditSteps(Trainer* t, const std::vector<Sequence>& list, AuditReport* report) {
  const double beta1 = static_cast<double>(t->options().adamw.beta1),
               beta2 = static_cast<double>(t->options().adamw.beta2),
               eps = static_cast<double>(t->options().adamw.eps);
  const double decay = static_cast<double>(t->options().adamw.weight_decay),
               most = static_cast<double>(t->options().max_gradient_norm);
  const size_t count = t->masters().size();
  std::vector<std::vector<double>> w(count), m(count), v(count);
  for (size_t i = 0; i < count; ++i) {
    const float* master = t->masters()[i].as<float>();
    w[i].assign(master, master + t->masters()[i].elements());
    m[i].assign(w[i].size(), 0);
    v[i] = m[i];
  }
  for (int step = 1; step <= 2; ++step) {
    if (step > 1)
      TARE_RETURN_IF_ERROR(t->Accumulate(list, Loss::kCrossEntropy, {}, "audit").status());
    double square = 0;
    for (size_t i = 0; i < count; ++i) {
      const Tensor& g = t->gradient(static_cast<int>(i));
      for (int64_t k = 0; k < g.elements(); ++k)
        square += static_cast<double>(g.as<float>()[k]) * static_cast<double>(g.as<float>()[k]);
    }
    const double factor = std::min(1.0, most / (std::sqrt(square) + 1e-6));
    const float rate = step == 1 ? 1e-3f : 4e-4f;
    const double lr = static_cast<double>(rate);
    std::vector<std::vector<float>> gradients;
    for (size_t i = 0; i < count; ++i) {
      const Tensor& g = t->gradient(static_cast<int>(i));
      gradients.emplace_back(g.as<float>(), g.as<float>() + g.elements());
    }
    TARE_ASSIGN_OR_RETURN(const StepReport done, t->Apply(rate));
    if (done.skipped) {
      report->refused = done.skipped_why;
      return Ok();
    }
    for (size_t i = 0; i < count; ++i) {
      const models::Parameter& p = t->model().parameters()[i];
      const bool decays =
          p.kind == models::ParameterKind::kLinear || p.kind == models::ParameterKind::kEmbedding;
      AuditRow row;
      row.name = fmt::format("{}, update {}", p.name, step);
      row.elements = static_cast<int64_t>(w[i].size());
      const float* master = t->masters()[i].as<float>();
      const float* deployed = p.value.as<float>();
      bool copied = true;
      for (size_t k = 0; k < w[i].size(); ++k) {
        const double g = static_cast<double>(gradients[i][k]) * factor;
        m[i][k] = beta1 * m[i][k] + (1 - beta1) * g;
        v[i][k] = beta2 * v[i][k] + (1 - beta2) * g * g;
        const double a = m[i][k] / (1 - std::pow(beta1, step)),
                     b = v[i][k] / (1 - std::pow(beta2, step));
        w[i][k] = w[i][k] * (1 - (decays ? lr * decay : 0)) - lr * a / (std::sqrt(b) + eps);
        const double off = std::fabs(static_cast<double>(master[k]) - w[i][k]);
        const double units = off / (1e-3 * lr + 2.4e-7 * std::fabs(w[i][k]));
        row.equal_bits += master[k] == static_cast<float>(w[i][k]);
        if (!(units <= row.error) || row.worst_at < 0)
          row.error = units, row.worst = off, row.worst_at = static_cast<int64_t>(k);
        copied =
            copied && std::bit_cast<uint32_t>(deployed[k]) == std::bit_cast<uint32_t>(master[k]);
        w[i][k] = static_cast<double>(master[k]);  // the next update starts from what is there
      }
      row.within = row.error <= 1 && copied;
      report->step.push_back(std::move(row));
    }
  }
  return Ok();
}

}  // namespace

double GradientError(const float* g, const std::vector<double>& want) {
  double off = 0, size = 0;
  for (size_t k = 0; k < want.size(); ++k) {
    if (!std::isfinite(g[k])) return std::numeric_limits<double>::infinity();
    const double d = static_cast<double>(g[k]) - want[k];
    off += d * d;
    size += want[k] * want[k];
  }
  return size > 0 ? std::sqrt(off / size) : off > 0 ? 1 : 0;
}

Result<AuditInput> MiniAuditInput() {
  AuditInput input;
  input.config = models::MiniConfig();
  TARE_ASSIGN_OR_RETURN(input.tensors, models::MiniTensors());
  return input;
}

Result<AuditInput> CheckpointAuditInput(const std::string& path, int64_t layers) {
  TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(path));
  AuditInput input;
  TARE_ASSIGN_OR_RETURN(input.config, models::ParseConfig(checkpoint.config().raw));
  if (layers < 0 || layers > static_cast<int64_t>(input.config.layers.size())) {
    return InvalidArgument("{} layers of {}", layers, input.config.layers.size());
  }
  if (layers > 0) input.config.layers.resize(static_cast<size_t>(layers));
  for (const auto& [name, shape] : Model::TensorShapes(input.config)) {
    TARE_ASSIGN_OR_RETURN(Tensor tensor, checkpoint.Get(name));
    input.tensors.emplace_back(name, std::move(tensor));
  }
  return input;
}

Result<std::vector<AuditReport>> Audit(ThreadPool* pool, const AuditInput& input) {
  constexpr int64_t kWhole = 1 << 20;
  TARE_ASSIGN_OR_RETURN(const auto trainer, MakeTrainer(pool, input, DType::kF32, kWhole));
  TARE_ASSIGN_OR_RETURN(const auto cut, MakeTrainer(pool, input, DType::kF32, 1));
  TARE_ASSIGN_OR_RETURN(const auto narrow, MakeTrainer(pool, input, DType::kBF16, kWhole));
  TARE_ASSIGN_OR_RETURN(PlainModel<double> plain,
                        PlainModel<double>::Create(pool, trainer->model()));
  const std::vector<models::Parameter>& parameters = trainer->model().parameters();
  std::vector<Sequence> list = Data(input.config.vocab);
  // The routers' decisions are the trainer's: the witness may not decide anew.
  const auto decide = [&](Trainer* t) -> Result<RouterDecisions> {
    DecisionTap tap(nullptr);
    TARE_RETURN_IF_ERROR(t->Score(list, "audit", &tap).status());
    return std::move(tap.decisions);
  };
  TARE_ASSIGN_OR_RETURN(const RouterDecisions decisions, decide(trainer.get()));
  TARE_ASSIGN_OR_RETURN(const RouterDecisions narrow_decisions, decide(narrow.get()));
  const auto runs_of = [&](const std::vector<std::vector<double>>* gradient) {
    std::vector<PlainModel<double>::Run> runs;
    runs.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      runs.push_back({list[i].tokens, list[i].prompt_tokens,
                      static_cast<double>(list[i].temperature),
                      gradient == nullptr ? std::span<const double>()
                                          : std::span<const double>((*gradient)[i])});
    }
    return runs;
  };
  TARE_ASSIGN_OR_RETURN(const auto logprob, plain.Compute(runs_of(nullptr), decisions));
  PutOld(logprob, &list);

  std::vector<AuditReport> reports;
  for (const char* kind : {"grpo", "token-mean", "cross-entropy"}) {
    AuditReport report;
    report.loss = kind;
    std::vector<std::vector<double>> gradient;
    report.value64 = LossOf(kind, list, logprob, &gradient);
    plain.ZeroGradients();
    TARE_RETURN_IF_ERROR(plain.Compute(runs_of(&gradient), decisions).status());
    Sha256 digest;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::vector<double>& g = plain.gradient(static_cast<int>(i));
      digest.Update(g.data(), g.size() * sizeof(double));
    }
    report.reference = Hex(digest.Finish());
    const Loss loss = report.loss == "cross-entropy" ? Loss::kCrossEntropy : Loss::kPolicy;
    const auto accumulate = [&](Trainer* t) {
      return t->Accumulate(list, loss, PolicyOf(report.loss), "audit");
    };
    const Result<LossReport> value = accumulate(trainer.get());
    if (!value.ok()) {
      report.refused = value.status().message();
      reports.push_back(std::move(report));
      continue;
    }
    report.value = value->loss;
    report.loss_within = std::fabs(report.value - report.value64) <=
                         kLossTolerance * (1 + std::fabs(report.value64));
    for (size_t i = 0; i < parameters.size(); ++i) {
      report.gradient.push_back(Compare(parameters[i].name,
                                        trainer->gradient(static_cast<int>(i)).as<float>(),
                                        plain.gradient(static_cast<int>(i)), kGradientTolerance));
    }
    const Result<LossReport> again = accumulate(cut.get());
    report.cuts_equal = again.ok() && again->loss == value->loss;
    if (!report.cuts_equal) report.cut_differs = again.ok() ? "the loss" : again.status().message();
    for (size_t i = 0; i < parameters.size() && report.cuts_equal; ++i) {
      const Tensor& a = trainer->gradient(static_cast<int>(i));
      const Tensor& b = cut->gradient(static_cast<int>(i));
      if (std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size_bytes())) != 0) {
        report.cuts_equal = false;
        report.cut_differs = parameters[i].name;
      }
    }
    if (report.loss == "cross-entropy") {
      // bf16 and the optimizer once: they do not know the loss.
      plain.ZeroGradients();
      TARE_RETURN_IF_ERROR(plain.Compute(runs_of(&gradient), narrow_decisions).status());
      TARE_RETURN_IF_ERROR(accumulate(narrow.get()).status());
      for (size_t i = 0; i < parameters.size(); ++i) {
        report.bf16.push_back(Compare(parameters[i].name,
                                      narrow->gradient(static_cast<int>(i)).as<float>(),
                                      plain.gradient(static_cast<int>(i)), kBf16Tolerance));
      }
      TARE_RETURN_IF_ERROR(AuditSteps(trainer.get(), list, &report));
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

bool AuditReport::pass() const { return first_finding().empty(); }

std::string AuditReport::first_finding() const {
  if (!refused.empty()) return "refused: " + refused;
  if (!loss_within) return fmt::format("loss {} against {}", value, value64);
  const std::pair<const char*, const std::vector<AuditRow>*> lists[] = {
      {"gradient", &gradient}, {"bf16 gradient", &bf16}, {"step", &step}};
  for (const auto& [what, rows] : lists) {
    const AuditRow* worst = nullptr;
    for (const AuditRow& row : *rows) {
      if (!row.within && (worst == nullptr || row.error > worst->error)) worst = &row;
    }
    if (worst != nullptr)
      return fmt::format("{} of {}: error {:.3g}", what, worst->name, worst->error);
  }
  if (!cuts_equal) return "micro-batch cuts move bits: " + cut_differs;
  return gradient.empty() ? "nothing was compared" : "";
}

Json AuditReport::ToJson() const {
  const auto rows = [](const std::vector<AuditRow>& list) {
    Json json = Json::array();
    for (const AuditRow& r : list) {
      json.push_back(Json{{"name", r.name},
                          {"elements", r.elements},
                          {"error", r.error},
                          {"worst", r.worst},
                          {"worst_at", r.worst_at},
                          {"equal_bits", r.equal_bits},
                          {"within", r.within}});
    }
    return json;
  };
  return Json{{"loss", loss},
              {"value", value},
              {"value64", value64},
              {"loss_within", loss_within},
              {"cuts_equal", cuts_equal},
              {"refused", refused},
              {"reference_sha256", reference},
              {"gradient", rows(gradient)},
              {"bf16", rows(bf16)},
              {"step", rows(step)},
              {"finding", first_finding()}};
}

}  // namespace tare::trainer
