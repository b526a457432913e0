#pragma once

// The operands that logprob and head_logprob have in common, for their registry entries: targets
// and temperature go in, (logprob, entropy, max, log_sum) come out.

#include <vector>

#include "ops/info.h"

namespace tare::ops::logprob {

inline std::vector<Operand> TargetOperands(int64_t rows, int64_t vocab) {
  std::vector<Operand> in = {IndexOperand("targets", {rows}, vocab),
                             RowOperand("temperature", DType::kF32, {rows})};
  in[1].fill = Fill::kPositive;
  in[1].finite = true;
  return in;
}

inline std::vector<Operand> RowOutputs(int64_t rows) {
  return {RowOperand("logprob", DType::kF32, {rows}, true),
          RowOperand("entropy", DType::kF32, {rows}, true),
          SavedOperand("max", DType::kF32, {rows}), SavedOperand("log_sum", DType::kF32, {rows})};
}

// Fills the fields of the same name; targets is operand `at`, temperature the one after it.
template <typename Args>
void BindForward(const ForwardCall& call, size_t at, Args& a) {
  a.rows = call.rows;
  a.targets = In<int32_t>(call.in[at]);
  a.temperature = In<float>(call.in[at + 1]);
  a.logprob = Out<float>(call.out[0]);
  a.entropy = Out<float>(call.out[1]);
  a.max = Out<float>(call.out[2]);
  a.log_sum = Out<float>(call.out[3]);
}
template <typename BackwardArgs>
void BindBackward(const BackwardCall& call, size_t at, BackwardArgs& a) {
  a.rows = call.rows;
  a.targets = In<int32_t>(call.in[at]);
  a.temperature = In<float>(call.in[at + 1]);
  a.entropy = In<float>(call.out[1]);
  a.max = In<float>(call.out[2]);
  a.log_sum = In<float>(call.out[3]);
  a.dlogprob = In<float>(call.dout[0]);
  a.dentropy = In<float>(call.dout[1]);
}

}  // namespace tare::ops::logprob
