// The contract and the registry entry of rope.

#include "ops/info.h"
#include "ops/rope/rope.h"

namespace tare::ops::rope {
namespace {

constexpr int64_t kPositions = 320;  // some above 256, which bf16 cannot tell apart
constexpr int64_t kHeads = 2;

Params ParamsOf(const OpKey& key) {
  Params p;
  p.head_dim = key.dim("head_dim");
  p.rotary_dim = key.variant.ends_with("partial") ? p.head_dim / 2 : p.head_dim;
  p.layout = key.variant.starts_with("interleaved") ? Layout::kInterleaved : Layout::kHalfSplit;
  p.dtype = key.dtype;
  if (key.variant.ends_with("llama3")) {
    p.scaling = Scaling::kLlama3;
    p.theta = 500000.0;
    p.factor = 8.0;
    p.original_max_position = 8192;
  } else if (key.variant.ends_with("yarn")) {
    p.scaling = Scaling::kYarn;
    p.factor = 4.0;
    p.original_max_position = 64;
  } else if (key.variant.ends_with("linear")) {
    p.scaling = Scaling::kLinear;
    p.factor = 2.0;
  }
  return p;
}

// The table of a key, as operands that all rows share.
Result<Args> ArgsOf(const Ctx& ctx, const OpKey& key, int64_t rows, const Tensor& positions,
                    const Tensor& x, Tensor& y, Table& table) {
  const Params p = ParamsOf(key);
  TARE_ASSIGN_OR_RETURN(table, BuildTable(p, kPositions, ctx.side));
  Args a;
  a.rows = rows;
  a.heads = kHeads;
  a.positions = In<int32_t>(positions);
  const auto size = static_cast<int64_t>(table.cos.size());
  TARE_ASSIGN_OR_RETURN(a.cos, OnDevice(ctx, table.cos.data(), size));
  TARE_ASSIGN_OR_RETURN(a.sin, OnDevice(ctx, table.sin.data(), size));
  a.table_positions = kPositions;
  a.x = x.data();
  a.y = y.mutable_data();
  return a;
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "rope";
  c.variant = fmt::format("{}-{}{}", p.layout == Layout::kHalfSplit ? "half-split" : "interleaved",
                          ScalingName(p.scaling), p.rotary_dim < p.head_dim ? "-partial" : "");
  // NOLINTBEGIN(bugprone-suspicious-missing-comma): long lines are cut.
  c.formula = {
      "frequency(i) in f64: theta^(-2i/R), scaled as the variant says (linear: f / factor; llama3 "
      "and yarn: the "
      "published ramps)",
      p.scaling == Scaling::kYarn
          ? "c = f32(cos(position * frequency) * attention_factor), s alike: f64, rounded once"
          : "c = f32(cos(position * frequency)), s alike: f64, rounded once",
      fmt::format("y1 = {0}(fma(x1, c, -(x2 * s))); y2 = {0}(fma(x2, c, x1 * s))",
                  DTypeName(p.dtype)),
      p.layout == Layout::kHalfSplit ? "pairs (i, i + R/2)" : "pairs (2i, 2i + 1)",
      "elements from R on are copied"};
  // NOLINTEND(bugprone-suspicious-missing-comma)
  c.backward = {fmt::format("dx1 = {0}(fma(dy1, c, dy2 * s)); dx2 = {0}(fma(dy2, c, -(dy1 * s)))",
                            DTypeName(p.dtype))};
  c.constants = {{"head_dim", std::to_string(p.head_dim)},
                 {"rotary_dim", std::to_string(p.rotary_dim)},
                 {"theta", HexWord(p.theta)}};
  if (p.scaling != Scaling::kNone) c.constants.emplace_back("factor", HexWord(p.factor));
  if (p.scaling == Scaling::kLlama3 || p.scaling == Scaling::kYarn) {
    c.constants.emplace_back("original_max_position", std::to_string(p.original_max_position));
  }
  if (p.scaling == Scaling::kLlama3) {
    c.constants.emplace_back("low_freq_factor", HexWord(p.low_freq_factor));
    c.constants.emplace_back("high_freq_factor", HexWord(p.high_freq_factor));
  }
  if (p.scaling == Scaling::kYarn) {
    c.constants.emplace_back("beta_fast", HexWord(p.beta_fast));
    c.constants.emplace_back("beta_slow", HexWord(p.beta_slow));
    c.constants.emplace_back("attention_factor", HexWord(p.attention_factor));
  }
  c.inputs = {{"positions", "i32", "[T]"},
              {"x", Name(p.dtype), "[T, N, D], rows strided"},
              {"cos", "f32", "[P, R/2]"},
              {"sin", "f32", "[P, R/2]"}};
  c.outputs = {{"y", Name(p.dtype), "[T, N, D], rows strided"}};
  c.rounding_points = {"cos, sin: f64 to f32, once",
                       fmt::format("y: f32 to {}, once", DTypeName(p.dtype))};
  c.saved_for_backward = {"positions"};
  c.errors = {"a position outside the table names its row"};
  c.invariant_over = RowInvariance();
  c.forward_tolerance = ElementTolerance(p.dtype, "one multiply and one fma");
  c.gradient_tolerance = ElementTolerance(p.dtype, "one multiply and one fma");
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("rope"));
    for (DType dtype : op->dtypes) {
      for (const char* variant : {"half", "half-llama3", "half-yarn", "half-linear", "half-partial",
                                  "interleaved", "interleaved-partial"}) {
        op->keys.push_back(
            {.dtype = dtype, .out_dtype = dtype, .variant = variant, .dims = {{"head_dim", 64}}});
      }
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey& key, int64_t rows) {
      const Params p = ParamsOf(key);
      Signature s;
      s.inputs = {IndexOperand("positions", {rows}, kPositions),
                  RowOperand("x", p.dtype, {rows, kHeads, p.head_dim}, true)};
      s.outputs = {RowOperand("y", p.dtype, {rows, kHeads, p.head_dim}, true)};
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) -> Status {
      Table table;
      TARE_ASSIGN_OR_RETURN(
          const Args a, ArgsOf(ctx, key, call.rows, call.in[0], call.in[1], call.out[0], table));
      return Forward(ctx, ParamsOf(key), a);
    };
    op->backward = [](const Ctx& ctx, const OpKey& key, const BackwardCall& call) -> Status {
      Table table;
      TARE_ASSIGN_OR_RETURN(
          const Args a, ArgsOf(ctx, key, call.rows, call.in[0], call.dout[0], call.din[1], table));
      return Backward(ctx, ParamsOf(key), a);
    };
    op->width_dim = "head_dim";
    op->width_step = 4;
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::rope
