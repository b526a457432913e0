// The contract and the registry entry of embedding.

#include "ops/embedding/embedding.h"
#include "ops/info.h"

namespace tare::ops::embedding {
namespace {

Params ParamsOf(const OpKey& key) {
  Params p;
  p.vocab = key.dim("vocab");
  p.hidden = key.dim("hidden");
  p.dtype = key.out_dtype;
  p.table_dtype = key.dtype;
  p.grad_dtype = key.out_dtype;
  if (key.variant == "scaled") p.scale = 8.0f;
  return p;
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "embedding";
  c.variant = p.scale == 1.0f ? "plain" : "scaled";
  c.formula = {p.scale == 1.0f ? fmt::format("out = {}(table[id])", DTypeName(p.dtype))
                               : fmt::format("out = {}(table[id] * scale)", DTypeName(p.dtype))};
  c.backward = {
      "dtable[id] += per unit: lanes(32) over the unit's tokens of fma(dout, scale, .) at its "
      "tokens of that id"};
  c.token_lanes = 32;
  c.unit_rows = kUnitRows;
  c.constants = {{"scale", HexWord(p.scale)}};
  c.inputs = {{"ids", "i32", "[T]"}, {"table", Name(p.table_dtype), "[V, H]"}};
  c.outputs = {{"out", Name(p.dtype), "[T, H]"}};
  c.rounding_points = {fmt::format("out: to {}, once", DTypeName(p.dtype))};
  c.saved_for_backward = {"ids"};
  c.errors = {"an ID outside [0, V) names its row"};
  c.invariant_over = RowInvariance();
  c.forward_tolerance = ElementTolerance(p.dtype, "one multiply");
  c.gradient_tolerance = {-20, -100, "f32 sums of at most T terms"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("embedding"));
    for (const auto& [table, out] :
         {std::pair(DType::kBF16, DType::kBF16), std::pair(DType::kBF16, DType::kF32),
          std::pair(DType::kF32, DType::kF32)}) {
      for (const char* variant : {"", "scaled"}) {
        op->keys.push_back({.dtype = table,
                            .out_dtype = out,
                            .variant = variant,
                            .dims = {{"vocab", 11}, {"hidden", 40}}});
      }
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = [](const OpKey& key, int64_t rows) {
      const Params p = ParamsOf(key);
      Signature s;
      s.inputs = {IndexOperand("ids", {rows}, p.vocab),
                  SharedOperand("table", p.table_dtype, {p.vocab, p.hidden}, true)};
      s.outputs = {RowOperand("out", p.dtype, {rows, p.hidden}, true)};
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
      Args a;
      a.rows = call.rows;
      a.ids = In<int32_t>(call.in[0]);
      a.table = call.in[1].data();
      a.out = call.out[0].mutable_data();
      return Forward(ctx, ParamsOf(key), a);
    };
    op->backward = [](const Ctx& ctx, const OpKey& key, const BackwardCall& call) {
      BackwardArgs a;
      a.rows = call.rows;
      a.ids = In<int32_t>(call.in[0]);
      a.dout = call.dout[0].data();
      a.dtable = Out<float>(call.din[1]);
      a.units = call.units;
      return Backward(ctx, ParamsOf(key), a);
    };
    op->width_dim = "hidden";
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::embedding
