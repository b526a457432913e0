#include "workflow/gates/evidence_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/sha256.h"

namespace tare::workflow {
namespace {

constexpr int64_t kMaxToken = INT32_MAX;
constexpr int64_t kMaxRows = int64_t{1} << 40;

std::string Short(std::string_view digest) { return std::string(digest.substr(0, 19)); }

// Every finite value that is not zero is a decimal of at most four digits, or a bf16 number.
bool AllOf(const LogprobPath& path, bool (*form)(uint32_t word, float value)) {
  int64_t values = 0;
  for (const LogprobLine& line : path.lines) {
    for (const std::optional<uint32_t>& word : line.bits) {
      if (!word) continue;
      const float value = std::bit_cast<float>(*word);
      if (!std::isfinite(value) || value == 0.0f) continue;
      if (!form(*word, value)) return false;
      ++values;
    }
  }
  return values >= 8;  // fewer can be so by chance
}

}  // namespace

Recipe ReadRecipe(const Field& field, size_t min) {
  Recipe out;
  for (const auto& [key, value] : field.Members(min)) out[key] = value.Text();
  return out;
}

std::string RecipeId(const Recipe& recipe) {
  std::string text;
  for (const auto& [key, value] : recipe) text += fmt::format("{}={}\n", key, value);
  return Hex(Sha256Of(text));
}

std::vector<LogprobLine> ReadLogprobLines(const Field& field) {
  std::vector<LogprobLine> out;
  for (const Field& item : field.Items()) {
    LogprobLine line;
    line.sequence = item.At("sequence").Str();
    line.prompt = item.At("prompt").Ints(0, kMaxToken);
    line.tokens = item.At("tokens").Ints(0, kMaxToken);
    line.mask = item.At("mask").Ints(0, 1);
    const Field bits = item.At("bits");
    for (const Field& word : bits.Items()) {
      if (word.IsNull()) {
        line.bits.emplace_back();
      } else {
        line.bits.emplace_back(word.Bits32());
      }
    }
    if (line.mask.size() != line.tokens.size() || line.bits.size() != line.tokens.size()) {
      item.Malformed(fmt::format("has {} tokens, {} mask entries and {} words; one of each",
                                 line.tokens.size(), line.mask.size(), line.bits.size()));
    }
    out.push_back(std::move(line));
  }
  return out;
}

LogprobPath ReadLogprobPath(const Field& field, std::string name) {
  LogprobPath path;
  path.name = std::move(name);
  path.dtype = field.At("dtype").Str();
  path.kind = field.At("kind").OneOf({"raw", "processed"});
  path.temperature = fmt::format("0x{:08x}", field.At("temperature").Bits32());
  path.vocabulary = field.At("vocabulary").Int(1, kMaxToken);
  path.rows = field.At("rows").Int(0, kMaxRows);
  path.lines = ReadLogprobLines(field.At("sequences"));
  return path;
}

int64_t ValidTokens(const LogprobPath& path) {
  int64_t valid = 0;
  for (const LogprobLine& line : path.lines) {
    for (const int64_t m : line.mask) valid += m;
  }
  return valid;
}

void CheckOriginal(Judging* judging, std::string_view row, std::string_view where,
                   const LogprobPath& path) {
  judging->Require(row, path.dtype == "f32", reason::kNotOriginalDtype,
                   fmt::format("{}: dtype is {}; f32 words are wanted", where, path.dtype));
  // A text of four decimals, made binary again, and a bf16 number leave their form (T-04).
  judging->Require(row,
                   !AllOf(path,
                          [](uint32_t, float value) {
                            const double four =
                                std::nearbyint(static_cast<double>(value) * 1e4) / 1e4;
                            return static_cast<float>(four) == value;
                          }),
                   reason::kNotOriginalDtype,
                   fmt::format("{}: every value is a decimal of at most four digits", where));
  judging->Require(row, !AllOf(path, [](uint32_t word, float) { return (word & 0xffffu) == 0; }),
                   reason::kNotOriginalDtype,
                   fmt::format("{}: every value is a bf16 number in f32 words", where));
  int64_t rows = 0, present = 0, tokens = 0, zero = 0;
  for (const LogprobLine& line : path.lines) {
    rows += static_cast<int64_t>(line.prompt.size() + line.tokens.size()) - 1;
    for (const auto& word : line.bits) {
      ++tokens;
      present += word.has_value();
      zero += word.has_value() && *word == 0;
    }
  }
  judging->Require(
      "CHEAP-13", present == tokens, reason::kDefaultFilled,
      fmt::format("{}: {} of {} tokens have no logprob", where, tokens - present, tokens));
  judging->Require("CHEAP-13", tokens < 2 || zero < tokens, reason::kDefaultFilled,
                   fmt::format("{}: every logprob is 0.0", where));
  judging->Require("CHEAP-14", path.rows == rows, reason::kPathUnexecuted,
                   fmt::format("{}: {} token rows were computed, {} stand in the sequences", where,
                               path.rows, rows));
}

LogprobCounts CompareLogprobs(Judging* judging, std::string_view row, std::string_view count_row,
                              std::string_view where, const LogprobPath& a, const LogprobPath& b) {
  LogprobCounts c;
  if (!judging->Require("DISC-12", a.kind == b.kind, reason::kLogprobKind,
                        fmt::format("{}: {} against {}", where, a.kind, b.kind)) ||
      !judging->Require(row, a.temperature == b.temperature && a.vocabulary == b.vocabulary,
                        reason::kSemanticsDiffer,
                        fmt::format("{}: temperature {} over {} tokens against {} over {}", where,
                                    a.temperature, a.vocabulary, b.temperature, b.vocabulary)) ||
      !judging->Require(row, a.dtype == b.dtype, reason::kDtypeDiffers,
                        fmt::format("{}: {} against {}", where, a.dtype, b.dtype)) ||
      !judging->Require(
          count_row, a.lines.size() == b.lines.size(), reason::kCountMismatch,
          fmt::format("{}: {} sequences against {}", where, a.lines.size(), b.lines.size()))) {
    return c;
  }
  std::string first;
  bool all_zero = true;
  for (size_t i = 0; i < a.lines.size(); ++i) {
    const LogprobLine &x = a.lines[i], &y = b.lines[i];
    if (!judging->Require(count_row, x.tokens.size() == y.tokens.size(), reason::kCountMismatch,
                          fmt::format("{}: {}: {} tokens against {}", where, x.sequence,
                                      x.tokens.size(), y.tokens.size())) ||
        !judging->Require(
            "C5-11", x.sequence == y.sequence && x.prompt == y.prompt && x.tokens == y.tokens,
            reason::kTokensDiffer,
            fmt::format("{}: {}: the two sides hold different tokens", where, x.sequence)) ||
        !judging->Require(
            count_row, x.mask == y.mask, reason::kMaskDiffers,
            fmt::format("{}: {}: which tokens are valid differs", where, x.sequence))) {
      return c;
    }
    for (size_t t = 0; t < x.tokens.size(); ++t) {
      ++c.tokens;
      if (x.mask[t] == 0) continue;
      ++c.valid;
      if (!x.bits[t] || !y.bits[t]) {
        judging->Require("CHEAP-13", false, reason::kDefaultFilled,
                         fmt::format("{}: {} token {} has no logprob", where, x.sequence, t));
        return c;
      }
      ++c.compared;
      const uint32_t p = *x.bits[t], q = *y.bits[t];
      all_zero = all_zero && p == 0 && q == 0;
      c.non_finite +=
          !std::isfinite(std::bit_cast<float>(p)) || !std::isfinite(std::bit_cast<float>(q));
      if (p == q) continue;
      ++c.mismatches;
      c.sign_of_zero += (p ^ q) == 0x80000000u && (p << 1) == 0;
      if (first.empty()) {
        first = fmt::format("{} token {}: 0x{:08x} against 0x{:08x}", x.sequence, t, p, q);
      }
    }
  }
  judging->Require(count_row, c.compared > 0, reason::kNoValidTokens,
                   fmt::format("{}: {} tokens, none of them valid", where, c.tokens));
  judging->Require("CHEAP-13", c.compared < 2 || !all_zero, reason::kDefaultFilled,
                   fmt::format("{}: every logprob is 0.0 on both sides", where));
  judging->Require("CHEAP-05", c.non_finite == 0, reason::kNonFinite,
                   fmt::format("{}: {} of {} valid tokens", where, c.non_finite, c.compared));
  judging->Require(row, c.mismatches == 0,
                   c.mismatches == c.sign_of_zero ? reason::kSignOfZero : reason::kBitMismatch,
                   fmt::format("{}: {} of {} valid tokens differ; first {}", where, c.mismatches,
                               c.compared, first));
  return c;
}

SideIdentity ReadIdentity(const Field& field, std::string side) {
  SideIdentity id;
  id.side = std::move(side);
  id.image = field.At("image").Digest();
  id.executable = field.At("executable").Hash();
  id.interpreter = field.At("interpreter").Str();
  id.packages = field.At("packages").Str();
  for (const auto& [name, hash] : field.At("libraries").Members()) id.libraries[name] = hash.Hash();
  id.overlay = field.At("overlay").Strings();
  const Field at = field.At("switch");
  id.switch_name = at.At("name").Str();
  id.switch_at_start = at.At("at_start").Text();
  id.switch_effective = at.At("effective").Int(0, 1);
  const Field workers = at.At("workers");
  id.workers = workers.Ints(0, 1, 1);
  const int64_t count = at.At("worker_count").Int(1, 1 << 20);
  if (static_cast<int64_t>(id.workers.size()) != count) {
    workers.Malformed(fmt::format("speaks of {} workers, there are {}", id.workers.size(), count));
  }
  id.profile = field.At("profile").Str();
  id.device = field.At("device").Str();
  id.driver = field.At("driver").Str();
  id.topology = field.At("topology").Str();
  id.contracts = field.At("contracts").Hash();
  id.prefix_caching = field.At("prefix_caching").Bool();
  id.faults = field.At("faults").Text();
  return id;
}

void CheckIdentities(Judging* judging, std::string_view row, const Subject& subject,
                     const SideIdentity& rollout, const SideIdentity& trainer) {
  for (const SideIdentity* id : {&rollout, &trainer}) {
    const bool on =
        id->switch_effective == 1 &&
        std::set<int64_t>(id->workers.begin(), id->workers.end()) == std::set<int64_t>{1};
    judging->Require(
        "SYS-03", on && id->switch_at_start == "1" && id->switch_name == "VLLM_BATCH_INVARIANT",
        reason::kSwitchNotEffective,
        fmt::format("{}: {} is `{}` at the start, {} in effect, {} of {} workers on", id->side,
                    id->switch_name, id->switch_at_start, id->switch_effective,
                    std::count(id->workers.begin(), id->workers.end(), 1), id->workers.size()));
    judging->Require("RL-01", id->image == subject.image, reason::kIdentityDiffers,
                     fmt::format("{}: runs image {}, the subject is {}", id->side, Short(id->image),
                                 Short(subject.image)));
    judging->Require("RL-01", id->overlay.empty(), reason::kIdentityDiffers,
                     fmt::format("{}: {} files are changed over the image, {} for one", id->side,
                                 id->overlay.size(), id->overlay.empty() ? "" : id->overlay[0]));
    judging->Require(row, id->faults.empty(), reason::kIdentityDiffers,
                     fmt::format("{}: planted faults are on: {}", id->side, id->faults));
  }
  judging->Require(
      "RL-04", rollout.interpreter == trainer.interpreter && rollout.packages == trainer.packages,
      reason::kTwoEnvironments,
      fmt::format("rollout {} with packages {}, trainer {} with {}", rollout.interpreter,
                  rollout.packages, trainer.interpreter, trainer.packages));
  std::string library;
  for (const auto& [name, hash] : rollout.libraries) {
    const auto it = trainer.libraries.find(name);
    if (it == trainer.libraries.end() || it->second != hash) library = name;
  }
  for (const auto& [name, hash] : trainer.libraries) {
    if (!rollout.libraries.contains(name)) library = name;
  }
  judging->Require("RL-02", library.empty(), reason::kTwoEnvironments,
                   fmt::format("the loaded library {} is another on the two sides", library));
  const auto same = [&](std::string_view what, const std::string& a, const std::string& b) {
    judging->Require(row, a == b, reason::kIdentityDiffers,
                     fmt::format("{}: rollout {}, trainer {}", what, a, b));
  };
  same("executable", rollout.executable, trainer.executable);
  same("profile", rollout.profile, trainer.profile);
  same("device", rollout.device, trainer.device);
  same("driver", rollout.driver, trainer.driver);
  same("topology", rollout.topology, trainer.topology);
  same("contracts", rollout.contracts, trainer.contracts);
}

Series ReadSeries(const Field& field, size_t min) {
  Series s;
  s.values = field.At("values").Ints(0, INT64_MAX / 2, min);
  s.median = field.At("median").Int(0, INT64_MAX);
  s.sum = field.At("sum").Int(0, INT64_MAX);
  return s;
}

bool SeriesFollows(const Series& series) {
  if (series.values.empty()) return false;
  std::vector<int64_t> sorted = series.values;
  std::sort(sorted.begin(), sorted.end());
  double sum = 0;
  int64_t exact = 0;
  for (const int64_t v : sorted) {
    sum += static_cast<double>(v);
    if (sum > 9e18) return false;
    exact += v;
  }
  return exact == series.sum && sorted[(sorted.size() - 1) / 2] == series.median;
}

Recipe ReadAgreement(const Field& field) { return field.IsNull() ? Recipe() : ReadRecipe(field); }

std::optional<int64_t> Agreed(const Recipe& agreement, const std::string& key, int64_t min) {
  const auto it = agreement.find(key);
  if (it == agreement.end() || it->second.empty() || it->second.size() > 15 ||
      it->second.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  const int64_t value = std::stoll(it->second);
  if (value < min) return std::nullopt;
  return value;
}

std::vector<std::string> AgreedList(const Recipe& agreement, const std::string& key) {
  std::vector<std::string> out;
  const auto it = agreement.find(key);
  if (it == agreement.end()) return out;
  std::string_view rest = it->second;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find('|'), rest.size());
    out.emplace_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return out;
}

bool AllDifferent(const std::vector<std::string>& names) {
  return std::set<std::string>(names.begin(), names.end()).size() == names.size();
}

}  // namespace tare::workflow
