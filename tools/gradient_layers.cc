// C7: gradients of operators, modules and the whole model, and one optimizer step, against float64.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>

#include "base/fault.h"
#include "base/sha256.h"
#include "models/forward.h"
#include "models/model.h"
#include "ops/gate/gate.h"
#include "ops/linear/linear.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rows.h"
#include "tools/backward_facts.h"
#include "tools/backward_subject.h"
#include "trainer/plain_model.h"
#include "trainer/trainer.h"

namespace tare {
namespace {

using models::Model;
using models::ModelConfig;
using Doubles = std::vector<double>;
using Floats = std::vector<float>;

std::string Word(float v) { return fmt::format("0x{:08x}", std::bit_cast<uint32_t>(v)); }
template <typename T>
std::string DigestOf(const std::vector<T>& v) {
  return Hex(
      Sha256Of(std::string_view(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T))));
}

Json Inputs(const std::vector<std::pair<const char*, std::pair<std::string, std::string>>>& list) {
  Json out = Json::object();
  for (const auto& [name, sides] : list)
    out[name] = {{"production", sides.first}, {"reference", sides.second}};
  return out;
}
Json CaseOf(const std::string& where, const char* dtype, Json inputs, Json quantities) {
  return {{"where", where},
          {"production_dtype", dtype},
          {"upstream_dtype", dtype},
          {"upstream_representable", true},
          {"inputs", std::move(inputs)},
          {"quantities", std::move(quantities)}};
}

// ---- operators at the geometry of the model, in f32, against formulas of this file

// Multiples of 1/256 in (-1, 1): exact in f32 and in f64, and in bf16 too.
Floats Values(int64_t count, uint32_t seed) {
  Floats out;
  uint32_t x = seed * 2654435761u + 12345;
  for (int64_t i = 0; i < count; ++i) {
    x = x * 1664525u + 1013904223u;
    out.push_back(static_cast<float>(static_cast<int>((x >> 16) % 255) - 127) / 256);
  }
  return out;
}
Doubles Wide(const Floats& v) { return {v.begin(), v.end()}; }

// What production read, and what the reference did, as f32 words.
using Sides = std::pair<std::string, std::string>;
Sides Read(const Floats& production, const Doubles& reference) {
  return {DigestOf(production), DigestOf(Floats(reference.begin(), reference.end()))};
}

// The case of one operator. What its forward saved is its input, or is made anew from it.
Json OperatorCase(const std::string& where, const Sides& input, const Sides& weights,
                  const Sides& upstream, Json quantities) {
  return CaseOf(
      where, "f32",
      Inputs(
          {{"input", input}, {"weights", weights}, {"saved state", input}, {"upstream", upstream}}),
      std::move(quantities));
}

Result<Json> LinearCase(ThreadPool* pool, const ModelConfig& c) {
  constexpr int64_t kRows = 24;
  const int64_t n = c.hidden, k = c.hidden;
  const Floats x = Values(kRows * k, 1), w = Values(n * k, 2), dy = Values(kRows * n, 3);
  Floats dx(x.size()), dw(w.size());
  ops::linear::Params p;
  p.n = n;
  p.k = k;
  p.x_dtype = p.w_dtype = p.y_dtype = p.bias_dtype = p.dy_dtype = p.dx_dtype = p.backward_operand =
      DType::kF32;
  const std::vector<ops::TokenUnit> units = {{0, kRows}};
  const ops::Ctx ctx = BackwardCtx(pool);
  ops::Ctx with = ctx;
  std::vector<char> workspace(
      static_cast<size_t>(ops::linear::BackwardWorkspaceBytes(ctx, p, kRows, 1)) + 64);
  with.workspace = workspace.data();
  with.workspace_bytes = static_cast<int64_t>(workspace.size());
  ops::linear::BackwardArgs a;
  a.m = kRows;
  a.dy = dy.data();
  a.x = x.data();
  a.w = w.data();
  a.units = units;
  a.dx = dx.data();
  a.dw = dw.data();
  TARE_RETURN_IF_ERROR(ops::linear::Backward(with, p, a));
  const Doubles x64 = Wide(x), w64 = Wide(w), dy64 = Wide(dy);
  Doubles want_x(x.size()), want_w(w.size());
  for (int64_t t = 0; t < kRows; ++t) {
    for (int64_t j = 0; j < n; ++j) {
      const double g = dy64[static_cast<size_t>(t * n + j)];
      for (int64_t i = 0; i < k; ++i) {
        want_x[static_cast<size_t>(t * k + i)] += g * w64[static_cast<size_t>(j * k + i)];
        want_w[static_cast<size_t>(j * k + i)] += g * x64[static_cast<size_t>(t * k + i)];
      }
    }
  }
  return OperatorCase(fmt::format("linear {}x{}x{}", kRows, n, k), Read(x, x64), Read(w, w64),
                      Read(dy, dy64),
                      Json::array({GradientQuantity("dx", "operator", dx, want_x),
                                   GradientQuantity("dw", "operator", dw, want_w)}));
}

Result<Json> NormCase(ThreadPool* pool, const ModelConfig& c) {
  constexpr int64_t kRows = 24;
  const int64_t h = c.hidden;
  const Floats x = Values(kRows * h, 4), w = Values(h, 5), dy = Values(kRows * h, 6);
  Floats y(x.size()), rstd(kRows), dx(x.size()), dw(w.size());
  ops::rmsnorm::Params p;
  p.hidden = h;
  p.dtype = p.weight_dtype = p.residual_dtype = p.grad_dtype = DType::kF32;
  p.eps = c.norm_eps;
  const ops::Ctx ctx = BackwardCtx(pool);
  ops::rmsnorm::Args f;
  f.rows = kRows;
  f.x = x.data();
  f.w = w.data();
  f.y = y.data();
  f.rstd = rstd.data();
  TARE_RETURN_IF_ERROR(ops::rmsnorm::Forward(ctx, p, f));
  const std::vector<ops::TokenUnit> units = {{0, kRows}};
  ops::rmsnorm::BackwardArgs a;
  a.rows = kRows;
  a.h = x.data();
  a.w = w.data();
  a.rstd = rstd.data();
  a.dy = dy.data();
  a.dx = dx.data();
  a.dw = dw.data();
  a.units = units;
  TARE_RETURN_IF_ERROR(ops::rmsnorm::Backward(ctx, p, a));
  const Doubles x64 = Wide(x), w64 = Wide(w), dy64 = Wide(dy);
  Doubles want_x(x.size()), want_w(w.size());
  for (int64_t t = 0; t < kRows; ++t) {
    const auto at = [&](int64_t i) { return static_cast<size_t>(t * h + i); };
    double square = 0, dot = 0;
    for (int64_t i = 0; i < h; ++i) square += x64[at(i)] * x64[at(i)];
    const double r =
        1 / std::sqrt(square / static_cast<double>(h) + static_cast<double>(c.norm_eps));
    for (int64_t i = 0; i < h; ++i) {
      dot += dy64[at(i)] * w64[static_cast<size_t>(i)] * x64[at(i)] * r;
      want_w[static_cast<size_t>(i)] += dy64[at(i)] * x64[at(i)] * r;
    }
    for (int64_t i = 0; i < h; ++i) {
      const double g = dy64[at(i)] * w64[static_cast<size_t>(i)];
      want_x[at(i)] = r * (g - x64[at(i)] * r * dot / static_cast<double>(h));
    }
  }
  // The reference makes its statistic anew from the same input; what was saved is that statistic.
  return OperatorCase(fmt::format("rmsnorm {}x{}", kRows, h), Read(x, x64), Read(w, w64),
                      Read(dy, dy64),
                      Json::array({GradientQuantity("dx", "operator", dx, want_x),
                                   GradientQuantity("dw", "operator", dw, want_w)}));
}

Result<Json> GateCase(ThreadPool* pool, const ModelConfig& c) {
  constexpr int64_t kRows = 24;
  const int64_t n = c.intermediate;
  Floats gate = Values(kRows * n, 7);
  for (float& v : gate) v *= 8;
  const Floats up = Values(kRows * n, 8), dy = Values(kRows * n, 9);
  Floats dgate(gate.size()), dup(up.size());
  ops::gate::Params p;
  p.width = n;
  p.dtype = p.grad_dtype = DType::kF32;
  ops::gate::BackwardArgs a;
  a.rows = kRows;
  a.gate = gate.data();
  a.up = up.data();
  a.dy = dy.data();
  a.dgate = dgate.data();
  a.dup = dup.data();
  TARE_RETURN_IF_ERROR(ops::gate::Backward(BackwardCtx(pool), p, a));
  const Doubles gate64 = Wide(gate), up64 = Wide(up), dy64 = Wide(dy);
  Doubles want_gate(gate.size()), want_up(up.size());
  for (size_t i = 0; i < gate.size(); ++i) {
    const double g = gate64[i], s = 1 / (1 + std::exp(-g));
    want_up[i] = dy64[i] * g * s;
    want_gate[i] = dy64[i] * up64[i] * s * (1 + g * (1 - s));
  }
  return OperatorCase(fmt::format("gate {}x{}", kRows, n), Read(gate, gate64), Read(up, up64),
                      Read(dy, dy64),
                      Json::array({GradientQuantity("dgate", "operator", dgate, want_gate),
                                   GradientQuantity("dup", "operator", dup, want_up)}));
}

// ---- modules and the model, against trainer/plain_model.h

// The questions as the reference takes them. Its runs are spans into this object.
struct Lessons {
  std::vector<std::vector<int32_t>> tokens;  // with the last target, which is a target only
  std::vector<Doubles> upstream;
  std::vector<trainer::PlainModel<double>::Run> runs;

  explicit Lessons(const BackwardQuestions& q) : tokens(q.tokens) {
    auto arriving = q.upstream.begin();
    for (size_t s = 0; s < tokens.size(); ++s) {
      const auto end = arriving + static_cast<std::ptrdiff_t>(tokens[s].size());
      upstream.emplace_back(arriving, end);
      arriving = end;
      tokens[s].push_back(q.targets[s].back());
    }
    for (size_t s = 0; s < tokens.size(); ++s) runs.push_back({tokens[s], 1, 1.0, upstream[s]});
  }
  Lessons(const Lessons&) = delete;
  Lessons& operator=(const Lessons&) = delete;
};

struct Both {
  Json inputs;
  std::vector<std::string> names;
  std::vector<Floats> production;
  std::vector<Doubles> reference;
};

Result<Both> Compute(ThreadPool* pool, const BackwardSubject& subject, DType dtype) {
  TARE_ASSIGN_OR_RETURN(Model model, BackwardModel(pool, subject, dtype));
  const BackwardQuestions q(subject.config.vocab, 0);
  const models::Batch batch = q.MakeBatch();
  const ops::Ctx ctx = BackwardCtx(pool);
  models::Scratch scratch;
  TARE_ASSIGN_OR_RETURN(models::Gradients gradients, models::Gradients::Zeros(model));
  models::Tape tape;
  trainer::DecisionTap tap(nullptr);
  TARE_RETURN_IF_ERROR(models::Forward(ctx, model, batch, &scratch, &tape, &tap).status());
  TARE_RETURN_IF_ERROR(models::Backward(ctx, model, batch, {.dlogprob = q.upstream, .dentropy = {}},
                                        &tape, &scratch, &gradients));
  TARE_RETURN_IF_ERROR(models::FinishGradients(ctx, model, &gradients));

  TARE_ASSIGN_OR_RETURN(auto plain, trainer::PlainModel<double>::Create(pool, model));
  plain.ZeroGradients();
  const Lessons lessons(q);
  TARE_RETURN_IF_ERROR(plain.Compute(lessons.runs, tap.decisions).status());

  Both out;
  Sha256 held, read, tokens_a, tokens_b, decided_a, decided_b;
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    const models::Parameter& p = model.parameters()[i];
    const Tensor& g = gradients.of(static_cast<int>(i));
    out.names.push_back(p.name);
    out.production.emplace_back(g.as<float>(), g.as<float>() + g.elements());
    out.reference.push_back(plain.gradient(static_cast<int>(i)));
    // What each side multiplied with, as f32 words.
    Floats mine(static_cast<size_t>(p.value.elements()));
    for (size_t k = 0; k < mine.size(); ++k) {
      mine[k] = p.value.dtype() == DType::kF32 ? p.value.as<float>()[k]
                                               : ops::ToFloat(p.value.as<uint16_t>()[k]);
    }
    const Doubles& theirs = plain.weight(static_cast<int>(i));
    const Floats narrow(theirs.begin(), theirs.end());
    held.Update(mine.data(), mine.size() * sizeof(float));
    read.Update(narrow.data(), narrow.size() * sizeof(float));
  }
  for (size_t s = 0; s < lessons.runs.size(); ++s) {
    // Rows and their targets, as each side has them.
    tokens_a.Update(batch.runs[s].tokens.data(), batch.runs[s].tokens.size_bytes());
    tokens_a.Update(batch.runs[s].targets.data(), batch.runs[s].targets.size_bytes());
    const std::span<const int32_t> all = lessons.runs[s].tokens;
    tokens_b.Update(all.data(), all.first(all.size() - 1).size_bytes());
    tokens_b.Update(all.data() + 1, all.first(all.size() - 1).size_bytes());
  }
  // What production decided, as its forward told, against what the reference sent its rows to.
  const auto decided = [](const trainer::RouterDecisions& all, Sha256* into) {
    for (const auto& [layer, ids] : all) {
      into->Update(&layer, sizeof layer);
      into->Update(ids.data(), ids.size() * sizeof(int32_t));
    }
  };
  decided(tap.decisions, &decided_a);
  decided(plain.used_decisions(), &decided_b);
  Floats arrived;
  for (const Doubles& d : lessons.upstream) arrived.insert(arrived.end(), d.begin(), d.end());
  out.inputs = Inputs({{"input", {Hex(tokens_a.Finish()), Hex(tokens_b.Finish())}},
                       {"weights", {Hex(held.Finish()), Hex(read.Finish())}},
                       {"saved state", {Hex(decided_a.Finish()), Hex(decided_b.Finish())}},
                       {"upstream", {DigestOf(q.upstream), DigestOf(arrived)}}});
  return out;
}

// `tolerance`: the name of a parameter's tolerance, by the parameter's.
template <typename Naming>
Json Quantities(const Both& both, const Naming& tolerance) {
  Json out = Json::array();
  for (size_t i = 0; i < both.names.size(); ++i) {
    out.push_back(GradientQuantity(both.names[i], tolerance(both.names[i]), both.production[i],
                                   both.reference[i]));
  }
  return out;
}
Json Quantities(const Both& both, const char* tolerance) {
  return Quantities(both, [&](const std::string&) { return tolerance; });
}

std::string InBf16(const std::string& parameter) { return "bf16:" + parameter; }

// How far the reference's own gradient of each parameter moves, as a share of its largest element,
// when the reference keeps its activations in bf16; root mean square over the draws.
Result<std::vector<std::pair<std::string, double>>> MovedByBf16(ThreadPool* pool,
                                                                const BackwardSubject& subject) {
  constexpr int kDraws = 4;
  TARE_ASSIGN_OR_RETURN(Model model, BackwardModel(pool, subject, DType::kBF16));
  const BackwardQuestions q(subject.config.vocab, 0);
  const models::Batch batch = q.MakeBatch();
  models::Scratch scratch;
  // A router's choices are production's, here as in the comparison.
  trainer::DecisionTap tap(nullptr);
  TARE_RETURN_IF_ERROR(
      models::Forward(BackwardCtx(pool), model, batch, &scratch, nullptr, &tap).status());
  TARE_ASSIGN_OR_RETURN(auto plain, trainer::PlainModel<double>::Create(pool, model));
  const Lessons lessons(q);
  const size_t count = model.parameters().size();
  std::vector<Doubles> exact(count);
  std::vector<double> squares(count, 0.0);
  for (int draw = 0; draw <= kDraws; ++draw) {
    if (draw > 0) plain.KeepInBf16(static_cast<uint64_t>(draw));
    plain.ZeroGradients();
    TARE_RETURN_IF_ERROR(plain.Compute(lessons.runs, tap.decisions).status());
    for (size_t i = 0; i < count; ++i) {
      const Doubles& g = plain.gradient(static_cast<int>(i));
      if (draw == 0) {
        exact[i] = g;
        continue;
      }
      double largest = 0, moved = 0;
      for (size_t k = 0; k < g.size(); ++k) {
        largest = std::max(largest, std::fabs(exact[i][k]));
        moved = std::max(moved, std::fabs(g[k] - exact[i][k]));
      }
      if (largest > 0) squares[i] += moved * moved / (largest * largest);
    }
  }
  std::vector<std::pair<std::string, double>> moved;
  moved.reserve(count);
  for (size_t i = 0; i < count; ++i)
    moved.emplace_back(model.parameters()[i].name, std::sqrt(squares[i] / kDraws));
  return moved;
}

std::string TypeOf(const models::LayerConfig& l) {
  return fmt::format("{}{}{}", l.window > 0 ? "window" : "full", l.sink ? "+sink" : "",
                     l.moe ? "+moe" : "+mlp");
}

// One update from production's own gradient, followed in f64: clip, moments, decay, master.
Result<Json> StepQuantities(ThreadPool* pool, const BackwardSubject& subject) {
  TARE_ASSIGN_OR_RETURN(Model model, BackwardModel(pool, subject, DType::kBF16));
  trainer::Options options;
  options.max_gradient_norm = 0.05f;
  options.adamw.weight_decay = 0.1f;
  TARE_ASSIGN_OR_RETURN(const auto t, trainer::Trainer::Create(pool, std::move(model), options));
  trainer::Sequence lesson;
  lesson.name = "step";
  for (int i = 0; i < 20; ++i)
    lesson.tokens.push_back(static_cast<int32_t>((i * i * 17 + i * 53 + 7) % subject.config.vocab));
  const std::vector<trainer::Sequence> lessons = {lesson};
  TARE_RETURN_IF_ERROR(t->Accumulate(lessons, trainer::Loss::kCrossEntropy, {}, "step").status());
  double square = 0;
  const size_t count = t->masters().size();
  std::vector<Floats> g(count), before(count);
  for (size_t i = 0; i < count; ++i) {
    const Tensor& from = t->gradient(static_cast<int>(i));
    g[i].assign(from.as<float>(), from.as<float>() + from.elements());
    before[i].assign(t->masters()[i].as<float>(), t->masters()[i].as<float>() + from.elements());
    for (const float v : g[i]) square += static_cast<double>(v) * static_cast<double>(v);
  }
  const auto& adamw = t->options().adamw;
  const double beta1 = static_cast<double>(adamw.beta1), beta2 = static_cast<double>(adamw.beta2),
               eps = static_cast<double>(adamw.eps);
  constexpr float kRate = 1e-3f;
  const double lr = static_cast<double>(kRate);
  const double factor = std::min(
      1.0, static_cast<double>(t->options().max_gradient_norm) / (std::sqrt(square) + 1e-6));
  TARE_ASSIGN_OR_RETURN(const trainer::StepReport done, t->Apply(kRate));
  if (done.skipped) return Error(Code::kAborted, "the step was skipped: {}", done.skipped_why);
  Json out = {{"masters", Json::array()},
              {"first_moments", Json::array()},
              {"second_moments", Json::array()}};
  for (size_t i = 0; i < count; ++i) {
    const models::Parameter& p = t->model().parameters()[i];
    const bool decays =
        p.kind == models::ParameterKind::kLinear || p.kind == models::ParameterKind::kEmbedding;
    const double decay = decays ? static_cast<double>(adamw.weight_decay) : 0;
    Doubles m(g[i].size()), v(g[i].size()), w(g[i].size());
    for (size_t k = 0; k < g[i].size(); ++k) {
      const double d = static_cast<double>(g[i][k]) * factor;
      m[k] = (1 - beta1) * d;
      v[k] = (1 - beta2) * d * d;
      w[k] = static_cast<double>(before[i][k]) * (1 - lr * decay) -
             lr * (m[k] / (1 - beta1)) / (std::sqrt(v[k] / (1 - beta2)) + eps);
    }
    const auto floats = [&](const Tensor& from) {
      return Floats(from.as<float>(), from.as<float>() + from.elements());
    };
    out["masters"].push_back(GradientQuantity(p.name, "step", floats(t->masters()[i]), w));
    out["first_moments"].push_back(
        GradientQuantity(p.name, "step", floats(t->first_moments()[i]), m));
    out["second_moments"].push_back(
        GradientQuantity(p.name, "step", floats(t->second_moments()[i]), v));
  }
  return out;
}

}  // namespace

BackwardSubject OneLayerOf(const BackwardSubject& subject, size_t layer) {
  BackwardSubject out;
  out.config = subject.config;
  out.config.layers = {subject.config.layers[layer]};
  const std::string mine = fmt::format("model.layers.{}.", layer);
  for (const auto& [name, tensor] : subject.tensors) {
    if (name.starts_with(mine)) {
      out.tensors.emplace_back("model.layers.0." + name.substr(mine.size()), tensor);
    } else if (!name.starts_with("model.layers.")) {
      out.tensors.emplace_back(name, tensor);
    }
  }
  return out;
}

Result<Json> BackwardTolerances(ThreadPool* pool, const BackwardSubject& subject) {
  const auto one = [](std::string id, const char* layer, double bound, std::string why) {
    return Json{{"id", std::move(id)},
                {"layer", layer},
                {"metric", "of-largest"},
                {"bound", bound},
                {"reason", std::move(why)}};
  };
  constexpr const char* kF32 =
      "f32; the short polynomial of attention's exponential gives 2^-13 of a probability, over a "
      "dozen places 4e-4; ten times it";
  Json out = Json::array(
      {one("operator", "operator", 1e-4,
           "f32 chains of some thousand terms, 2^-24 each in a random walk, and one exponential of "
           "2^-22; a hundred times that"),
       one("module", "module", 5e-3, kF32), one("f32", "model", 5e-3, kF32)});
  constexpr double kLeast = 0.1;
  TARE_ASSIGN_OR_RETURN(const auto moved, MovedByBf16(pool, subject));
  for (const auto& [parameter, share] : moved) {
    out.push_back(
        one(InBf16(parameter), "model", std::clamp(5 * share, kLeast, 1.0),
            fmt::format("the float64 reference itself moves by {:.3g} with activations in bf16; "
                        "five times it, at least 0.1 (120 roundings of 2^-9 on a path, 2.1 % in a "
                        "random walk; five times it) and at most 1",
                        share)));
  }
  out.push_back(one("step", "step", 1e-5,
                    "clip, moments and master are a dozen f32 roundings of 2^-24; ten times their "
                    "sum"));
  return out;
}

Json GradientQuantity(const std::string& name, const std::string& tolerance,
                      const Floats& production, const Doubles& reference) {
  int64_t equal = 0, non_finite = 0, worst = 0;
  bool zero = true;
  float largest = 0;
  double error = -1;
  for (size_t k = 0; k < production.size(); ++k) {
    const float r = static_cast<float>(reference[k]), p = production[k];
    equal += std::bit_cast<uint32_t>(p) == std::bit_cast<uint32_t>(r);
    non_finite += !std::isfinite(p);
    zero = zero && p == 0;
    if (std::fabs(r) > std::fabs(largest)) largest = r;
    const double d = std::fabs(static_cast<double>(p) - static_cast<double>(r));
    if (d > error || !(d == d)) {
      error = d == d ? d : 1e30;
      worst = static_cast<int64_t>(k);
    }
  }
  const auto count = static_cast<int64_t>(production.size());
  const auto at = static_cast<size_t>(worst);
  const float r = static_cast<float>(reference[at]);
  const double scale = std::fabs(static_cast<double>(largest));
  return {
      {"name", name},
      {"tolerance", tolerance},
      {"elements", count},
      {"bitwise_equal", equal},
      {"bitwise_different", count - equal},
      {"non_finite", non_finite},
      {"all_zero", zero},
      {"worst", {{"index", worst}, {"production", Word(production[at])}, {"reference", Word(r)}}},
      {"largest", Word(largest)},
      {"error", scale > 0 ? error / scale : error}};
}

Result<Json> GradientLayers(ThreadPool* pool, const BackwardSubject& subject) {
  Json out = {{"layers", {{"operator", Json::array()}, {"module", Json::array()}}}};
  for (const auto& make : {LinearCase, NormCase, GateCase}) {
    TARE_ASSIGN_OR_RETURN(Json one, make(pool, subject.config));
    out["layers"]["operator"].push_back(std::move(one));
  }
  std::vector<std::string> types;
  for (size_t l = 0; l < subject.config.layers.size(); ++l) {
    const std::string type = TypeOf(subject.config.layers[l]);
    if (std::count(types.begin(), types.end(), type) > 0) continue;
    types.push_back(type);
    TARE_ASSIGN_OR_RETURN(const Both both, Compute(pool, OneLayerOf(subject, l), DType::kF32));
    out["layers"]["module"].push_back(CaseOf(fmt::format("layer {} ({})", l, type), "f32",
                                             both.inputs, Quantities(both, "module")));
  }
  // In f32 the formulas of all layers together are held closely; in bf16, as it is trained, what
  // bf16 leaves.
  out["layers"]["model"] = Json::array();
  {
    TARE_ASSIGN_OR_RETURN(const Both whole, Compute(pool, subject, DType::kF32));
    out["layers"]["model"].push_back(
        CaseOf("all layers in f32", "f32", whole.inputs, Quantities(whole, "f32")));
  }
  {
    TARE_ASSIGN_OR_RETURN(const Both whole, Compute(pool, subject, DType::kBF16));
    out["layers"]["model"].push_back(
        CaseOf("all layers in bf16", "bf16", whole.inputs, Quantities(whole, InBf16)));
    out["parameters"] = whole.names;
  }
  TARE_ASSIGN_OR_RETURN(out["step"], StepQuantities(pool, subject));
  // A planted change of the backward: production must follow it, the reference must not.
  const auto digest = [](const auto& list) {
    Sha256 d;
    for (const auto& v : list) d.Update(v.data(), v.size() * sizeof(v[0]));
    return Hex(d.Finish());
  };
  const BackwardSubject one = OneLayerOf(subject, 0);
  TARE_ASSIGN_OR_RETURN(const Both before, Compute(pool, one, DType::kF32));
  const std::string selected = fault::Selected();
  TARE_RETURN_IF_ERROR(fault::Select(selected + (selected.empty() ? "" : ",") +
                                     "rope.gradient_not_rotated_back@trainer"));
  const Result<Both> after = Compute(pool, one, DType::kF32);
  TARE_RETURN_IF_ERROR(fault::Select(selected));
  if (!after.ok()) return after.status();
  out["perturbation"] = {{"production_before", digest(before.production)},
                         {"production_after", digest(after->production)},
                         {"reference_before", digest(before.reference)},
                         {"reference_after", digest(after->reference)}};
  out["code"] = {
      {"production", {"src/models/backward.cc", "src/ops: the backwards of the registry"}},
      {"reference", {"src/trainer/plain_model.cc", "tools/gradient_layers.cc: formulas in f64"}}};
  return out;
}

}  // namespace tare
