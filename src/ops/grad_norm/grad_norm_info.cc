// The registry entry of grad_norm. Rows are summed into one norm, so the suite's row cuts do not
// apply; grad_norm_test.cc shows that shards and threads move no bit.

#include "ops/cast/cast.h"
#include "ops/grad_norm/grad_norm.h"
#include "ops/info.h"

namespace tare::ops::grad_norm {

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("grad_norm"));
    op->dtypes = {DType::kF32};
    op->keys = {{.dtype = DType::kF32, .out_dtype = DType::kF32, .dims = {{"cols", 1500}}}};
    op->select = [](const OpKey&) { return ContractOf(); };
    op->signature = [](const OpKey& key, int64_t rows) {
      Signature s;
      s.inputs = {RowOperand("grad", DType::kF32, {rows, key.dim("cols")})};
      s.outputs = {SharedOperand("norm", DType::kF32, {1}),
                   SharedOperand("factor", DType::kF32, {1})};
      return s;
    };
    op->forward = [](const Ctx& ctx, const OpKey& key, const ForwardCall& call) -> Status {
      const Entry entry = {"grad", In<float>(call.in[0]), call.rows, key.dim("cols")};
      TARE_ASSIGN_OR_RETURN(const Norm norm, Compute(ctx, {&entry, 1}, 1.0f));
      TARE_ASSIGN_OR_RETURN(const float* const values, OnDevice(ctx, &norm.norm, 1));
      TARE_ASSIGN_OR_RETURN(const float* const factors, OnDevice(ctx, &norm.factor, 1));
      TARE_RETURN_IF_ERROR(
          cast::Forward(ctx, {DType::kF32, DType::kF32}, {1, values, call.out[0].mutable_data()}));
      return cast::Forward(ctx, {DType::kF32, DType::kF32},
                           {1, factors, call.out[1].mutable_data()});
    };
    op->rows_independent = false;
    op->propagates_non_finite = false;
    op->width_dim = "cols";
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::grad_norm
