// Float64 oracles of the row operators for the generic suite (generic_suite.h).

#include <algorithm>
#include <cmath>

#include "ops/generic_suite.h"

namespace tare::ops {

std::map<std::string, Oracle>& Oracles() {
  static auto* oracles = new std::map<std::string, Oracle>();
  return *oracles;
}

namespace {

const OracleRegistration rmsnorm("rmsnorm", [](const OpKey& key, int64_t rows, const Values& in,
                                               Values& out) {
  const bool add = key.variant.rfind("residual", 0) == 0;
  const bool offset = key.variant.find("unit-offset") != std::string::npos;
  const size_t width = static_cast<size_t>(key.dim("hidden"));
  const std::vector<double>& w = in.back();
  for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
    double squares = 0;
    std::vector<double> h(width);
    for (size_t i = 0; i < width; ++i) {
      h[i] = in[0][t * width + i] + (add ? in[1][t * width + i] : 0.0);
      squares += h[i] * h[i];
      if (add) out[1][t * width + i] = h[i];
    }
    const double scale =
        std::sqrt(squares / static_cast<double>(width) + static_cast<double>(1e-5f));
    for (size_t i = 0; i < width; ++i)
      out[0][t * width + i] = h[i] / scale * (offset ? 1 + w[i] : w[i]);
  }
});

const OracleRegistration embedding("embedding", [](const OpKey& key, int64_t rows, const Values& in,
                                                   Values& out) {
  const size_t width = static_cast<size_t>(key.dim("hidden"));
  for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
    for (size_t i = 0; i < width; ++i) {
      out[0][t * width + i] =
          in[1][static_cast<size_t>(in[0][t]) * width + i] * (key.variant == "scaled" ? 8.0 : 1.0);
    }
  }
});

const OracleRegistration headnorm("headnorm", [](const OpKey& key, int64_t rows, const Values& in,
                                                 Values& out) {
  const size_t width = static_cast<size_t>(key.dim("head_dim"));
  const double offset = key.variant == "unit-offset" ? 1.0 : 0.0;
  for (size_t r = 0; r < static_cast<size_t>(rows * key.dim("heads")); ++r) {
    double mean = 0;
    for (size_t i = 0; i < width; ++i)
      mean += in[0][r * width + i] * in[0][r * width + i] / static_cast<double>(width);
    for (size_t i = 0; i < width; ++i) {
      out[0][r * width + i] =
          in[0][r * width + i] / std::sqrt(mean + static_cast<double>(1e-6f)) * (in[1][i] + offset);
    }
  }
});

// The frequencies as the papers give them, in terms of the wavelength.
double RopeFrequency(const OpKey& key, int64_t pair, int64_t rotary) {
  const bool llama3 = key.variant.ends_with("llama3");
  const double f = std::exp(-std::log(llama3 ? 500000.0 : 10000.0) * 2.0 *
                            static_cast<double>(pair) / static_cast<double>(rotary));
  if (key.variant.ends_with("linear")) return f / 2.0;
  const double turns = [&](double length) {
    return length * f / (2 * M_PI);
  }(llama3 ? 8192.0 : 64.0);
  if (llama3) {
    // turns of the pair over the original context: below 1 interpolate, above 4 keep, linear
    // between.
    if (turns < 1.0) return f / 8.0;
    if (turns > 4.0) return f;
    const double keep = (turns - 1.0) / 3.0;
    return keep * f + (1.0 - keep) * f / 8.0;
  }
  if (key.variant.ends_with("yarn")) {
    const auto pair_of_turns = [&](double n) {
      return static_cast<double>(rotary) * std::log(64.0 / (n * 2 * M_PI)) /
             (2 * std::log(10000.0));
    };
    const double low = std::max(std::floor(pair_of_turns(32.0)), 0.0);
    double high = std::min(std::ceil(pair_of_turns(1.0)), static_cast<double>(rotary) - 1.0);
    if (low == high) high += 0.001;
    const double ramp =
        std::min(1.0, std::max(0.0, (static_cast<double>(pair) - low) / (high - low)));
    return f / 4.0 * ramp + f * (1.0 - ramp);
  }
  return f;
}

// One causal sequence, from the definition: no tiles, no splits.
const OracleRegistration attention("attention", [](const OpKey& key, int64_t rows, const Values& in,
                                                   Values& out) {
  const int64_t heads = key.dim("q_heads"), kv_heads = key.dim("kv_heads"), d = key.dim("head_dim");
  const bool cap = key.variant.find("softcap") != std::string::npos;
  const bool sink = key.variant.find("sink") != std::string::npos;
  const int64_t window = key.variant.find("window") != std::string::npos ? 5 : rows;
  const auto at = [](const std::vector<double>& v, int64_t i) { return v[static_cast<size_t>(i)]; };
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t kv = h * kv_heads / heads;
      double mass = sink ? std::exp(at(in[3], h)) : 0.0;
      std::vector<double> y(static_cast<size_t>(d), 0.0);
      for (int64_t j = std::max<int64_t>(0, i - window + 1); j <= i; ++j) {
        double z = 0;
        for (int64_t x = 0; x < d; ++x)
          z += at(in[0], (i * heads + h) * d + x) * at(in[1], (j * kv_heads + kv) * d + x);
        z /= 4.0;  // sqrt(16)
        if (cap) z = 4.0 * std::tanh(z / 4.0);
        mass += std::exp(z);
        for (int64_t x = 0; x < d; ++x) {
          y[static_cast<size_t>(x)] += std::exp(z) * at(in[2], (j * kv_heads + kv) * d + x);
        }
      }
      for (int64_t x = 0; x < d; ++x)
        out[0][static_cast<size_t>((i * heads + h) * d + x)] = y[static_cast<size_t>(x)] / mass;
    }
  }
});

const OracleRegistration grouped("grouped_linear", [](const OpKey& key, int64_t rows,
                                                      const Values& in, Values& out) {
  const size_t n = static_cast<size_t>(key.dim("n")), k = static_cast<size_t>(key.dim("k"));
  for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
    const double* w = &in[2][static_cast<size_t>(in[1][t]) * n * k];
    for (size_t j = 0; j < n; ++j) {
      double sum = 0;
      for (size_t i = 0; i < k; ++i) sum += in[0][t * k + i] * w[j * k + i];
      out[0][t * n + j] = sum;
    }
  }
});

const OracleRegistration linear("linear", [](const OpKey& key, int64_t rows, const Values& in,
                                             Values& out) {
  const size_t n = static_cast<size_t>(key.dim("n")), k = static_cast<size_t>(key.dim("k"));
  for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
    for (size_t j = 0; j < n; ++j) {
      double sum = in.size() > 2 ? in[2][j] : 0.0;
      for (size_t i = 0; i < k; ++i) sum += in[0][t * k + i] * in[1][j * k + i];
      out[0][t * n + j] = sum;
    }
  }
});

const OracleRegistration fp8("fp8_linear",
                             [](const OpKey& key, int64_t rows, const Values& in, Values& out) {
                               const size_t n = static_cast<size_t>(key.dim("n"));
                               const size_t k = in[2].size() / n, blocks = (k + 127) / 128;
                               for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
                                 for (size_t j = 0; j < n; ++j) {
                                   double sum = in.size() > 4 ? in[4][j] : 0.0;
                                   for (size_t i = 0; i < k; ++i) {
                                     sum += in[0][t * k + i] * in[1][t * blocks + i / 128] *
                                            in[2][j * k + i] * in[3][j / 128 * blocks + i / 128];
                                   }
                                   out[0][t * n + j] = sum;
                                 }
                               }
                             });

const OracleRegistration kv_cache("kv_cache", [](const OpKey&, int64_t, const Values& in,
                                                 Values& out) { out = in; });

const OracleRegistration rope("rope", [](const OpKey& key, int64_t rows, const Values& in,
                                         Values& out) {
  const int64_t width = key.dim("head_dim");
  const int64_t rotary = key.variant.ends_with("partial") ? width / 2 : width;
  const double attention = key.variant.ends_with("yarn") ? 0.1 * std::log(4.0) + 1.0 : 1.0;
  for (int64_t r = 0; r < rows * 2; ++r) {
    for (int64_t i = 0; i < width; ++i)
      out[0][static_cast<size_t>(r * width + i)] = in[1][static_cast<size_t>(r * width + i)];
    for (int64_t pair = 0; pair < rotary / 2; ++pair) {
      const bool interleaved = key.variant.starts_with("interleaved");
      const size_t a = static_cast<size_t>(r * width + (interleaved ? 2 * pair : pair));
      const size_t b =
          static_cast<size_t>(r * width + (interleaved ? 2 * pair + 1 : pair + rotary / 2));
      const double angle = in[0][static_cast<size_t>(r / 2)] * RopeFrequency(key, pair, rotary);
      out[0][a] = attention * (in[1][a] * std::cos(angle) - in[1][b] * std::sin(angle));
      out[0][b] = attention * (in[1][b] * std::cos(angle) + in[1][a] * std::sin(angle));
    }
  }
});

const OracleRegistration dispatch("dispatch", [](const OpKey& key, int64_t rows, const Values& in,
                                                 Values& out) {
  const size_t width = static_cast<size_t>(key.dim("hidden"));
  const size_t k = static_cast<size_t>(key.dim("top_k"));
  for (size_t i = 0; i < static_cast<size_t>(rows) * k * width; ++i)
    out[0][i] = in[0][i / (k * width) * width + i % width];
});

const OracleRegistration combine("combine", [](const OpKey& key, int64_t rows, const Values& in,
                                               Values& out) {
  const size_t width = static_cast<size_t>(key.dim("hidden"));
  const size_t k = static_cast<size_t>(key.dim("top_k"));
  for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
    for (size_t i = 0; i < width; ++i) {
      for (size_t s = 0; s < k; ++s) {
        const size_t row = t * k + (key.variant == "turned" ? k - 1 - s : s);
        out[0][t * width + i] += in[1][t * k + s] * in[0][row * width + i];
      }
    }
  }
});

const OracleRegistration cast("cast", [](const OpKey&, int64_t, const Values& in, Values& out) {
  out[0] = in[0];
});

const OracleRegistration gate("gate", [](const OpKey& key, int64_t, const Values& in, Values& out) {
  for (size_t i = 0; i < in[0].size(); ++i) {
    const double g = in[0][i];
    double act = g / (1 + std::exp(-g));
    if (key.variant == "gelu-tanh")
      act = 0.5 * g * (1 + std::tanh(std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g)));
    if (key.variant == "gelu-erf") act = 0.5 * g * std::erfc(-g / std::sqrt(2.0));
    out[0][i] = act * in[1][i];
  }
});

const OracleRegistration logprob("logprob", [](const OpKey& key, int64_t rows, const Values& in,
                                               Values& out) {
  const size_t vocab = static_cast<size_t>(key.dim("vocab"));
  for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
    const double* x = in[0].data() + t * vocab;
    const double temperature = in[2][t];
    double top = x[0];
    for (size_t i = 0; i < vocab; ++i) top = std::max(top, x[i]);
    double sum = 0;
    for (size_t i = 0; i < vocab; ++i) sum += std::exp((x[i] - top) / temperature);
    const double lse = top / temperature + std::log(sum);
    out[0][t] = x[static_cast<size_t>(in[1][t])] / temperature - lse;
    for (size_t i = 0; i < vocab; ++i) {
      const double q = x[i] / temperature - lse;
      out[1][t] -= std::exp(q) * q;
    }
  }
});

const OracleRegistration router("router", [](const OpKey& key, int64_t rows, const Values& in,
                                             Values& out) {
  const size_t experts = static_cast<size_t>(key.dim("experts"));
  const size_t k = std::min(static_cast<size_t>(key.dim("top_k")), experts);
  const bool raw = key.variant.find("raw") != std::string::npos;
  const double scale = key.variant.find("scaled") != std::string::npos ? 2.5 : 1.0;
  for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
    std::vector<size_t> order(experts);
    for (size_t i = 0; i < experts; ++i) order[i] = i;
    const double* x = in[0].data() + t * experts;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] > x[b]; });
    double all = 0, chosen = 0;
    for (size_t i = 0; i < experts; ++i) all += std::exp(x[i]);
    for (size_t s = 0; s < k; ++s) chosen += std::exp(x[order[s]]);
    for (size_t s = 0; s < k; ++s) {
      out[0][t * k + s] = static_cast<double>(order[s]);
      out[1][t * k + s] = std::exp(x[order[s]]) / (raw ? all : chosen) * scale;
    }
  }
});

const OracleRegistration policy_loss("policy_loss", [](const OpKey& key, int64_t rows,
                                                       const Values& in, Values& out) {
  const double low = 1 - static_cast<double>(0.2f), high = 1 + static_cast<double>(0.28f);
  for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
    if (in[5][t] == 0) continue;
    const double ratio = std::exp(in[0][t] - in[1][t]);
    const double a = in[4][t];
    double loss = -std::min(ratio * a, std::min(std::max(ratio, low), high) * a);
    if (key.variant.ends_with("dual") && a < 0) loss = std::min(loss, -1.5 * a);
    const double d = in[0][t] - in[2][t];
    double kl = std::exp(-d) - 1 + d;
    if (key.variant.starts_with("k1")) kl = d;
    if (key.variant.starts_with("k2")) kl = d * d / 2;
    loss += static_cast<double>(0.05f) * kl - static_cast<double>(0.01f) * in[3][t];
    double divisor = 100;
    if (key.variant.ends_with("sequence")) divisor = 100 * (in[6][t] + 1);
    if (key.variant.ends_with("constant")) divisor = 64;
    out[0][t] = loss / divisor;
    out[1][0] += loss / divisor;
  }
});

const OracleRegistration cross_entropy("cross_entropy", [](const OpKey&, int64_t rows,
                                                           const Values& in, Values& out) {
  for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
    if (in[2][t] == 0) continue;
    out[0][t] = -in[0][t] * in[1][t] / 100;
    out[1][0] += out[0][t];
  }
});

const OracleRegistration quantize("quantize", [](const OpKey& key, int64_t rows, const Values& in,
                                                 Values& out) {
  const size_t width = static_cast<size_t>(key.dim("width"));
  const size_t blocks = (width + 127) / 128;
  for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
    for (size_t i = 0; i < width; ++i) {
      double& scale = out[1][t * blocks + i / 128];
      scale = std::max(scale, std::abs(in[0][t * width + i]) / 448.0);
    }
  }
  for (double& scale : out[1]) {
    if (scale < 0x1p-150) scale = 1.0;
  }
});

const OracleRegistration head_logprob("head_logprob", [](const OpKey& key, int64_t rows,
                                                         const Values& in, Values& out) {
  const size_t vocab = static_cast<size_t>(key.dim("vocab")),
               hidden = static_cast<size_t>(key.dim("hidden"));
  for (size_t t = 0; t < static_cast<size_t>(rows); ++t) {
    std::vector<double> z(vocab, 0.0);
    double sum = 0;
    for (size_t v = 0; v < vocab; ++v) {
      for (size_t i = 0; i < hidden; ++i) z[v] += in[0][t * hidden + i] * in[1][v * hidden + i];
      z[v] /= in[3][t];
      sum += std::exp(z[v]);
    }
    out[0][t] = z[static_cast<size_t>(in[2][t])] - std::log(sum);
    for (size_t v = 0; v < vocab; ++v) out[1][t] -= std::exp(z[v]) / sum * (z[v] - std::log(sum));
  }
});

const OracleRegistration grad_norm("grad_norm",
                                   [](const OpKey&, int64_t, const Values& in, Values& out) {
                                     double sum = 0;
                                     for (double g : in[0]) sum += g * g;
                                     out[0][0] = std::sqrt(sum);
                                     out[1][0] = std::min(1.0, 1.0 / (std::sqrt(sum) + 1e-6));
                                   });

const OracleRegistration adamw("adamw", [](const OpKey& key, int64_t rows, const Values& in,
                                           Values& out) {
  const double beta1 = static_cast<double>(0.9f), beta2 = static_cast<double>(0.999f);
  const bool corrected = key.variant.empty();
  for (size_t i = 0; i < static_cast<size_t>(rows); ++i) {
    const double g = in[3][i] * 0.5;
    out[1][i] = beta1 * in[1][i] + (1 - beta1) * g;
    out[2][i] = beta2 * in[2][i] + (1 - beta2) * g * g;
    const double m = corrected ? out[1][i] / (1 - std::pow(beta1, 3)) : out[1][i];
    const double v = corrected ? out[2][i] / (1 - std::pow(beta2, 3)) : out[2][i];
    const double lr = static_cast<double>(0.01f);
    out[0][i] = in[0][i] * (1 - lr * static_cast<double>(0.1f)) -
                lr * m / (std::sqrt(v) + static_cast<double>(1e-8f));
    out[3][i] = out[0][i];
  }
});

}  // namespace
}  // namespace tare::ops
