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
  a.targets = call.in[at].as<int32_t>();
  a.temperature = call.in[at + 1].as<float>();
  a.logprob = call.out[0].mutable_as<float>();
  a.entropy = call.out[1].mutable_as<float>();
  a.max = call.out[2].mutable_as<float>();
  a.log_sum = call.out[3].mutable_as<float>();
}
template <typename BackwardArgs>
void BindBackward(const BackwardCall& call, size_t at, BackwardArgs& a) {
  a.rows = call.rows;
  a.targets = call.in[at].as<int32_t>();
  a.temperature = call.in[at + 1].as<float>();
  a.entropy = call.out[1].as<float>();
  a.max = call.out[2].as<float>();
  a.log_sum = call.out[3].as<float>();
  a.dlogprob = call.dout[0].as<float>();
  a.dentropy = call.dout[1].as<float>();
}

}  // namespace tare::ops::logprob
