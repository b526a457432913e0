#include "trainer/control.h"

#include <map>

#include "base/reasons.h"
#include "base/sha256.h"

namespace tare::trainer {
namespace {

Control Answer(Verdict verdict, std::string_view why, std::string line) {
  Control c;
  c.verdict = verdict;
  c.reason = why;
  c.lines.push_back(std::move(line));
  return c;
}

Control Judge(std::span<const Json> records) {
  std::map<std::string, const Json*> arms;
  for (const Json& r : records) {
    const std::string arm = r.at("arm");
    const std::string schema = r.at("schema");
    if (schema != (arm == "native" ? kBaselineSchema : kTrainSchema))
      return Answer(Verdict::kRefused, reason::kReceiptMalformed,
                    fmt::format("arm {}: schema {}", arm, schema));
    if (!arms.emplace(arm, &r).second)
      return Answer(Verdict::kRefused, reason::kArmsDiffer,
                    fmt::format("arm {} is there twice", arm));
  }
  for (const char* name : {"production", "surrogate", "native"}) {
    if (!arms.contains(name) || arms.size() != 3)
      return Answer(
          Verdict::kRefused, reason::kArmsDiffer,
          fmt::format("wanted production, surrogate and native, once each; {} records, {} {}",
                      records.size(), name, arms.contains(name) ? "among them" : "missing"));
  }
  const Json& p = *arms.at("production");
  for (const auto& [name, r] : arms) {
    // Three records that name no data at all would compare as one data order.
    for (const char* key : {"initial_weights", "data_sha256"}) {
      if (!ParseSha256(r->at(key).get<std::string>()).ok())
        return Answer(Verdict::kRefused, reason::kReceiptMalformed,
                      fmt::format("{}: {} is {}, not 64 lower-case hex digits", name, key,
                                  r->at(key).dump()));
    }
    for (const char* key : {"profile", "faults", "initial_weights", "data_sha256", "first_sequence",
                            "batch", "lr", "lr_schedule", "warmup_steps", "total_steps"}) {
      if (r->at(key) != p.at(key))
        return Answer(Verdict::kRefused, reason::kArmsDiffer,
                      fmt::format("{}: {} is {}, production has {}", name, key, r->at(key).dump(),
                                  p.at(key).dump()));
    }
    if (r->at("steps").empty() || r->at("steps").size() != p.at("steps").size())
      return Answer(Verdict::kRefused, reason::kArmsDiffer,
                    fmt::format("{}: {} steps, production has {}", name, r->at("steps").size(),
                                p.at("steps").size()));
    const int64_t kernels = r->at("steps")[0].at("backward_kernels").get<int64_t>();
    if ((kernels == 0) != (name == "surrogate"))
      return Answer(Verdict::kRefused, reason::kDetachedSubstitute,
                    fmt::format("{}: {} kernels of the backward walk ran", name, kernels));
  }
  const Json& first = p.at("steps")[0];
  const Json& other = arms.at("surrogate")->at("steps")[0];
  if (first.at("forward_sha256") != other.at("forward_sha256"))
    return Answer(Verdict::kFail, reason::kBitMismatch,
                  "the surrogate's visible forward differs from production's at the first step");
  Control c;
  c.verdict = Verdict::kPass;
  c.lines.push_back(fmt::format("visible forward of production and surrogate: equal bits, {} rows",
                                first.at("tokens").dump()));
  for (const char* name : {"production", "surrogate", "native"}) {
    const Json& r = *arms.at(name);
    int64_t ns = 0;
    for (const Json& s : r.at("steps")) {
      ns += s.at("forward_ns").get<int64_t>() + s.at("loss_ns").get<int64_t>() +
            s.at("backward_ns").get<int64_t>() + s.at("optimizer_ns").get<int64_t>();
    }
    c.lines.push_back(
        fmt::format("{:<10} held-out loss {:.6f} -> {:.6f}  {:.1f} ms a step", name,
                    r.at("held_out_before").get<double>(), r.at("held_out_after").get<double>(),
                    static_cast<double>(ns) * 1e-6 / static_cast<double>(r.at("steps").size())));
  }
  c.lines.push_back("quality not covered: held-out loss of three short runs is not an evaluation");
  return c;
}

}  // namespace

Control JudgeControl(std::span<const Json> records) {
  try {
    return Judge(records);
  } catch (const nlohmann::json::exception& e) {
    return Answer(Verdict::kRefused, reason::kReceiptMalformed, e.what());
  }
}

Json Control::ToJson() const {
  return Json{{"schema", "tare.train-control/1"},
              {"verdict", VerdictName(verdict)},
              {"reason", reason},
              {"lines", lines}};
}

}  // namespace tare::trainer
