#include "ops/sampling/row_tools.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/logprob/logprob.h"
#include "tensor/convert.h"

namespace tare::ops::sampling {
namespace {

Result<std::vector<float>> Widen(const void* logits, DType dtype, int64_t vocab) {
  std::vector<float> row(static_cast<size_t>(vocab));
  if (dtype == DType::kF32) {
    std::copy_n(static_cast<const float*>(logits), vocab, row.begin());
  } else if (dtype == DType::kBF16) {
    const auto* in = static_cast<const uint16_t*>(logits);
    for (int64_t i = 0; i < vocab; ++i) row[static_cast<size_t>(i)] = Bf16ToF32(in[i]);
  } else {
    return InvalidArgument("logits are bf16 or f32, these are {}", DTypeName(dtype));
  }
  return row;
}

}  // namespace

Status EditRow(const void* logits, DType dtype, int64_t vocab,
               std::span<const std::pair<int32_t, float>> bias, std::span<const int32_t> banned,
               float* out) {
  TARE_ASSIGN_OR_RETURN(const std::vector<float> row, Widen(logits, dtype, vocab));
  std::copy(row.begin(), row.end(), out);
  for (const auto& [id, value] : bias) {
    if (id < 0 || id >= vocab)
      return InvalidArgument("bias of token {}; ids end at {}", id, vocab - 1);
    if (std::isnan(value) || value == INFINITY) {
      return InvalidArgument("bias of token {} is not finite or -inf", id);
    }
    out[id] = out[id] + value;
  }
  for (const int32_t id : banned) {
    if (id < 0 || id >= vocab)
      return InvalidArgument("banned token {}; ids end at {}", id, vocab - 1);
    out[id] = -INFINITY;
  }
  return Ok();
}

Result<RowList> ListRow(const Ctx& ctx, const void* logits, DType dtype, int64_t vocab, int32_t k,
                        int32_t target) {
  if (k < 0 || k > vocab) return InvalidArgument("a list of {} of {} tokens", k, vocab);
  TARE_ASSIGN_OR_RETURN(const std::vector<float> row, Widen(logits, dtype, vocab));
  for (int64_t i = 0; i < vocab; ++i) {
    if (std::isnan(row[static_cast<size_t>(i)]))
      return InvalidArgument("the logit of token {} is NaN", i);
  }
  // Adding +0 turns -0 into +0, so that the two tie.
  const auto better = [&](int32_t a, int32_t b) {
    const float x = row[static_cast<size_t>(a)] + 0.0f, y = row[static_cast<size_t>(b)] + 0.0f;
    return x > y || (x == y && a < b);
  };
  RowList list;
  std::vector<int32_t> ids(static_cast<size_t>(vocab));
  std::iota(ids.begin(), ids.end(), 0);
  std::partial_sort(ids.begin(), ids.begin() + k, ids.end(), better);
  ids.resize(static_cast<size_t>(k));

  std::vector<int32_t> wanted = ids;
  if (target >= 0) wanted.push_back(target);
  // Every row of this call is the same row; the operator reads it once per wanted id. The first
  // call gives max and log-sum; logprob = (z - m) - log(l) is then the operator's own last step.
  std::vector<float> logprob(wanted.size());
  if (!wanted.empty()) {
    float max = 0.0f, log_sum = 0.0f;
    logprob::Params params{.vocab = vocab, .logits_dtype = dtype};
    logprob::Args args{.rows = 1,
                       .logits = logits,
                       .targets = wanted.data(),
                       .logprob = logprob.data(),
                       .max = &max,
                       .log_sum = &log_sum};
    TARE_RETURN_IF_ERROR(logprob::Forward(ctx, params, args));
    for (size_t i = 0; i < wanted.size(); ++i) {
      logprob[i] = (row[static_cast<size_t>(wanted[i])] - max) - log_sum;
    }
  }
  for (size_t i = 0; i < ids.size(); ++i) list.top.push_back({ids[i], logprob[i]});
  if (target >= 0) {
    list.target_logprob = logprob.back();
    list.target_rank = 1;
    for (int32_t i = 0; i < vocab; ++i)
      list.target_rank += i != target && better(i, target) ? 1 : 0;
  }
  return list;
}

}  // namespace tare::ops::sampling
