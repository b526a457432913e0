// The contract record of attention.

#include "ops/attention/attention.h"
#include "ops/attention/attention_plain.h"

namespace tare::ops::attention {
namespace {

// What dS may keep where it should be zero, as a power of two. In a row of one key dP equals delta,
// and both are f32 sums of head_dim products: head_dim roundings in the chain, six in lanes(32),
// each at most 2^-22 while a partial sum lies below 8. The factors scale and k, which follow, take
// what is left below one.
int ResidueLog2(const Params& p) {
  int log2 = -22;
  for (int64_t roundings = p.head_dim + 6; roundings > 1; roundings = (roundings + 1) / 2) ++log2;
  return log2;
}

}  // namespace

Contract ContractOf(const Params& p, Profile profile) {
  Contract c;
  const bool sm90 = profile == Profile::kSm90Mma && p.dtype != DType::kF32;
  const std::string_view t = DTypeName(p.dtype);
  const std::string step = sm90 ? fmt::format("sm90({})", t) : "fma";
  c.op = "attention";
  c.version = 2;  // docs/decisions/0002-attention-reference.md
  c.profile = ProfileName(profile);
  c.variant = fmt::format("{}{}{}", p.window != 0 ? "window" : "causal", p.sink ? "-sink" : "",
                          p.softcap != 0.0f ? "-softcap" : "");
  constexpr const char* kReference =
      "  mc = max(s of the tile) * c; r' = mc <= r + 14 ? r : ceil(mc), NaN where infinite; alpha "
      "= exp2(r - r'), 1 in the first visible tile";
  // NOLINTBEGIN(bugprone-suspicious-missing-comma): long lines are cut.
  c.formula = {
      fmt::format("s[j] = chain(d ascending) of {}(q[d], k[j, d], .)", step),
      p.softcap != 0.0f ? "s[j] = tanh(s[j] * (scale / cap)) * cap; c = log2e"
                        : "c = scale * log2e",
      p.window != 0 ? "key j is visible when i - window < j <= i" : "key j is visible when j <= i",
      "per split of kv_split positions: r = -inf, l[0..3] = O = +0; its tiles of kv_tile positions "
      "ascending, those without a visible key skipped",
      kReference,
      fmt::format("  p[j] = {}(exp2_p(128 * y - 100)), y = fma(s[j], c / 128, (100 - r') / 128) "
                  "clamped to [0, 1], NaN +0; masked +0",
                  t),
      "  l[q] = l[q] * alpha, then + p of columns 8b+2q and 8b+2q+1, b ascending",
      fmt::format("  O = O * alpha, then chain(j ascending) of {}(p[j], v[j, d], .)", step),
      "  l = (l0 + l1) + (l2 + l3)",
      "splits ascending from the first visible one: r' = max(r, rs); a = exp2(r - r'); b = "
      "exp2(rs - r'); l = fma(ls, b, l * a); O = fma(Os, b, O * a)",
      p.sink ? "t2 = sink * log2e; M = max(r, t2); f = exp2(r - M); l = fma(l, f, exp2(t2 - M)); "
               "O = O * f; lse2 = M + log2(l)"
             : "lse2 = r + log2(l)",
      fmt::format("out = {}(O * (1 / l + (r - r)) + 0.0)", t)};
  c.backward = {
      "p = exp2_p(max(fma(s, c, -lse2), -125)); delta = lanes(32) of fma(dout, out, .)",
      fmt::format("dP[j] = chain(d ascending) of {}(dout[d], v[j, d], .)", step),
      p.softcap != 0.0f
          ? fmt::format("dS = {}((p * (dP - delta)) * fma(-u, u, 1)), u = tanh(s * (scale / cap))",
                        t)
          : fmt::format("dS = {}(p * (dP - delta))", t),
      fmt::format("dq = {}(scale * chain(j ascending) of {}(dS[j], k[j, d], .) + 0.0)", t, step),
      fmt::format("dk = {}(scale * sum + 0.0), dv = {}(sum + 0.0): per query head chains over rows "
                  "ascending of "
                  "{}(dS or {}(p), q or dout, .), cut every unit_rows rows; cuts, then heads of "
                  "the group, added ascending",
                  t, t, step, t)};
  // NOLINTEND(bugprone-suspicious-missing-comma)
  if (p.sink)
    c.backward.push_back(
        "dsink += per unit: lanes(32) over its rows of -(exp2(t2 - lse2) * delta)");
  c.lanes = 32;
  if (p.sink) c.token_lanes = 32;
  c.unit_rows = p.unit_rows;
  c.kv_tile = p.kv_tile;
  c.kv_split = p.kv_split;
  c.constants = {{"q_heads", std::to_string(p.q_heads)},
                 {"kv_heads", std::to_string(p.kv_heads)},
                 {"head_dim", std::to_string(p.head_dim)},
                 {"window", std::to_string(p.window)},
                 {"scale", HexWord(p.scale)},
                 {"c", HexWord(ScoreScale(p))},
                 {"log2e", HexWord(kLog2e)},
                 {"softcap", HexWord(p.softcap)}};
  c.inputs = {{"q", std::string(t), "[T, q_heads, head_dim]"},
              {"k", std::string(t), "[keys, kv_heads, head_dim], packed or in pages"},
              {"v", std::string(t), "[keys, kv_heads, head_dim], packed or in pages"}};
  if (p.sink) c.inputs.push_back({"sink", "f32", "[q_heads]"});
  c.outputs = {{"out", std::string(t), "[T, q_heads, head_dim]"}, {"lse2", "f32", "[T, q_heads]"}};
  c.rounding_points = {fmt::format("p: f32 to {} before it meets V and the row sum", t),
                       fmt::format("out: f32 to {}, once", t),
                       fmt::format("dS: f32 to {} before it meets K and Q", t),
                       fmt::format("dq, dk, dv: f32 to {}, once, after the scale", t)};
  c.saved_for_backward = {"q", "k", "v", "out", "lse2"};
  c.errors = {
      "a block table entry outside the pages, a run outside its buffers, rows shared by two runs: "
      "by name",
      "a NaN result is written as the canonical one"};
  c.invariant_over = {
      "batch", "position in the batch", "chunk", "cache", "pages", "threads", "simd", "device"};
  if (p.dtype == DType::kF32) {
    c.forward_tolerance = {
        -12, -30, "f32: exp2_p has a relative error of 2^-13 that mostly cancels in the ratio"};
    c.gradient_tolerance = {-11, ResidueLog2(p),
                            "f32: lse2 carries exp2_p's error of 2^-13 in the row sum; dS cancels "
                            "dP against delta, two "
                            "sums of head_dim products"};
  } else {
    const int bits = p.dtype == DType::kBF16 ? 0 : 3;
    c.forward_tolerance = {-6 - bits, -20, "P is rounded once, the output once"};
    c.gradient_tolerance = {
        -4 - bits, ResidueLog2(p),
        "P, dS, the saved output in delta and the result are rounded; dS cancels dP against delta, "
        "two sums of head_dim products"};
  }
  return c;
}

}  // namespace tare::ops::attention
