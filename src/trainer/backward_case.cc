#include "trainer/backward_case.h"

#include <algorithm>
#include <cstring>

#include "base/fault.h"
#include "base/sha256.h"
#include "trainer/audit.h"
#include "trainer/plain_model.h"

namespace tare::trainer {
namespace {

constexpr const char* kSchema = "tare.backward-case/1";

Status CheckBatch(const std::vector<Sequence>& batch) {
  if (batch.empty()) return InvalidArgument("a backward case needs a sequence");
  for (const Sequence& s : batch) {
    if (s.targets() < 1 || s.prompt_tokens < 1 ||
        (!s.mask.empty() && static_cast<int64_t>(s.mask.size()) != s.targets()) ||
        s.temperature != 1.0f || !s.old_logprob.empty()) {
      return InvalidArgument("{}: a backward case holds cross-entropy sequences at temperature 1",
                             Printable(s.name));
    }
  }
  return Ok();
}

bool Counts(const Sequence& s, int64_t target) {
  return s.mask.empty() || s.mask[static_cast<size_t>(target)] != 0;
}

Json SequenceJson(const Sequence& s) {
  return {
      {"name", s.name}, {"tokens", s.tokens}, {"prompt_tokens", s.prompt_tokens}, {"mask", s.mask}};
}

Result<BackwardCase> Parse(const Json& json) {
  BackwardCase out;
  for (const Json& item : json.at("batch")) {
    Sequence s;
    s.name = item.at("name").get<std::string>();
    s.tokens = item.at("tokens").get<std::vector<int32_t>>();
    s.prompt_tokens = item.at("prompt_tokens").get<int64_t>();
    s.mask = item.at("mask").get<std::vector<uint8_t>>();
    out.batch.push_back(std::move(s));
  }
  TARE_RETURN_IF_ERROR(CheckBatch(out.batch));
  out.faults = json.at("faults").get<std::string>();
  const Json& found = json.at("found");
  out.found.forward_equal = found.at("forward_equal").get<bool>();
  out.found.within = found.at("within").get<bool>();
  out.found.parameter = found.at("parameter").get<std::string>();
  out.found.error = found.at("error").get<double>();
  out.found.tolerance = found.at("tolerance").get<double>();
  out.found.outside = found.at("outside").get<std::vector<std::string>>();
  out.found.tokens = found.at("tokens").get<int64_t>();
  out.found.gradient_sha256 = found.at("gradient_sha256").get<std::string>();
  return out;
}

}  // namespace

Json BackwardFinding::ToJson() const {
  return {{"forward_equal", forward_equal},
          {"within", within},
          {"parameter", parameter},
          {"error", error},
          {"tolerance", tolerance},
          {"outside", outside},
          {"tokens", tokens},
          {"gradient_sha256", gradient_sha256}};
}

Result<BackwardFinding> TryBackward(ThreadPool* pool, Trainer* trainer,
                                    const std::vector<Sequence>& batch) {
  TARE_RETURN_IF_ERROR(CheckBatch(batch));
  BackwardFinding out;
  DecisionTap tap(nullptr);
  TARE_ASSIGN_OR_RETURN(const Logprobs plainly, trainer->Score(batch, "case", &tap));
  TARE_ASSIGN_OR_RETURN(const LossReport loss,
                        trainer->Accumulate(batch, Loss::kCrossEntropy, {}, "case"));
  out.tokens = loss.logprobs.rows;
  out.forward_equal = plainly.values.size() == loss.logprobs.values.size();
  for (size_t i = 0; out.forward_equal && i < plainly.values.size(); ++i) {
    const std::vector<float>&a = plainly.values[i], &b = loss.logprobs.values[i];
    out.forward_equal =
        a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }

  int64_t valid = 0;
  for (const Sequence& s : batch) {
    for (int64_t t = 0; t < s.targets(); ++t) valid += Counts(s, t);
  }
  std::vector<std::vector<double>> upstream;
  for (const Sequence& s : batch) {
    std::vector<double> d(static_cast<size_t>(s.targets()), 0.0);
    for (int64_t t = 0; t < s.targets(); ++t) {
      if (Counts(s, t)) d[static_cast<size_t>(t)] = -1.0 / static_cast<double>(valid);
    }
    upstream.push_back(std::move(d));
  }
  std::vector<PlainModel<double>::Run> runs;
  runs.reserve(batch.size());
  for (size_t i = 0; i < batch.size(); ++i)
    runs.push_back({batch[i].tokens, batch[i].prompt_tokens, 1.0, upstream[i]});
  TARE_ASSIGN_OR_RETURN(PlainModel<double> plain,
                        PlainModel<double>::Create(pool, trainer->model()));
  plain.ZeroGradients();
  TARE_RETURN_IF_ERROR(plain.Compute(runs, tap.decisions).status());

  Sha256 digest;
  double worst = -1;
  const std::vector<models::Parameter>& parameters = trainer->model().parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& g = trainer->gradient(static_cast<int>(i));
    digest.Update(g.data(), static_cast<size_t>(g.size_bytes()));
    const double error = GradientError(g.as<float>(), plain.gradient(static_cast<int>(i)));
    const double tolerance =
        parameters[i].value.dtype() == DType::kF32 ? kGradientTolerance : kBf16Tolerance;
    if (!(error <= tolerance)) out.outside.push_back(parameters[i].name);
    if (error / tolerance <= worst) continue;
    worst = error / tolerance;
    out.parameter = parameters[i].name;
    out.error = std::min(error, 1e300);  // JSON has no infinity
    out.tolerance = tolerance;
  }
  out.within = out.outside.empty();
  out.gradient_sha256 = Hex(digest.Finish());
  return out;
}

Status SaveBackwardCase(Env* env, Trainer* trainer, const std::string& source,
                        const std::vector<Sequence>& batch, const Progress& progress,
                        const BackwardFinding& finding, const std::string& dir) {
  TARE_RETURN_IF_ERROR(CheckBatch(batch));
  if (env->Stat(dir).ok()) {
    return Error(Code::kAlreadyExists, "{} is there; a case is kept once", Printable(dir));
  }
  TARE_RETURN_IF_ERROR(env->CreateDirs(dir));
  TARE_RETURN_IF_ERROR(PublishWeights(env, *trainer, source, dir + "/weights"));
  TARE_RETURN_IF_ERROR(SaveState(env, trainer, progress, dir + "/state"));
  Json sequences = Json::array();
  for (const Sequence& s : batch) sequences.push_back(SequenceJson(s));
  // Last: a directory without it was never finished.
  const Json json = {{"schema", kSchema},
                     {"faults", fault::Selected()},
                     {"found", finding.ToJson()},
                     {"batch", sequences}};
  return env->WriteFileAtomic(dir + "/case.json", json.dump(1) + "\n");
}

Result<BackwardCase> ReadBackwardCase(Env* env, const std::string& dir) {
  TARE_ASSIGN_OR_RETURN(const std::string text, env->ReadFile(dir + "/case.json"));
  TARE_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  try {
    if (json.at("schema") != kSchema) return DataLoss("{}/case.json is no {}", dir, kSchema);
    return Parse(json);
  } catch (const nlohmann::json::exception& e) {
    return DataLoss("{}/case.json: {}", Printable(dir), e.what());
  }
}

Result<BackwardCase> OpenBackwardCase(Env* env, const std::string& dir, Trainer* trainer) {
  TARE_ASSIGN_OR_RETURN(BackwardCase out, ReadBackwardCase(env, dir));
  TARE_ASSIGN_OR_RETURN(out.progress, LoadState(env, dir + "/state", trainer));
  return out;
}

Result<Shrunk> ShrinkBackwardCase(ThreadPool* pool, Trainer* trainer,
                                  const std::vector<Sequence>& batch, std::string parameter,
                                  int max_tries) {
  return ShrinkBatch(
      [&](const std::vector<Sequence>& smaller) { return TryBackward(pool, trainer, smaller); },
      batch, std::move(parameter), max_tries);
}

Result<Shrunk> ShrinkBatch(const BackwardTry& attempt, const std::vector<Sequence>& batch,
                           std::string parameter, int max_tries) {
  Shrunk best;
  best.batch = batch;
  TARE_ASSIGN_OR_RETURN(best.finding, attempt(batch));
  if (best.finding.within) {
    return Error(Code::kPrecondition,
                 "every gradient lies inside its tolerance: nothing to shrink");
  }
  best.parameter = parameter.empty() ? best.finding.parameter : std::move(parameter);
  const auto fails = [&](const BackwardFinding& f) {
    return std::find(f.outside.begin(), f.outside.end(), best.parameter) != f.outside.end();
  };
  if (!fails(best.finding)) {
    return Error(Code::kPrecondition,
                 "the gradient of {} lies inside its tolerance, or is none of this model; outside "
                 "lie {}",
                 Printable(best.parameter), fmt::join(best.finding.outside, ", "));
  }
  const auto still = [&](std::vector<Sequence> smaller) -> Result<bool> {
    if (best.tries >= max_tries) return false;
    ++best.tries;
    TARE_ASSIGN_OR_RETURN(BackwardFinding f, attempt(smaller));
    if (!fails(f)) return false;
    best.batch = std::move(smaller);
    best.finding = std::move(f);
    return true;
  };
  for (size_t i = best.batch.size(); i-- > 0 && best.batch.size() > 1;) {
    std::vector<Sequence> smaller = best.batch;
    smaller.erase(smaller.begin() + static_cast<std::ptrdiff_t>(i));
    TARE_RETURN_IF_ERROR(still(std::move(smaller)).status());
  }
  // Tokens from the end, by halves down to single ones.
  for (size_t i = 0; i < best.batch.size(); ++i) {
    for (int64_t cut = best.batch[i].targets() / 2; cut > 0;) {
      std::vector<Sequence> smaller = best.batch;
      Sequence& s = smaller[i];
      bool failed = false;
      if (s.targets() > cut) {
        s.tokens.resize(s.tokens.size() - static_cast<size_t>(cut));
        if (!s.mask.empty()) s.mask.resize(static_cast<size_t>(s.targets()));
        const bool any = std::any_of(smaller.begin(), smaller.end(), [](const Sequence& q) {
          for (int64_t t = 0; t < q.targets(); ++t) {
            if (Counts(q, t)) return true;
          }
          return false;
        });
        if (any) {
          TARE_ASSIGN_OR_RETURN(failed, still(std::move(smaller)));
        }
      }
      if (!failed) cut /= 2;
    }
  }
  return best;
}

}  // namespace tare::trainer
