#include "workflow/gates/pairing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace tare::workflow {
namespace {

constexpr int64_t kMax = int64_t{1} << 50;

// One-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the last one,
// which is larger than the true one and so never flatters.
constexpr double kT95[] = {6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812,
                           1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725,
                           1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697};

BenchArm ReadArm(const Field& f) {
  BenchArm a;
  a.switch_value = f.At("switch_value").Str();
  a.kernels = f.At("kernels").Hash();
  a.image = f.At("image").Digest();
  a.commits = f.At("commits").Hash();
  a.workload = f.At("workload").Hash();
  a.node = f.At("node").Str();
  a.requests = f.At("requests").Int(1, 1 << 30);
  a.completed = f.At("completed").Int(0, kMax);
  a.failed = f.At("failed").Int(0, kMax);
  a.input_tokens = f.At("input_tokens").Int(0, kMax);
  a.output_tokens = f.At("output_tokens").Int(0, kMax);
  a.cache_hits = f.At("cache_hits").Int(0, kMax);
  a.served_before = f.At("served_before").Int(0, kMax);
  a.loaded_samples = f.At("loaded_samples").Int(0, kMax);
  a.duration_us = f.At("duration_us").Int(1, kMax);
  a.throughput_micro = f.At("output_throughput_micro").Int(1, kMax);
  return a;
}

double Throughput(const BenchArm& a) {
  return static_cast<double>(a.output_tokens) / static_cast<double>(a.duration_us);
}

int64_t Ppm(double ratio) { return static_cast<int64_t>(std::llround(ratio * 1e6)); }

}  // namespace

Pairing ReadPairing(const Field& field) {
  Pairing p;
  p.node = field.At("node").Str();
  for (const Field& item : field.At("points").Items()) {
    BenchPoint point;
    point.concurrency = item.At("concurrency").Int(1, 1 << 20);
    for (const Field& pair : item.At("pairs").Items()) {
      point.pairs.push_back({pair.At("order").OneOf({"off first", "on first"}),
                             ReadArm(pair.At("off")), ReadArm(pair.At("on"))});
    }
    point.median_ppm = item.At("median_slowdown_ppm").Int(0, kMax);
    point.upper_ppm = item.At("upper_slowdown_ppm").Int(0, kMax);
    p.points.push_back(std::move(point));
  }
  return p;
}

Slowdown SlowdownOf(const BenchPoint& point) {
  std::vector<double> logs;
  logs.reserve(point.pairs.size());
  for (const BenchPair& pair : point.pairs)
    logs.push_back(std::log(Throughput(pair.off) / Throughput(pair.on)));
  const double n = static_cast<double>(logs.size());
  double mean = 0, square = 0;
  for (const double x : logs) mean += x / n;
  for (const double x : logs) square += (x - mean) * (x - mean);
  const size_t freedom = std::clamp<size_t>(logs.size() - 1, 1, std::size(kT95));
  const double half = kT95[freedom - 1] * std::sqrt(square / std::max(n - 1, 1.0) / n);
  std::sort(logs.begin(), logs.end());
  const double median = logs.size() % 2 == 1
                            ? logs[logs.size() / 2]
                            : (logs[logs.size() / 2 - 1] + logs[logs.size() / 2]) / 2;
  return {std::exp(median), std::exp(mean), std::exp(mean - half), std::exp(mean + half)};
}

namespace {

class PairingJudge {
 public:
  PairingJudge(Judging* judging, const Subject& subject, const Recipe& agreement,
               const std::string& commits, const Pairing& pairing)
      : j_(*judging), subject_(subject), agreement_(agreement), commits_(commits), p_(pairing) {}

  void Run() {
    const auto agreed = [&](const char* key) { return Agreed(agreement_, key).value_or(0); };
    const int64_t input = agreed("input_tokens"), output = agreed("output_tokens"),
                  pairs = agreed("pairs"), limit = agreed("throughput_ratio_ppm");
    const std::vector<std::string> want = AgreedList(agreement_, "concurrency");
    if (!j_.Require("C1-08",
                    input > 0 && output > 0 && pairs > 0 && limit > 0 && !want.empty() &&
                        input <= (1 << 30) && output <= (1 << 30),
                    reason::kInventoryIncomplete,
                    "the agreement lacks input_tokens, output_tokens, pairs, "
                    "throughput_ratio_ppm or concurrency")) {
      return;
    }
    // A declared shorter workload is honest, and is not the point that the agreement of C10 asks.
    j_.Require("C10-10", input == 8192 && output == 1024, reason::kOutsideScope,
               fmt::format("the agreed workload is {}/{}; 8192/1024 was not run", input, output));
    j_.Require("A-17", pairs >= 6, reason::kTooFewPairs,
               fmt::format("{} pairs were agreed; at least six", pairs));
    std::vector<std::string> have;
    for (const BenchPoint& point : p_.points) {
      have.push_back(std::to_string(point.concurrency));
      Point(point, input, output, pairs, limit);
    }
    j_.Require("C10-10", have == want, reason::kTooFewPairs,
               fmt::format("concurrencies {}; agreed are {}", fmt::join(have, ", "),
                           fmt::join(want, ", ")));
  }

 private:
  void Point(const BenchPoint& point, int64_t input, int64_t output, int64_t pairs, int64_t limit) {
    const std::string at = fmt::format("concurrency {}", point.concurrency);
    j_.Require("A-17", static_cast<int64_t>(point.pairs.size()) >= pairs, reason::kTooFewPairs,
               fmt::format("{}: {} pairs, {} were fixed", at, point.pairs.size(), pairs));
    std::set<std::string> workloads;
    int64_t off_first = 0;
    bool valid = point.pairs.size() >= 2;
    for (size_t i = 0; i < point.pairs.size(); ++i) {
      const BenchPair& pair = point.pairs[i];
      off_first += pair.order == "off first";
      workloads.insert(pair.off.workload);
      const std::string where = fmt::format("{} pair {}", at, i + 1);
      valid = Arm(where + " BI=0", pair.off, "0", point.concurrency, input, output) && valid;
      valid = Arm(where + " BI=1", pair.on, "1", point.concurrency, input, output) && valid;
      // H20: other switch, other kernels; image, commits, workload and requests the same.
      j_.Require("C10-10", pair.off.kernels != pair.on.kernels, reason::kPairInvalid,
                 where + ": both arms executed the same kernels");
      j_.Require("C10-10",
                 pair.off.workload == pair.on.workload && pair.off.requests == pair.on.requests,
                 reason::kPairInvalid, where + ": the arms served different requests");
      j_.Require("C10-10",
                 pair.off.kernels == point.pairs[0].off.kernels &&
                     pair.on.kernels == point.pairs[0].on.kernels,
                 reason::kPairInvalid, where + ": other kernels than in the first pair");
    }
    j_.Require("C10-10", workloads.size() == point.pairs.size(), reason::kPairInvalid,
               fmt::format("{}: {} workloads in {} pairs; each has its own", at, workloads.size(),
                           point.pairs.size()));
    j_.Require(
        "A-17",
        point.pairs.size() % 2 == 0 && off_first * 2 == static_cast<int64_t>(point.pairs.size()),
        reason::kPairInvalid,
        fmt::format("{}: BI=0 ran first in {} of {} pairs; half of them is wanted", at, off_first,
                    point.pairs.size()));
    if (!valid) return;
    const Slowdown s = SlowdownOf(point);
    j_.Require("C10-12", Ppm(s.median) == point.median_ppm && Ppm(s.upper) == point.upper_ppm,
               reason::kReceiptContradicted,
               fmt::format("{}: median {} ppm and bound {} ppm are reported; the pairs give {} and "
                           "{}",
                           at, point.median_ppm, point.upper_ppm, Ppm(s.median), Ppm(s.upper)));
    const double most = static_cast<double>(limit) * 1e-6;
    if (s.lower > most) {
      j_.Require("TRACK-12", false, reason::kMarginExceeded,
                 fmt::format("{}: slowdown {:.4f}, agreed at most {:.4f}", at, s.mean, most));
    } else {
      j_.Require("TRACK-12", s.upper <= most, reason::kIntervalWide,
                 fmt::format("{}: slowdown {:.4f}, 95 % bound {:.4f}, agreed at most {:.4f}", at,
                             s.mean, s.upper, most));
    }
    j_.Pass("TRACK-12", fmt::format("{}: slowdown {:.4f}, bound {:.4f}", at, s.mean, s.upper));
  }

  bool Arm(const std::string& where, const BenchArm& a, const std::string& value,
           int64_t concurrency, int64_t input, int64_t output) {
    bool ok = j_.Require("H20", a.switch_value == value, reason::kPairInvalid,
                         fmt::format("{}: the switch resolved to {}", where, a.switch_value));
    ok = j_.Require("C10-10", a.completed == a.requests && a.failed == 0, reason::kRequestsFailed,
                    fmt::format("{}: {} of {} requests completed, {} failed", where, a.completed,
                                a.requests, a.failed)) &&
         ok;
    ok = j_.Require("C1-10",
                    a.input_tokens == a.requests * input && a.output_tokens == a.requests * output,
                    reason::kWrongLength,
                    fmt::format("{}: {} input and {} output tokens for {} requests of {}/{}", where,
                                a.input_tokens, a.output_tokens, a.requests, input, output)) &&
         ok;
    ok = j_.Require("C1-10", a.requests >= concurrency, reason::kPairInvalid,
                    fmt::format("{}: {} requests never reach concurrency {}", where, a.requests,
                                concurrency)) &&
         ok;
    ok = j_.Require("C10-10", a.cache_hits == 0, reason::kWarmCache,
                    fmt::format("{}: {} cached prompt tokens", where, a.cache_hits)) &&
         ok;
    ok = j_.Require(
             "C10-10", a.served_before == 0, reason::kPairInvalid,
             fmt::format("{}: the server had served {} requests before", where, a.served_before)) &&
         ok;
    ok = j_.Require("TRACK-11", a.loaded_samples == 0, reason::kNodeLoaded,
                    fmt::format("{}: foreign load in {} samples", where, a.loaded_samples)) &&
         ok;
    ok = j_.Require("C10-10",
                    a.image == subject_.image && a.commits == commits_ && a.node == p_.node,
                    reason::kPairInvalid,
                    fmt::format("{}: image {}, commits {}, node {}", where, a.image.substr(0, 19),
                                a.commits.substr(0, 12), a.node)) &&
         ok;
    const double micro = Throughput(a) * 1e12;
    ok = j_.Require("C10-12", std::fabs(micro - static_cast<double>(a.throughput_micro)) <= 0.501,
                    reason::kResultInconsistent,
                    fmt::format("{}: throughput {} is reported, tokens and time give {:.0f}", where,
                                a.throughput_micro, micro)) &&
         ok;
    return ok && a.output_tokens > 0;
  }

  Judging& j_;
  const Subject& subject_;
  const Recipe& agreement_;
  const std::string& commits_;
  const Pairing& p_;
};

}  // namespace

void CheckPairing(Judging* judging, const Subject& subject, const Recipe& agreement,
                  const std::string& commits, const Pairing& pairing) {
  PairingJudge(judging, subject, agreement, commits, pairing).Run();
}

}  // namespace tare::workflow
