// `tare arms A B`: two arms of a real system that hold the same tokens, judged. Each is a
// safetensors file with prompt_ids, prompt_offsets, response_ids, response_offsets (I32) and
// logprobs (F32, one per response token), and says in its metadata what made it.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <memory>

#include "base/env.h"
#include "tensor/safetensors.h"
#include "tools/command.h"
#include "workflow/gates/arms.h"

namespace tare {
namespace {

struct Options {
  std::string a, b, isolated, metrics, question = "C5";
  bool json = false, evidence = false;
};

struct Arm {
  std::string name;
  bool exists = false;
  std::string weights, layout, computation, system = "unknown";
  std::vector<int32_t> prompt, prompt_at, response, response_at;
  std::vector<uint32_t> words;
};

Result<std::vector<int32_t>> Ints(const SafetensorsFile& file, const char* name) {
  TARE_ASSIGN_OR_RETURN(const Tensor t, file.Get(name));
  if (t.dtype() != DType::kI32 || t.rank() != 1) {
    return DataLoss("{}: {} is not I32 of one dimension", file.where(), name);
  }
  return std::vector<int32_t>(t.as<int32_t>(), t.as<int32_t>() + t.elements());
}

Status CheckOffsets(const SafetensorsFile& file, const char* name, const std::vector<int32_t>& at,
                    size_t count) {
  const bool right = !at.empty() && at.front() == 0 && std::is_sorted(at.begin(), at.end()) &&
                     static_cast<size_t>(at.back()) == count;
  return right ? Ok() : DataLoss("{}: {} must ascend from 0 to {}", file.where(), name, count);
}

// A file that is not there is an arm that does not exist, which is an answer.
Result<Arm> Read(const std::string& path) {
  Arm arm;
  arm.name = path.substr(path.rfind('/') + 1);
  if (arm.name.ends_with(".safetensors")) arm.name.resize(arm.name.size() - 12);
  if (!Env::Real()->Exists(path)) return arm;
  TARE_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Open(Env::Real(), path));
  TARE_ASSIGN_OR_RETURN(arm.prompt, Ints(file, "prompt_ids"));
  TARE_ASSIGN_OR_RETURN(arm.prompt_at, Ints(file, "prompt_offsets"));
  TARE_ASSIGN_OR_RETURN(arm.response, Ints(file, "response_ids"));
  TARE_ASSIGN_OR_RETURN(arm.response_at, Ints(file, "response_offsets"));
  TARE_RETURN_IF_ERROR(CheckOffsets(file, "prompt_offsets", arm.prompt_at, arm.prompt.size()));
  TARE_RETURN_IF_ERROR(
      CheckOffsets(file, "response_offsets", arm.response_at, arm.response.size()));
  TARE_ASSIGN_OR_RETURN(const Tensor logprobs, file.Get("logprobs"));
  if (logprobs.dtype() != DType::kF32 || logprobs.rank() != 1 ||
      static_cast<size_t>(logprobs.elements()) != arm.response.size() ||
      arm.prompt_at.size() != arm.response_at.size()) {
    return DataLoss("{}: logprobs must be F32, one per response token", path);
  }
  for (int64_t i = 0; i < logprobs.elements(); ++i) {
    arm.words.push_back(std::bit_cast<uint32_t>(logprobs.as<float>()[i]));
  }
  arm.exists = true;
  const auto meta = [&](const char* key) {
    for (const auto& [k, v] : file.metadata()) {
      if (k == key) return std::string(v);
    }
    return std::string();
  };
  arm.weights = meta("weights_sha256");
  arm.layout = meta("how");
  if (!meta("scores_tokens_of").empty()) {
    arm.system = "trainer";
  } else if (!meta("logprobs_mode").empty()) {
    arm.system = "rollout";
  }
  const std::string named = meta("arm").empty() ? arm.name : meta("arm");
  arm.computation = fmt::format("{} {} {}", meta("attention"), meta("param_dtype"),
                                named.substr(named.rfind('.') + 1));
  return arm;
}

// The dtype that the values have, whatever they are stored as: F32 words with 16 zero bits are
// bf16 values. By chance that happens to one in 65,536, so at least eight are asked for.
std::string EffectiveDtype(const Arm& arm) {
  const bool narrow =
      arm.words.size() >= 8 && std::all_of(arm.words.begin(), arm.words.end(),
                                           [](uint32_t w) { return (w & 0xffffu) == 0; });
  return narrow ? "bf16" : "f32";
}

int64_t Ordered(uint32_t word) {
  const int64_t magnitude = word & 0x7fffffffu;
  return (word >> 31) != 0 ? -magnitude : magnitude;
}

Result<Json> Compare(const Arm& a, const Arm& b) {
  Json out = Json::array();
  if (!a.exists || !b.exists) return out;
  if (a.response_at.size() != b.response_at.size() || a.prompt != b.prompt ||
      a.prompt_at != b.prompt_at) {
    return InvalidArgument("{} and {} do not hold the same prompts", a.name, b.name);
  }
  for (size_t s = 0; s + 1 < a.response_at.size(); ++s) {
    const int64_t na = a.response_at[s + 1] - a.response_at[s];
    const int64_t nb = b.response_at[s + 1] - b.response_at[s];
    int64_t common = 0, equal = 0, max_ulp = 0;
    double max_abs = 0;
    for (; common < std::min(na, nb); ++common) {
      const size_t i = static_cast<size_t>(a.response_at[s] + common);
      const size_t k = static_cast<size_t>(b.response_at[s] + common);
      if (a.response[i] != b.response[k]) break;
      equal += a.words[i] == b.words[k] ? 1 : 0;
      max_ulp = std::max(max_ulp, std::abs(Ordered(a.words[i]) - Ordered(b.words[k])));
      const double x = std::bit_cast<float>(a.words[i]), y = std::bit_cast<float>(b.words[k]);
      if (!std::isfinite(x) || !std::isfinite(y)) {
        return DataLoss("a logprob of sequence {} is not finite", s);
      }
      max_abs = std::max(max_abs, std::abs(x - y));
    }
    out.push_back(Json{{"tokens", std::max(na, nb)},
                       {"common", common},
                       {"equal", equal},
                       {"max_ulp", max_ulp},
                       {"max_abs", max_abs}});
  }
  return out;
}

Json ArmJson(const Arm& arm) {
  return Json{{"name", arm.name},
              {"exists", arm.exists},
              {"system", arm.system},
              {"weights_sha256", arm.weights},
              {"stored_dtype", arm.exists ? "f32" : ""},
              {"effective_dtype", arm.exists ? EffectiveDtype(arm) : ""},
              {"layout", arm.layout},
              {"computation", arm.computation}};
}

Result<Json> Evidence(const Options& o) {
  TARE_ASSIGN_OR_RETURN(const Arm a, Read(o.a));
  TARE_ASSIGN_OR_RETURN(const Arm b, Read(o.b));
  TARE_ASSIGN_OR_RETURN(const Json sequences, Compare(a, b));
  Json out = {{"schema", "tare.gate.arms/v1"},
              {"question", o.question},
              {"a", ArmJson(a)},
              {"b", ArmJson(b)},
              {"sequences", sequences},
              {"diagnostic_metrics", Json::object()}};
  if (!o.isolated.empty()) {
    TARE_ASSIGN_OR_RETURN(const Arm control, Read(o.isolated));
    TARE_ASSIGN_OR_RETURN(const Json against, Compare(control, b));
    out["isolated_control"] = Json{{"name", control.name}, {"sequences", against}};
  }
  if (!o.metrics.empty()) {
    TARE_ASSIGN_OR_RETURN(const std::string text, Env::Real()->ReadFile(o.metrics));
    TARE_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
    const Json all = json.is_object() ? json.value("metrics", Json::object()) : Json::object();
    const Json pair = all.is_object() ? all.value(a.name + " / " + b.name, Json()) : Json();
    if (!pair.is_object()) {
      return Error(Code::kNotFound, "{}: no metrics of `{} / {}`", o.metrics, a.name, b.name);
    }
    for (const auto& [name, value] : pair.items()) {
      if (value.is_number()) out["diagnostic_metrics"][name] = value;
    }
  }
  return out;
}

int Run(const Options& o) {
  const Result<Json> evidence = Evidence(o);
  if (!evidence.ok()) return ReportError(evidence.status());
  if (o.evidence) {
    fmt::print("{}\n", evidence->dump(1));
    return 0;
  }
  const workflow::GateJudgement j = workflow::JudgeArms(*evidence);
  if (o.json) {
    fmt::print("{}\n", j.ToJson().dump(1));
  } else {
    for (const auto& f : j.findings) {
      fmt::print("{:<9} {:<14} {}{}{}\n", f.row, VerdictName(f.verdict), f.reason,
                 f.reason.empty() ? "" : ": ", Printable(f.detail));
    }
    if (j.scope.contains("notes")) {
      for (const Json& note : j.scope["notes"]) {
        fmt::print("          {}\n", Printable(note.get<std::string>()));
      }
    }
    fmt::print("{}\n", VerdictName(j.verdict));
  }
  std::fflush(stdout);
  if (!j.reason.empty()) PrintReason(j.verdict, j.reason);
  return ExitCode(j.verdict);
}

}  // namespace

TARE_COMMAND(arms, [](CLI::App& root) {
  CLI::App* app = root.add_subcommand("arms", "judge two arms of a real system, token by token");
  auto o = std::make_shared<Options>();
  app->add_option("a", o->a, "first arm; a file that is not there is an arm that does not exist")
      ->required();
  app->add_option("b", o->b, "second arm")->required();
  app->add_option("--question", o->question, "C3: inside one system; C5: rollout against trainer")
      ->check(CLI::IsMember({"C3", "C5"}))
      ->capture_default_str();
  app->add_option("--isolated", o->isolated,
                  "an arm like B whose packed sequences are known not to see each other");
  app->add_option("--metrics", o->metrics, "the other system's own metrics, shown as diagnostic");
  app->add_flag("--evidence", o->evidence, "print the evidence document, judge nothing");
  app->add_flag("--json", o->json, "for machines");
  app->callback([o] { SetExit(Run(*o)); });
});

}  // namespace tare
