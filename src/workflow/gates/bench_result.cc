#include "workflow/gates/bench_result.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "base/check.h"
#include "workflow/gates/judge.h"

namespace tare::workflow {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 40;

// Typed members of a file from outside; the first wrong one is the error.
class Reader {
 public:
  explicit Reader(const Json& object) : object_(object) {
    if (!object.is_object()) status_ = InvalidArgument("not a JSON object");
  }
  void Count(const char* key, int64_t* out) {
    const Json* value = Get(key, true);
    if (value != nullptr) ToCount(*value, key, out);
  }
  void OptionalCount(const char* key, int64_t* out) {
    const Json* value = Get(key, false);
    if (value != nullptr && !value->is_null()) ToCount(*value, key, out);
  }
  void Real(const char* key, double* out, bool required = true) {
    const Json* value = Get(key, required);
    if (value != nullptr) ToReal(*value, key, out);
  }
  void String(const char* key, std::string* out) {
    const Json* value = Get(key, true);
    if (value == nullptr) return;
    if (!value->is_string() || value->get_ref<const std::string&>().empty()) {
      return Fail(key, "a non-empty string");
    }
    *out = value->get<std::string>();
  }
  void Counts(const char* key, std::vector<int64_t>* out) {
    Each(key, [&](const Json& item) { ToCount(item, key, &out->emplace_back()); });
  }
  void Reals(const char* key, std::vector<double>* out) {
    Each(key, [&](const Json& item) { ToReal(item, key, &out->emplace_back()); });
  }
  template <typename F>
  void Each(const char* key, const F& visit) {
    const Json* value = Get(key, false);
    if (value == nullptr) return;
    if (!value->is_array()) return Fail(key, "a list");
    for (const Json& item : *value) visit(item);
  }
  const Json* Get(const char* key, bool required) {
    if (!status_.ok()) return nullptr;
    auto it = object_.find(key);
    if (it != object_.end()) return &*it;
    if (required) status_ = InvalidArgument("no key `{}`", key);
    return nullptr;
  }
  void Fail(const char* key, const char* right) {
    if (status_.ok()) status_ = InvalidArgument("`{}` is not {}", key, right);
  }
  const Status& status() const { return status_; }

 private:
  void ToCount(const Json& value, const char* key, int64_t* out) {
    if (!value.is_number_integer() || value < 0 || value > kMaxTokens) {
      return Fail(key, "made of whole numbers >= 0");
    }
    *out = value.get<int64_t>();
  }
  void ToReal(const Json& value, const char* key, double* out) {
    if (!value.is_number()) return Fail(key, "made of numbers");
    *out = value.get<double>();
    if (!std::isfinite(*out) || *out < 0) Fail(key, "made of finite numbers >= 0");
  }
  const Json& object_;
  Status status_;
};

void Add(BenchVerdict* out, std::string_view reason, std::string detail) {
  const Reason* known = FindReason(reason);
  TARE_CHECK(known != nullptr);
  out->findings.push_back({known->verdict, reason, std::move(detail)});
  if (Gravity(known->verdict) > Gravity(out->verdict)) {
    out->verdict = known->verdict;
    out->reason = reason;
  }
}

int64_t Sum(const std::vector<int64_t>& values) {
  int64_t sum = 0;
  for (int64_t v : values) sum += std::min(v, kMaxTokens);  // bounded by the reader: no overflow
  return sum;
}

bool Near(double a, double b) { return std::fabs(a - b) <= 1e-6 * std::max(1.0, std::fabs(b)); }

double MeanMs(const std::vector<double>& seconds) {
  double sum = 0;
  for (double s : seconds) sum += s;
  return sum / static_cast<double>(seconds.size()) * 1000;
}

void CheckLengths(const BenchResult& r, const std::vector<int64_t>& lens, int64_t required,
                  const char* what, BenchVerdict* out) {
  if (required == 0) return;
  int64_t wrong = 0;
  size_t first = lens.size();
  for (size_t i = 0; i < lens.size(); ++i) {
    if (lens[i] == required) continue;
    ++wrong;
    first = std::min(first, i);
  }
  if (wrong == 0) return;
  Add(out, reason::kWrongLength,
      fmt::format("{}: {} of {} requests do not have {} {} tokens; first request {} with {}",
                  r.name, wrong, lens.size(), required, what, first, lens[first]));
}

void CheckOne(const BenchResult& r, const BenchRequirement& requirement, BenchVerdict* out) {
  if (r.num_prompts == 0 || r.completed == 0) {
    Add(out, reason::kNothingCompared, fmt::format("{}: no request completed", r.name));
    return;
  }
  if (r.failed > 0 || r.completed != r.num_prompts || r.errors > 0) {
    Add(out, reason::kRequestsFailed,
        fmt::format("{}: {} of {} requests completed, {} failed, {} carry an error", r.name,
                    r.completed, r.num_prompts, r.failed, r.errors));
  }
  const auto n = static_cast<size_t>(r.num_prompts);
  if (r.input_lens.empty() && r.output_lens.empty() && r.ttfts.empty()) {
    Add(out, reason::kNoDetail, fmt::format("{}: no input_lens, output_lens or ttfts", r.name));
    return;
  }
  const auto inconsistent = [&](std::string what) {
    Add(out, reason::kResultInconsistent, r.name + ": " + std::move(what));
  };
  if (r.input_lens.size() != n || r.output_lens.size() != n || r.ttfts.size() != n ||
      (!r.latencies.empty() && r.latencies.size() != n) ||
      (!r.start_times.empty() && r.start_times.size() != n)) {
    inconsistent(
        fmt::format("{} prompts, but {} input_lens, {} output_lens, {} ttfts, {} latencies", n,
                    r.input_lens.size(), r.output_lens.size(), r.ttfts.size(), r.latencies.size()));
    return;
  }
  if (Sum(r.input_lens) != r.total_input_tokens) {
    inconsistent(fmt::format("total_input_tokens {} is not the sum of input_lens, {}",
                             r.total_input_tokens, Sum(r.input_lens)));
  }
  if (Sum(r.output_lens) != r.total_output_tokens) {
    inconsistent(fmt::format("total_output_tokens {} is not the sum of output_lens, {}",
                             r.total_output_tokens, Sum(r.output_lens)));
  }
  const double rate = static_cast<double>(r.total_output_tokens) / r.duration_s;
  if (!Near(r.output_throughput, rate)) {
    inconsistent(fmt::format("output_throughput {} is not tokens over duration, {}",
                             r.output_throughput, rate));
  }
  if (r.failed == 0 && !Near(r.mean_ttft_ms, MeanMs(r.ttfts))) {
    inconsistent(fmt::format("mean_ttft_ms {} is not the mean of ttfts, {}", r.mean_ttft_ms,
                             MeanMs(r.ttfts)));
  }
  if (r.failed == 0 && r.mean_e2el_ms >= 0 && !r.latencies.empty() &&
      !Near(r.mean_e2el_ms, MeanMs(r.latencies))) {
    inconsistent(fmt::format("mean_e2el_ms {} is not the mean of latencies, {}", r.mean_e2el_ms,
                             MeanMs(r.latencies)));
  }
  CheckLengths(r, r.input_lens, requirement.input_len, "input", out);
  CheckLengths(r, r.output_lens, requirement.output_len, "output", out);
}

bool SameRun(const BenchResult& a, const BenchResult& b) {
  return !a.ttfts.empty() && a.ttfts == b.ttfts && a.start_times == b.start_times;
}

void CheckCache(std::span<const BenchResult> results, const std::optional<CacheCounters>& before,
                const std::optional<CacheCounters>& after, const BenchRequirement& requirement,
                BenchVerdict* out) {
  if (!before || !after) {
    Add(out, reason::kCountersMissing, before ? "no snapshot after" : "no snapshot before");
    return;
  }
  int64_t expected = 0, own = 0;
  for (const BenchResult& r : results) {
    expected += r.total_input_tokens;
    if (requirement.warmups == 0 || r.input_lens.empty()) continue;
    const int64_t first = r.input_lens[0];
    expected += requirement.warmups * first;
    // The last token of a prompt is always computed, and only whole blocks are kept.
    if (requirement.block_size > 0 && first > 0) {
      own += requirement.warmups * ((first - 1) / requirement.block_size * requirement.block_size);
    }
  }
  const int64_t queries = after->queries - before->queries;
  const int64_t hits = after->hits - before->hits;
  if (queries < 0 || hits < 0 || hits > queries) {
    Add(out, reason::kCountersDisagree,
        fmt::format("queries grew by {} and hits by {}: not one server's life", queries, hits));
    return;
  }
  if (queries != expected) {
    Add(out, reason::kCountersDisagree,
        fmt::format("the server looked up {} prompt tokens, the results and their warm-ups have {}",
                    queries, expected));
  }
  if (hits > own) {
    Add(out, reason::kWarmCache,
        fmt::format("{} of {} looked-up prompt tokens came from the prefix cache; warm-ups explain "
                    "at most {}",
                    hits, queries, own));
  } else if (hits > 0) {
    out->notes.push_back(fmt::format(
        "{} of {} looked-up prompt tokens came from the prefix cache; no more than the "
        "client's own warm-ups with its first prompt can make ({}). The counters do not "
        "say which requests had them",
        hits, queries, own));
  }
}

}  // namespace

Result<BenchResult> ParseBenchResult(std::string_view json) {
  TARE_ASSIGN_OR_RETURN(Json root, ParseJson(json));
  BenchResult r;
  Reader reader(root);
  reader.String("backend", &r.backend);
  reader.String("model_id", &r.model_id);
  reader.OptionalCount("max_concurrency", &r.max_concurrency);
  reader.Count("num_prompts", &r.num_prompts);
  reader.Count("completed", &r.completed);
  reader.OptionalCount("failed", &r.failed);
  reader.Count("total_input_tokens", &r.total_input_tokens);
  reader.Count("total_output_tokens", &r.total_output_tokens);
  reader.Real("duration", &r.duration_s);
  reader.Real("output_throughput", &r.output_throughput);
  reader.Real("mean_ttft_ms", &r.mean_ttft_ms);
  reader.Real("mean_e2el_ms", &r.mean_e2el_ms, /*required=*/false);
  reader.Counts("input_lens", &r.input_lens);
  reader.Counts("output_lens", &r.output_lens);
  reader.Reals("ttfts", &r.ttfts);
  reader.Reals("latencies", &r.latencies);
  reader.Reals("start_times", &r.start_times);
  reader.Each("errors", [&](const Json& item) {
    if (!item.is_string() && !item.is_null()) return reader.Fail("errors", "a list of strings");
    r.errors += item.is_string() && !item.get_ref<const std::string&>().empty() ? 1 : 0;
  });
  if (!reader.status().ok()) return reader.status().Annotate("bench result");
  if (r.duration_s <= 0) return InvalidArgument("bench result: `duration` is not above 0");
  return r;
}

Result<CacheCounters> ParseCacheCounters(std::string_view metrics) {
  CacheCounters counters;
  std::set<std::string_view> seen;
  bool have_queries = false, have_hits = false;
  size_t line_number = 0;
  while (!metrics.empty()) {
    ++line_number;
    const size_t end = metrics.find('\n');
    std::string_view line = metrics.substr(0, end);
    metrics.remove_prefix(end == std::string_view::npos ? metrics.size() : end + 1);
    const std::string_view name = line.substr(0, line.find_first_of("{ "));
    const bool queries = name == "vllm:prefix_cache_queries_total";
    if (!queries && name != "vllm:prefix_cache_hits_total") continue;
    const size_t space = line.rfind(' ');
    if (space == std::string_view::npos) {
      return InvalidArgument("metrics line {}: no value after the name", line_number);
    }
    if (!seen.insert(line.substr(0, space)).second) {
      return InvalidArgument("metrics line {}: the same series twice; save one answer of /metrics",
                             line_number);
    }
    const std::string_view text = line.substr(space + 1);
    double value = -1;
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || stop != text.data() + text.size() || !(value >= 0) ||
        value > static_cast<double>(kMaxTokens) || value != std::floor(value)) {
      return InvalidArgument("metrics line {}: `{}` is not a whole number of tokens", line_number,
                             Printable(text));
    }
    (queries ? have_queries : have_hits) = true;
    (queries ? counters.queries : counters.hits) += static_cast<int64_t>(value);
  }
  if (!have_queries || !have_hits) {
    return InvalidArgument("metrics: no vllm:prefix_cache_{}_total",
                           have_queries ? "hits" : "queries");
  }
  return counters;
}

BenchVerdict JudgeBench(std::span<const BenchResult> results,
                        const std::optional<CacheCounters>& before,
                        const std::optional<CacheCounters>& after,
                        const BenchRequirement& requirement) {
  TARE_CHECK(!results.empty());
  BenchVerdict out;
  for (const BenchResult& r : results) CheckOne(r, requirement, &out);
  for (size_t i = 0; i < results.size(); ++i) {
    for (size_t j = i + 1; j < results.size(); ++j) {
      if (!SameRun(results[i], results[j])) continue;
      Add(&out, reason::kDuplicateName,
          fmt::format("{} and {} are one measurement given twice", results[i].name,
                      results[j].name));
    }
  }
  for (int64_t c : requirement.concurrencies) {
    const bool there = std::any_of(results.begin(), results.end(),
                                   [&](const BenchResult& r) { return r.max_concurrency == c; });
    if (!there) Add(&out, reason::kPointMissing, fmt::format("no result at concurrency {}", c));
  }
  CheckCache(results, before, after, requirement, &out);
  return out;
}

Result<ArmRecord> ParseArmRecord(std::string_view json) {
  TARE_ASSIGN_OR_RETURN(Json root, ParseJson(json));
  ArmRecord arm;
  Reader reader(root);
  std::string schema;
  reader.String("schema", &schema);
  reader.String("label", &arm.label);
  reader.String("switch", &arm.switch_name);
  reader.String("value", &arm.switch_value);
  reader.String("image", &arm.image);
  reader.String("workload", &arm.workload);
  std::set<std::string> kernels;
  reader.Each("kernels", [&](const Json& item) {
    if (!item.is_string() || item.get_ref<const std::string&>().empty()) {
      return reader.Fail("kernels", "a list of names");
    }
    kernels.insert(item.get<std::string>());
  });
  arm.kernels.assign(kernels.begin(), kernels.end());
  if (const Json* commits = reader.Get("commits", true)) {
    if (!commits->is_object() || commits->empty()) reader.Fail("commits", "repository: commit");
    for (const auto& [repository, commit] : commits->items()) {
      if (!commit.is_string() || commit.get_ref<const std::string&>().empty()) {
        reader.Fail("commits", "repository: commit");
        break;
      }
      arm.commits[repository] = commit.get<std::string>();
    }
  }
  if (!reader.status().ok()) return reader.status().Annotate("arm");
  if (schema != "tare.arm/1") return InvalidArgument("arm: schema is not tare.arm/1");
  if (arm.kernels.empty()) return InvalidArgument("arm: `kernels` lists none that ran");
  static const std::set<std::string> known = {"schema", "label",    "switch",  "value",
                                              "image",  "workload", "kernels", "commits"};
  for (const auto& [key, value] : root.items()) {
    if (!known.contains(key)) return InvalidArgument("arm: unknown key `{}`", Printable(key));
  }
  return arm;
}

BenchVerdict JudgePair(const ArmRecord& arm_a, const BenchResult& a, const ArmRecord& arm_b,
                       const BenchResult& b) {
  BenchVerdict out;
  const auto invalid = [&](std::string what) { Add(&out, reason::kPairInvalid, std::move(what)); };
  if (arm_a.switch_name != arm_b.switch_name) {
    invalid(
        fmt::format("the arms name two switches, {} and {}", arm_a.switch_name, arm_b.switch_name));
  } else if (arm_a.switch_value == arm_b.switch_value) {
    invalid(fmt::format("{} resolved to `{}` in both arms, whatever their labels say ({}, {})",
                        arm_a.switch_name, arm_a.switch_value, arm_a.label, arm_b.label));
  }
  if (arm_a.kernels == arm_b.kernels) {
    invalid(fmt::format("both arms executed the same {} kernels", arm_a.kernels.size()));
  }
  if (arm_a.image != arm_b.image) invalid("the arms ran in different images");
  if (arm_a.commits != arm_b.commits) invalid("the arms ran different commits");
  if (arm_a.workload != arm_b.workload) invalid("the arms had different prompts");
  if (a.backend != b.backend || a.model_id != b.model_id ||
      a.max_concurrency != b.max_concurrency || a.num_prompts != b.num_prompts ||
      a.input_lens != b.input_lens || a.output_lens != b.output_lens) {
    invalid("the results differ in backend, model, concurrency, request count or lengths");
  }
  if (SameRun(a, b)) invalid("both results are one measurement");
  CheckOne(a, {}, &out);
  CheckOne(b, {}, &out);
  if (out.verdict == Verdict::kPass && a.output_throughput > 0) {
    out.ratio = b.output_throughput / a.output_throughput;
    out.notes.emplace_back("one pair: no statement about a margin; that takes at least six");
  }
  return out;
}

Json BenchVerdict::ToJson() const {
  Json json = {{"schema", "tare.bench_verdict/1"}, {"verdict", VerdictName(verdict)}};
  if (!reason.empty()) json["reason"] = reason;
  json["findings"] = Json::array();
  for (const BenchFinding& f : findings) {
    json["findings"].push_back(
        {{"verdict", VerdictName(f.verdict)}, {"reason", f.reason}, {"detail", f.detail}});
  }
  json["notes"] = notes;
  if (ratio) json["ratio"] = *ratio;
  return json;
}

}  // namespace tare::workflow
