// `tare score MODEL --tokens FILE`: token sequences in, logprob bits per token out.

#include <fnmatch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/json.h"
#include "models/score.h"
#include "ops/contract.h"
#include "tensor/checkpoint.h"
#include "tensor/dump.h"
#include "tensor/logprobs.h"
#include "tensor/replay_command.h"
#include "tensor/safetensors.h"
#include "tensor/weight_hash.h"
#include "tools/command.h"

namespace tare {
namespace {

struct Options {
  std::string model, tokens, logprobs, dump, profile = "ieee-f32", side = "none", fault,
                                             order = "given", version;
  std::vector<std::string> dump_only;
  int threads = 0;
  int64_t batch_tokens = 2048, chunk = 0, page_size = 16, row_align = 1;
  float temperature = 1.0f;
  bool entropy = false, tape = false, native = false, json = false;
};

// As the files state them; responses of JSONL may have names.
struct Tokens {
  std::vector<models::ScoreSequence> sequences;
};

Result<std::vector<int32_t>> Ints(const SafetensorsFile& file, const char* name) {
  TARE_ASSIGN_OR_RETURN(const Tensor t, file.Get(name));
  if (t.dtype() != DType::kI32 || t.rank() != 1) {
    return DataLoss("{}: {} is {} {}; I32 of one dimension is expected", file.where(), name,
                    SafetensorsName(t.dtype()), ShapeToString(t.shape()));
  }
  return std::vector<int32_t>(t.as<int32_t>(), t.as<int32_t>() + t.elements());
}

Status CheckOffsets(const std::string& where, const char* name, const std::vector<int32_t>& offsets,
                    size_t ids) {
  if (offsets.empty() || offsets[0] != 0 || offsets.back() != static_cast<int64_t>(ids)) {
    return DataLoss("{}: {} must begin with 0 and end with the number of ids, {}", where, name,
                    ids);
  }
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1])
      return DataLoss("{}: {}[{}] is {}, below the one before", where, name, i, offsets[i]);
  }
  return Ok();
}

// prompt_ids, prompt_offsets, response_ids, response_offsets (I32): the responses are scored.
Result<Tokens> ReadSafetensors(const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(Env::Real(), path));
  TARE_ASSIGN_OR_RETURN(const auto prompt, Ints(file, "prompt_ids"));
  TARE_ASSIGN_OR_RETURN(const auto prompt_at, Ints(file, "prompt_offsets"));
  TARE_ASSIGN_OR_RETURN(const auto response, Ints(file, "response_ids"));
  TARE_ASSIGN_OR_RETURN(const auto response_at, Ints(file, "response_offsets"));
  TARE_RETURN_IF_ERROR(CheckOffsets(path, "prompt_offsets", prompt_at, prompt.size()));
  TARE_RETURN_IF_ERROR(CheckOffsets(path, "response_offsets", response_at, response.size()));
  if (prompt_at.size() != response_at.size()) {
    return DataLoss("{}: {} prompts, {} responses", path, prompt_at.size() - 1,
                    response_at.size() - 1);
  }
  Tokens out;
  for (size_t i = 0; i + 1 < prompt_at.size(); ++i) {
    models::ScoreSequence s;
    s.name = std::to_string(i);
    s.tokens.assign(prompt.begin() + prompt_at[i], prompt.begin() + prompt_at[i + 1]);
    s.first = static_cast<int64_t>(s.tokens.size());
    s.tokens.insert(s.tokens.end(), response.begin() + response_at[i],
                    response.begin() + response_at[i + 1]);
    out.sequences.push_back(std::move(s));
  }
  return out;
}

// One object a line: {"sequence"?: NAME, "prompt": [ids], "tokens": [ids]}; "tokens" are scored.
// The lines of docs/formats/logprobs.md are such objects.
Result<Tokens> ReadJsonl(const std::string& path) {
  TARE_ASSIGN_OR_RETURN(const std::string text, Env::Real()->ReadFile(path));
  Tokens out;
  size_t line = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    ++line;
    if (end == std::string::npos)
      return DataLoss("{}: line {} has no newline; the file was cut", path, line);
    auto json = ParseJson(std::string_view(text).substr(begin, end - begin));
    begin = end + 1;
    if (!json.ok()) return json.status().Annotate(fmt::format("{}: line {}", path, line));
    const auto ids = [&](const char* key, std::vector<int32_t>* to) -> Status {
      const auto it = json->find(key);
      if (!json->is_object() || it == json->end() || !it->is_array()) {
        return DataLoss("{}: line {}: \"{}\" is not a list of token ids", path, line, key);
      }
      for (const Json& id : *it) {
        if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > INT32_MAX) {
          return DataLoss("{}: line {}: \"{}\" holds {}; token ids are expected", path, line, key,
                          Printable(id.dump()));
        }
        to->push_back(static_cast<int32_t>(id.get<int64_t>()));
      }
      return Ok();
    };
    models::ScoreSequence s;
    s.name = json->is_object() && json->contains("sequence") && (*json)["sequence"].is_string()
                 ? (*json)["sequence"].get<std::string>()
                 : std::to_string(line - 1);
    TARE_RETURN_IF_ERROR(ids("prompt", &s.tokens));
    s.first = static_cast<int64_t>(s.tokens.size());
    TARE_RETURN_IF_ERROR(ids("tokens", &s.tokens));
    out.sequences.push_back(std::move(s));
  }
  return out;
}

Result<fault::Side> ParseSide(const std::string& name) {
  for (fault::Side side : {fault::Side::kNone, fault::Side::kRollout, fault::Side::kTrainer}) {
    if (name == fault::SideName(side)) return side;
  }
  return InvalidArgument("--side is \"{}\"; none, rollout or trainer is expected", name);
}

Status Write(const Options& options, const Tokens& tokens, const models::ScoreResult& result,
             const std::string& weights) {
  if (options.logprobs.ends_with(".jsonl")) {
    std::vector<LogprobSequence> lines;
    for (size_t i = 0; i < tokens.sequences.size(); ++i) {
      const models::ScoreSequence& s = tokens.sequences[i];
      LogprobSequence line;
      line.sequence = s.name;
      line.weights = options.version.empty() ? weights : options.version;
      line.kind = s.temperature == 1.0f ? "raw" : "processed";
      line.prompt.assign(s.tokens.begin(), s.tokens.begin() + s.first);
      line.tokens.assign(s.tokens.begin() + s.first, s.tokens.end());
      for (float x : result.logprob[i]) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof(bits));
        line.words.push_back(bits);
      }
      lines.push_back(std::move(line));
    }
    return WriteLogprobs(Env::Real(), options.logprobs, lines);
  }
  std::vector<int32_t> prompt, prompt_at = {0}, response, response_at = {0};
  std::vector<float> logprob, entropy;
  for (size_t i = 0; i < tokens.sequences.size(); ++i) {
    const models::ScoreSequence& s = tokens.sequences[i];
    prompt.insert(prompt.end(), s.tokens.begin(), s.tokens.begin() + s.first);
    response.insert(response.end(), s.tokens.begin() + s.first, s.tokens.end());
    prompt_at.push_back(static_cast<int32_t>(prompt.size()));
    response_at.push_back(static_cast<int32_t>(response.size()));
    logprob.insert(logprob.end(), result.logprob[i].begin(), result.logprob[i].end());
    entropy.insert(entropy.end(), result.entropy[i].begin(), result.entropy[i].end());
  }
  std::vector<std::pair<std::string, Tensor>> tensors;
  const auto add = [&](const char* name, DType dtype, const auto& values) -> Status {
    TARE_ASSIGN_OR_RETURN(Tensor t, Tensor::Allocate(dtype, {static_cast<int64_t>(values.size())}));
    if (!values.empty()) std::memcpy(t.mutable_data(), values.data(), t.size_bytes());
    tensors.emplace_back(name, std::move(t));
    return Ok();
  };
  TARE_RETURN_IF_ERROR(add("prompt_ids", DType::kI32, prompt));
  TARE_RETURN_IF_ERROR(add("prompt_offsets", DType::kI32, prompt_at));
  TARE_RETURN_IF_ERROR(add("response_ids", DType::kI32, response));
  TARE_RETURN_IF_ERROR(add("response_offsets", DType::kI32, response_at));
  TARE_RETURN_IF_ERROR(add("logprobs", DType::kF32, logprob));
  if (options.entropy) TARE_RETURN_IF_ERROR(add("entropy", DType::kF32, entropy));
  return WriteSafetensors(Env::Real(), options.logprobs, tensors,
                          {{"made_by", "tare score"},
                           {"weight_hash", weights},
                           {"profile", options.profile},
                           {"temperature", ops::HexWord(options.temperature)},
                           {"side", options.side},
                           {"faults", fault::Selected()}});
}

Status Score(const Options& options) {
  const auto profile = ParseProfile(options.profile);
  if (!profile)
    return InvalidArgument("--profile is \"{}\"; ieee-f32 or sm90-mma is expected",
                           options.profile);
  TARE_ASSIGN_OR_RETURN(const fault::Side side, ParseSide(options.side));
  if (!(options.temperature > 0.0f) || !std::isfinite(options.temperature)) {
    return InvalidArgument(
        "--temperature is {}; a finite number above 0 is expected (greedy tokens are scored at 1)",
        options.temperature);
  }
  if (options.order != "given" && options.order != "length") {
    return InvalidArgument("--order is \"{}\"; given or length is expected", options.order);
  }
  TARE_RETURN_IF_ERROR(fault::Select(options.fault));
  TARE_ASSIGN_OR_RETURN(Tokens tokens, options.tokens.ends_with(".jsonl")
                                           ? ReadJsonl(options.tokens)
                                           : ReadSafetensors(options.tokens));
  for (auto& s : tokens.sequences) s.temperature = options.temperature;

  using Clock = std::chrono::steady_clock;
  const auto started = Clock::now();
  ThreadPool pool(options.threads);
  TARE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(options.model));
  TARE_ASSIGN_OR_RETURN(const WeightHash hash, HashWeights(checkpoint, &pool));
  models::ModelOptions load;
  load.side = side;
  TARE_ASSIGN_OR_RETURN(const models::Model model, models::Model::Load(&pool, checkpoint, load));
  const std::string weights = Hex(hash.digest);
  const auto loaded = Clock::now();

  ops::Ctx ctx;
  ctx.pool = &pool;
  ctx.profile = *profile;
  ctx.side = side;
  if (options.native) ctx.batch_invariance = ops::BatchInvariance::kOff;
  models::ScoreOptions how;
  how.batch_tokens = options.batch_tokens;
  how.longest_first = options.order == "length";
  how.row_align = options.row_align;
  how.chunk = options.chunk;
  how.page_size = options.page_size;
  how.entropy = options.entropy;
  how.tape = options.tape;
  how.phase = options.tape ? TapPhase::kTrain : TapPhase::kScore;
  how.weight_version = options.version.empty() ? weights : options.version;
  std::unique_ptr<DumpWriter> dump;
  if (!options.dump.empty()) {
    DumpOptions d;
    d.manifest.side = options.side;
    d.manifest.weights = {{how.weight_version, hash.digest}};
    d.manifest.identity = Json{{"command", "tare score"},
                               {"profile", options.profile},
                               {"faults", fault::Selected()},
                               {"batch_invariance", options.native ? "off" : "on"},
                               {"replay", ReplayArguments({.model = options.model,
                                                           .profile = options.profile,
                                                           .side = options.side,
                                                           .faults = fault::Selected(),
                                                           .weight_version = how.weight_version,
                                                           .batch_tokens = options.batch_tokens,
                                                           .chunk = options.chunk,
                                                           .page_size = options.page_size,
                                                           .row_align = options.row_align,
                                                           .temperature = options.temperature,
                                                           .longest_first = how.longest_first,
                                                           .entropy = options.entropy,
                                                           .tape = options.tape,
                                                           .native = options.native})}};
    if (!options.dump_only.empty()) {
      d.record = [&options](const TapPoint& point) {
        return std::any_of(options.dump_only.begin(), options.dump_only.end(),
                           [&](const std::string& pattern) {
                             return ::fnmatch(pattern.c_str(), point.name.c_str(), 0) == 0;
                           });
      };
    }
    TARE_ASSIGN_OR_RETURN(dump, DumpWriter::Create(Env::Real(), options.dump, d));
  }
  models::Scratch scratch;
  TARE_ASSIGN_OR_RETURN(
      const models::ScoreResult result,
      models::ScoreSequences(ctx, model, tokens.sequences, how, &scratch, dump.get()));
  const auto scored = Clock::now();
  if (dump != nullptr) TARE_RETURN_IF_ERROR(dump->Finish());
  if (!options.logprobs.empty()) TARE_RETURN_IF_ERROR(Write(options, tokens, result, weights));

  // The digest of all logprob bits in the order of the input: two runs agree if and only if it
  // does.
  Sha256 bits;
  double sum = 0;
  int64_t count = 0, non_finite = 0;
  for (const auto& values : result.logprob) {
    bits.Update(values.data(), values.size() * sizeof(float));
    for (float x : values) {
      sum += std::isfinite(x) ? x : 0;
      non_finite += !std::isfinite(x);
      ++count;
    }
  }
  const std::string digest = Hex(bits.Finish());
  const auto seconds = [](auto a, auto b) { return std::chrono::duration<double>(b - a).count(); };
  const double time = seconds(loaded, scored);
  const double mean = count == 0 ? 0 : sum / static_cast<double>(count);
  if (options.json) {
    const Json out{{"schema", "tare.score/1"},
                   {"model", options.model},
                   {"weight_hash", weights},
                   {"profile", options.profile},
                   {"batch_invariance", options.native ? "off" : "on"},
                   {"threads", pool.threads()},
                   {"sequences", tokens.sequences.size()},
                   {"tokens", count},
                   {"rows", result.rows},
                   {"batches", result.batches},
                   {"non_finite", non_finite},
                   {"mean_logprob", mean},
                   {"logprob_sha256", digest},
                   {"load_seconds", seconds(started, loaded)},
                   {"score_seconds", time}};
    std::printf("%s\n", out.dump().c_str());
  } else {
    fmt::print("{}  weights {}\n", options.model, weights.substr(0, 16));
    fmt::print("{} sequences, {} tokens scored, {} rows in {} batches, profile {}, {} threads\n",
               tokens.sequences.size(), count, result.rows, result.batches, options.profile,
               pool.threads());
    fmt::print("mean logprob {:.6f}{}\n", mean,
               non_finite == 0 ? "" : fmt::format(", {} NOT FINITE", non_finite));
    fmt::print("logprob bits sha256 {}\n", digest);
    fmt::print("loaded in {:.2f} s, scored in {:.2f} s, {:.0f} rows/s\n", seconds(started, loaded),
               time, static_cast<double>(result.rows) / std::max(time, 1e-9));
  }
  if (count == 0) return Error(Code::kPrecondition, "no token was scored");
  if (non_finite != 0) return DataLoss("{} of {} logprobs are not finite", non_finite, count);
  return Ok();
}

}  // namespace

TARE_COMMAND(score, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand("score", "token sequences in, logprob bits per token out");
  auto o = std::make_shared<Options>();
  app->add_option("model", o->model, "checkpoint: Hugging Face directory or GGUF file")->required();
  app->add_option(
         "--tokens", o->tokens,
         "safetensors (prompt_ids, prompt_offsets, response_ids, response_offsets) or .jsonl")
      ->required();
  app->add_option("--logprobs", o->logprobs,
                  "write the values here: .safetensors, or .jsonl with hex bits");
  app->add_option("--profile", o->profile, "ieee-f32 or sm90-mma")->capture_default_str();
  app->add_option("--temperature", o->temperature, "of the logprobs")->capture_default_str();
  app->add_flag("--entropy", o->entropy, "the entropy of each position too");
  app->add_option("--threads", o->threads, "0: all CPUs of this process")->capture_default_str();
  app->add_option("--batch-tokens", o->batch_tokens, "rows packed together")->capture_default_str();
  app->add_option("--order", o->order, "given, or length: longest first")->capture_default_str();
  app->add_option("--row-align", o->row_align, "sequences start at multiples of this")
      ->capture_default_str();
  app->add_option("--chunk", o->chunk,
                  "through a paged cache, so many tokens at a time; 0: whole sequences")
      ->capture_default_str();
  app->add_option("--page-size", o->page_size, "tokens of a page, with --chunk")
      ->capture_default_str();
  app->add_flag("--tape", o->tape, "record a tape, as training does");
  app->add_flag("--native", o->native, "the batch-dependent arm: bits may depend on the packing");
  app->add_option("--dump", o->dump, "write every operator's output into this new directory");
  app->add_option("--dump-only", o->dump_only,
                  "record only tensors whose names match this shell pattern (repeatable)");
  app->add_option("--weight-version", o->version,
                  "label of the weights in dumps and JSONL (default: their hash)");
  app->add_option("--side", o->side, "which side a planted fault sees: none, rollout, trainer")
      ->capture_default_str();
  app->add_option("--fault", o->fault, "planted faults, NAME@SIDE (see tare fault list)");
  app->add_flag("--json", o->json, "machine form");
  app->callback([o] {
    const Status s = Score(*o);
    SetExit(s.ok() ? 0 : s.code() == Code::kPrecondition ? 2 : ReportError(s));
  });
});

}  // namespace tare
