#include "tools/backward_facts.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "base/env.h"
#include "base/fault.h"
#include "base/sha256.h"
#include "models/forward.h"
#include "models/model.h"
#include "ops/registry.h"
#include "ops/rows.h"
#include "source_scan.inc"
#include "tensor/checkpoint.h"
#include "tensor/convert.h"
#include "tools/backward_subject.h"
#include "trainer/audit.h"
#include "trainer/plain_model.h"
#include "trainer/trainer.h"

namespace tare {
namespace {

using models::Model;

// Names of the operators whose values a walk reported.
class OpTap : public Tap {
 public:
  void BeginFrame(const TapFrame&) override {}
  void Emit(const TapPoint& point, const Tensor&) override {
    ops.insert(point.op.substr(0, point.op.find('.')));
  }
  void EndFrame() override {}
  std::set<std::string> ops;
};

using Gradient = std::vector<std::vector<float>>;  // by parameter

Gradient Copy(const Model& model, const models::Gradients& gradients) {
  Gradient out;
  for (size_t i = 0; i < model.parameters().size(); ++i) {
    const Tensor& g = gradients.of(static_cast<int>(i));
    out.emplace_back(g.as<float>(), g.as<float>() + g.elements());
  }
  return out;
}
std::string DigestOfAll(const Gradient& gradient) {
  Sha256 digest;
  for (const auto& g : gradient) digest.Update(g.data(), g.size() * sizeof(float));
  return Hex(digest.Finish());
}

// Forward with a tape, `between`, backward.
Result<Gradient> OneGradient(ThreadPool* pool, const Model& model, const BackwardQuestions& q,
                             const std::function<Status(models::Scratch*)>& between = nullptr,
                             Tap* tap = nullptr) {
  models::Scratch scratch;
  const ops::Ctx ctx = BackwardCtx(pool);
  const models::Batch batch = q.MakeBatch();
  TARE_ASSIGN_OR_RETURN(models::Gradients gradients, models::Gradients::Zeros(model));
  models::Tape tape;
  TARE_RETURN_IF_ERROR(models::Forward(ctx, model, batch, &scratch, &tape, tap).status());
  if (between) TARE_RETURN_IF_ERROR(between(&scratch));
  TARE_RETURN_IF_ERROR(models::Backward(ctx, model, batch, {.dlogprob = q.upstream, .dentropy = {}},
                                        &tape, &scratch, &gradients));
  TARE_RETURN_IF_ERROR(models::FinishGradients(ctx, model, &gradients));
  return Copy(model, gradients);
}

// ---- what a backward reads, operator by operator, from the registry

uint64_t Mix(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
double Uniform(uint64_t* state) { return static_cast<double>(Mix(state) >> 11) * 0x1p-53; }

void PutValue(Tensor* t, int64_t i, double v) {
  const float f = static_cast<float>(v);
  switch (t->dtype()) {
    case DType::kF32:
      t->mutable_as<float>()[i] = f;
      break;
    case DType::kBF16:
      t->mutable_as<uint16_t>()[i] = F32ToBf16(f);
      break;
    case DType::kF16:
      t->mutable_as<uint16_t>()[i] = F32ToF16(f);
      break;
    case DType::kI32:
      t->mutable_as<int32_t>()[i] = static_cast<int32_t>(v);
      break;
    case DType::kU8:
      t->mutable_as<uint8_t>()[i] = static_cast<uint8_t>(v);
      break;
    default:
      break;
  }
}
Result<Tensor> ZeroTensor(DType dtype, const Shape& shape) {
  TARE_ASSIGN_OR_RETURN(Tensor t, Tensor::Allocate(dtype, shape));
  std::memset(t.mutable_data(), 0, static_cast<size_t>(t.size_bytes()));
  return t;
}
// Every value of a row is another one, so that ranks decide nothing by chance.
Result<Tensor> FilledTensor(const ops::Operand& o, uint64_t seed) {
  TARE_ASSIGN_OR_RETURN(Tensor t, ZeroTensor(o.dtype, o.shape));
  const int64_t width = o.shape.empty() || o.shape[0] == 0 ? 1 : t.elements() / o.shape[0];
  uint64_t state = seed * 7919 + 1;
  for (int64_t i = 0; i < t.elements(); ++i) {
    const double normal = (Uniform(&state) + Uniform(&state) + Uniform(&state) - 1.5) * 2;
    double v = normal * static_cast<double>(o.scale);
    switch (o.fill) {
      case ops::Fill::kPositive:
        v = (std::fabs(normal) + 1) * static_cast<double>(o.scale);
        break;
      case ops::Fill::kIndex:
        v = static_cast<double>(Mix(&state) % static_cast<uint64_t>(o.limit));
        break;
      case ops::Fill::kDistinct:
        v = static_cast<double>((static_cast<uint64_t>(i % width) + seed) %
                                static_cast<uint64_t>(o.limit));
        break;
      case ops::Fill::kAscending:
        v = static_cast<double>(i);
        break;
      case ops::Fill::kMask:
        v = Mix(&state) % 4 != 0;
        break;
      case ops::Fill::kUnit:
        v = Uniform(&state);
        break;
      case ops::Fill::kLogprob:
        v = -std::fabs(normal) * static_cast<double>(o.scale);
        break;
      default:
        break;
    }
    PutValue(&t, i, v);
  }
  return t;
}

struct OpCase {
  const ops::OpInfo* op = nullptr;
  ops::OpKey key;
  int64_t rows = 24;
  ops::Signature sig;
  std::vector<Tensor> in, out, dout;
  std::vector<ops::TokenUnit> units;

  static Result<OpCase> Make(ThreadPool* pool, const ops::OpInfo* op, const ops::OpKey& key) {
    OpCase c;
    c.op = op;
    c.key = key;
    c.sig = op->signature(key, c.rows);
    c.units = {{0, c.rows}};
    uint64_t seed = 1;
    for (const ops::Operand& o : c.sig.inputs) {
      TARE_ASSIGN_OR_RETURN(Tensor t, FilledTensor(o, seed++));
      c.in.push_back(std::move(t));
    }
    for (const ops::Operand& o : c.sig.outputs) {
      TARE_ASSIGN_OR_RETURN(Tensor t, ZeroTensor(o.dtype, o.shape));
      c.out.push_back(std::move(t));
      c.dout.emplace_back();
      if (!o.grad) continue;
      ops::Operand g = o;
      g.dtype = o.grad_dtype;
      g.fill = ops::Fill::kNormal;
      g.scale = 1;
      TARE_ASSIGN_OR_RETURN(c.dout.back(), FilledTensor(g, seed++));
    }
    TARE_RETURN_IF_ERROR(op->forward(c.Context(pool), key, {c.rows, c.in, c.out}));
    return c;
  }
  ops::Ctx Context(ThreadPool* pool) const {
    ops::Ctx ctx = BackwardCtx(pool);
    ctx.profile = key.profile;
    return ctx;
  }
  // Gradients of the inputs, undefined where an input has none.
  Result<std::vector<Tensor>> Backward(ThreadPool* pool) const {
    std::vector<Tensor> din;
    for (const ops::Operand& o : sig.inputs) {
      din.emplace_back();
      if (!o.grad) continue;
      TARE_ASSIGN_OR_RETURN(
          din.back(), ZeroTensor(o.role == ops::Role::kRows ? o.grad_dtype : DType::kF32, o.shape));
    }
    TARE_RETURN_IF_ERROR(op->backward(Context(pool), key, {rows, in, out, dout, din, units}));
    return din;
  }
};

bool SameBits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].data() == nullptr) continue;
    if (std::memcmp(a[i].data(), b[i].data(), static_cast<size_t>(a[i].size_bytes())) != 0)
      return false;
  }
  return true;
}

bool Contains(const std::vector<std::string>& list, const std::string& name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

// Replaces each operand in turn and asks whether the gradient moved: what moves it was read.
// Weights are parameters, there for both walks, and no state of the forward.
Result<Json> WhatItReads(ThreadPool* pool, const ops::OpInfo* op) {
  const ops::OpKey& key = op->keys.front();
  TARE_ASSIGN_OR_RETURN(OpCase c, OpCase::Make(pool, op, key));
  TARE_ASSIGN_OR_RETURN(const std::vector<Tensor> base, c.Backward(pool));
  std::set<std::string> operands, reads, saved;
  const std::vector<std::string> saved_names = op->select(key).saved_for_backward;
  const auto probe = [&](const ops::Operand& o, bool input, Tensor* slot) -> Status {
    operands.insert(o.name);
    // Weights, and what a call is told beside its activations (row numbers, temperatures), are
    // there for both walks.
    const bool argument = input && !o.grad && !Contains(saved_names, o.name);
    if (o.role == ops::Role::kShared || argument) return Ok();
    const Tensor kept = *slot;
    TARE_ASSIGN_OR_RETURN(*slot, FilledTensor(o, 991));
    const Result<std::vector<Tensor>> moved = c.Backward(pool);
    *slot = kept;
    // Refused is read as well.
    if (!moved.ok() || !SameBits(base, *moved)) reads.insert(o.name);
    return Ok();
  };
  for (size_t i = 0; i < c.in.size(); ++i)
    TARE_RETURN_IF_ERROR(probe(c.sig.inputs[i], true, &c.in[i]));
  for (size_t i = 0; i < c.out.size(); ++i)
    TARE_RETURN_IF_ERROR(probe(c.sig.outputs[i], false, &c.out[i]));
  const ops::Contract contract = op->select(key);
  for (const std::string& name : contract.saved_for_backward) {
    const bool shared = std::any_of(
        c.sig.inputs.begin(), c.sig.inputs.end(),
        [&](const ops::Operand& o) { return o.name == name && o.role == ops::Role::kShared; });
    if (shared) continue;
    saved.insert(name);
    // Made inside the registry's call from its operands: nothing outside can replace it.
    if (!operands.contains(name)) reads.insert(name);
  }
  return Json{
      {"name", op->name}, {"contract", Hex(contract.Id())}, {"saved", saved}, {"reads", reads}};
}

// ---- the process itself

// The executable's code in memory against its file, and pages that are writable and executable.
Json RunTimeHits() {
  Json hits = Json::array();
  char self[4096];
  const ssize_t n = ::readlink("/proc/self/exe", self, sizeof self);
  const std::string path(self, n > 0 ? static_cast<size_t>(n) : 0);
  const auto file = Env::Real()->OpenReadable(path);
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find(" rwx") != std::string::npos) hits.push_back("writable and executable: " + line);
    if (line.find(" r-xp ") == std::string::npos || !line.ends_with(path) || !file.ok()) continue;
    unsigned long begin = 0, end = 0, offset = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx r-xp %lx", &begin, &end, &offset) != 3) continue;
    const std::string_view bytes = (*file)->bytes();
    const size_t size =
        std::min<size_t>(end - begin, bytes.size() - std::min<size_t>(offset, bytes.size()));
    // NOLINTNEXTLINE(performance-no-int-to-ptr): an address read from /proc/self/maps.
    if (std::memcmp(reinterpret_cast<const void*>(begin), bytes.data() + offset, size) != 0)
      hits.push_back("the program's code in memory is not that of its file");
  }
  return hits;
}

Json Scan() {
  Json hits = Json::array();
  for (const char* const* hit = kSourceHits; *hit != nullptr; ++hit) hits.push_back(*hit);
  std::string preload;
  for (const char* name : {"LD_PRELOAD", "LD_AUDIT"}) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') preload += fmt::format("{}={} ", name, value);
  }
  return {{"sources_built", kSourcesBuilt},
          {"sources_scanned", kSourcesScanned},
          {"hits", hits},
          {"run_time_hits", RunTimeHits()},
          {"preload", preload}};
}

Json Series(std::vector<int64_t> values) {
  Json out = {{"values", values}};
  int64_t sum = 0;
  for (const int64_t v : values) sum += v;
  std::sort(values.begin(), values.end());
  out["median"] = values[(values.size() - 1) / 2];
  out["sum"] = sum;
  return out;
}

std::vector<trainer::Sequence> Lessons(const BackwardQuestions& q) {
  std::vector<trainer::Sequence> list;
  for (size_t s = 0; s < q.tokens.size(); ++s) {
    trainer::Sequence one;
    one.name = fmt::format("s{}", s);
    one.tokens = q.tokens[s];
    one.prompt_tokens = 1;
    list.push_back(std::move(one));
  }
  return list;
}

// Grad-enabled forward and whole step, both arms in turn, three rounds after one that does not
// count.
Result<Json> StepTimes(ThreadPool* pool, const BackwardSubject& subject) {
  const BackwardQuestions q(subject.config.vocab, 3);
  const std::vector<trainer::Sequence> lessons = Lessons(q);
  std::unique_ptr<trainer::Trainer> arms[2];
  for (int on = 0; on < 2; ++on) {
    TARE_ASSIGN_OR_RETURN(Model model, BackwardModel(pool, subject, DType::kBF16));
    trainer::Options options;
    options.batch_invariance = on == 1 ? ops::BatchInvariance::kOn : ops::BatchInvariance::kOff;
    TARE_ASSIGN_OR_RETURN(arms[on], trainer::Trainer::Create(pool, std::move(model), options));
  }
  std::vector<int64_t> forward[2], step[2];
  for (int round = 0; round < 4; ++round) {
    for (int k = 0; k < 2; ++k) {
      const int on = (round + k) % 2;
      const int64_t begin = Env::Real()->MonotonicNs();
      TARE_RETURN_IF_ERROR(
          arms[on]->Accumulate(lessons, trainer::Loss::kCrossEntropy, {}, "times").status());
      TARE_RETURN_IF_ERROR(arms[on]->Apply(1e-6f).status());
      const int64_t whole = Env::Real()->MonotonicNs() - begin;
      if (round == 0) continue;
      forward[on].push_back(arms[on]->times().forward_ns / 1000 + 1);
      step[on].push_back(whole / 1000 + 1);
    }
  }
  return Json{{"forward_native_us", Series(forward[0])},
              {"forward_aligned_us", Series(forward[1])},
              {"step_native_us", Series(step[0])},
              {"step_aligned_us", Series(step[1])}};
}

// Is the gradient that of the forward that ran: the slope of sum(upstream * logprob) along it, from
// two forwards beside it, against its own square.
Result<double> SlopeAgainstGradient(ThreadPool* pool, const BackwardSubject& subject,
                                    const BackwardQuestions& q) {
  TARE_ASSIGN_OR_RETURN(Model model, BackwardModel(pool, subject, DType::kF32));
  TARE_ASSIGN_OR_RETURN(const Gradient g, OneGradient(pool, model, q));
  double square = 0;
  for (const auto& part : g) {
    for (const float v : part) square += static_cast<double>(v) * static_cast<double>(v);
  }
  if (!(square > 0)) return 0.0;
  const double step = 2e-3 / std::sqrt(square);
  double values[2];
  for (int side = 0; side < 2; ++side) {
    for (size_t i = 0; i < g.size(); ++i) {
      float* w = model.mutable_parameters()[i].value.mutable_as<float>();
      // From -step to +step: the second side undoes the first.
      for (size_t k = 0; k < g[i].size(); ++k)
        w[k] += static_cast<float>((side == 0 ? -step : 2 * step) * static_cast<double>(g[i][k]));
    }
    TARE_RETURN_IF_ERROR(model.Repack(pool));
    models::Scratch scratch;
    const models::Batch batch = q.MakeBatch();
    TARE_ASSIGN_OR_RETURN(const models::ForwardOutput out,
                          models::Forward(BackwardCtx(pool), model, batch, &scratch));
    values[side] = 0;
    for (size_t t = 0; t < out.logprob.size(); ++t)
      values[side] += static_cast<double>(q.upstream[t]) * static_cast<double>(out.logprob[t]);
  }
  return (values[1] - values[0]) / (2 * step) / square;
}

}  // namespace

Result<BackwardSubject> LoadBackwardSubject(const std::string& path, int64_t layers) {
  TARE_ASSIGN_OR_RETURN(trainer::AuditInput input, trainer::CheckpointAuditInput(path, layers));
  return BackwardSubject{std::move(input.config), std::move(input.tensors)};
}

Result<Json> BackwardInventory(ThreadPool* pool, const BackwardSubject& subject, bool times) {
  TARE_ASSIGN_OR_RETURN(Model model, BackwardModel(pool, subject, DType::kBF16));
  const BackwardQuestions q(model.config().vocab, 0), other(model.config().vocab, 17);
  ops::LaunchTrace trace;
  models::Scratch scratch;
  const ops::Ctx ctx = BackwardCtx(pool, &trace);
  // Few operators write launches: the others are seen by the values that they report.
  std::set<std::string> forward;
  {
    OpTap tap;
    models::Tape tape;
    TARE_RETURN_IF_ERROR(
        models::Forward(ctx, model, q.MakeBatch(), &scratch, &tape, &tap).status());
    forward = std::move(tap.ops);
    for (const ops::Launch& l : trace.Take()) forward.insert(l.op.substr(0, l.op.find('.')));
  }
  Json operators = Json::array(), detached = Json::array();
  for (const std::string& name : forward) {
    const ops::OpInfo* op = ops::FindOp(name);
    if (op == nullptr || !op->backward) continue;
    TARE_ASSIGN_OR_RETURN(Json reads, WhatItReads(pool, op));
    operators.push_back(std::move(reads));
  }
  // Between forward and backward: each kind of state that a forward leaves beside its tape.
  TARE_ASSIGN_OR_RETURN(const Gradient base, OneGradient(pool, model, q));
  // A cut in the graph leaves the parameters behind it without a gradient.
  for (size_t i = 0; i < base.size(); ++i) {
    if (std::all_of(base[i].begin(), base[i].end(), [](float v) { return v == 0; }))
      detached.push_back(model.parameters()[i].name);
  }
  Json poisoned = Json::array(), absent = Json::array();
  const auto poison = [&](const char* what, const char* how,
                          const std::function<Status(models::Scratch*)>& between) -> Status {
    TARE_ASSIGN_OR_RETURN(const Gradient after, OneGradient(pool, model, q, between));
    poisoned.push_back({{"what", what},
                        {"how", how},
                        {"gradient_before", DigestOfAll(base)},
                        {"gradient_after", DigestOfAll(after)}});
    return Ok();
  };
  const auto run_other = [&](models::Scratch* s) {
    return models::Forward(BackwardCtx(pool), model, other.MakeBatch(), s).status();
  };
  TARE_RETURN_IF_ERROR(
      poison("caches", "another batch ran through the same scratch buffers", run_other));
  // The copies that the kernels stream are made from other bytes, the weights themselves stay.
  std::vector<uint16_t*> weights;
  for (models::Parameter& p : model.mutable_parameters()) {
    if (p.kind == models::ParameterKind::kLinear || p.kind == models::ParameterKind::kEmbedding)
      weights.push_back(p.value.mutable_as<uint16_t>());
  }
  const auto flip = [&] {
    for (uint16_t* w : weights) w[0] ^= 0x40;
  };
  TARE_RETURN_IF_ERROR(poison("quantized views",
                              "the packed copies of the weights were built from other bytes",
                              [&](models::Scratch*) {
                                flip();
                                const Status packed = model.Repack(pool);
                                flip();
                                return packed;
                              }));
  TARE_RETURN_IF_ERROR(model.Repack(pool));
  if (model.config().experts > 0) {
    TARE_RETURN_IF_ERROR(poison(
        "router state", "another batch was routed, tape and all, in between",
        [&](models::Scratch* s) {
          models::Tape tape;
          return models::Forward(BackwardCtx(pool), model, other.MakeBatch(), s, &tape).status();
        }));
  } else {
    absent.push_back({{"what", "router state"}, {"why", "the model has no router"}});
  }
  absent.push_back({{"what", "rng"}, {"why", "no operator of a training step draws a number"}});
  absent.push_back(
      {{"what", "scales"}, {"why", "no value of the training step is quantised by a scale"}});
  // A weight moved by one ulp after the forward: refused, never used.
  const Result<Gradient> moved = OneGradient(pool, model, q, [&](models::Scratch*) {
    Tensor& value = model.mutable_parameters()[0].value;
    value.mutable_as<uint16_t>()[0] ^= 1;
    return model.Repack(pool);
  });
  model.mutable_parameters()[0].value.mutable_as<uint16_t>()[0] ^= 1;
  TARE_RETURN_IF_ERROR(model.Repack(pool));
  // On one layer without a router: a choice that flips is a step, and a slope sees none.
  size_t dense = 0;
  while (dense + 1 < subject.config.layers.size() && subject.config.layers[dense].moe) ++dense;
  TARE_ASSIGN_OR_RETURN(const double slope,
                        SlopeAgainstGradient(pool, OneLayerOf(subject, dense), q));
  Json out = {
      {"operators", operators},
      {"poisoned", poisoned},
      {"absent", absent},
      {"weight_change_raises", !moved.ok() && moved.status().code() == Code::kPrecondition},
      {"graph",
       {{"detached_outputs", detached},
        {"slope_over_gradient", slope},
        {"trained_value", std::fabs(slope - 1) < 0.02 ? "executed forward" : "another function"}}},
      {"scan", Scan()}};
  if (times) {
    TARE_ASSIGN_OR_RETURN(out["times"], StepTimes(pool, subject));
  }
  return out;
}

}  // namespace tare
