#include "ops/embedding/embedding.h"
#include "ops/embedding/embedding_cuda.h"

#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/embedding/embedding.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::embedding {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)

template <typename E, typename T>
void ForwardT(const Params& p, const Args& a, int64_t begin, int64_t end) {
  const DF d;
  const VF scale = hn::Set(d, p.scale);
  for (int64_t t = begin; t < end; ++t) {
    const E* from = static_cast<const E*>(a.table) + a.ids[t] * p.hidden;
    T* to = static_cast<T*>(a.out) + t * p.hidden;
    if (p.scale == 1.0f) {
      ForEachVector(p.hidden, [&](int64_t i, int64_t n)
                                  HWY_ATTR { StorePart(LoadPart(from + i, n), to + i, n); });
    } else {
      ForEachVector(p.hidden, [&](int64_t i, int64_t n) HWY_ATTR {
        StorePart(hn::Mul(LoadPart(from + i, n), scale), to + i, n);
      });
    }
  }
}
void ForwardRows(const Params& p, const Args& a, int64_t begin, int64_t end) {
  WithRowDType(p.table_dtype, [&](auto e) {
    WithRowDType(p.dtype, [&](auto t) { ForwardT<decltype(e), decltype(t)>(p, a, begin, end); });
  });
}

// The sum of one id's tokens in one unit, by lanes(32) over the unit's tokens, added to its row.
// The other tokens of the unit would add +0 to their lanes, which changes no lane: lanes start from
// +0.
template <typename G>
void BackwardT(const Params& p, const BackwardArgs& a, const TokenUnit& unit, const int32_t* tokens,
               int64_t count) {
  const DF d;
  constexpr int64_t kColumns = 256;
  const VF scale = hn::Set(d, p.scale);
  float* row = a.dtable + a.ids[tokens[0]] * p.hidden;
  float* lane = Scratch(32 * kColumns);
  for (int64_t c = 0; c < p.hidden; c += kColumns) {
    const int64_t columns = std::min(kColumns, p.hidden - c);
    std::memset(lane, 0, 32 * kColumns * sizeof(float));
    for (int64_t k = 0; k < count; ++k) {
      const G* dy = static_cast<const G*>(a.dout) + tokens[k] * p.hidden + c;
      float* to = lane + (tokens[k] - unit.begin) % 32 * kColumns;
      ForEachVector(columns, [&](int64_t i, int64_t n) HWY_ATTR {
        hn::StoreU(hn::MulAdd(LoadPart(dy + i, n), scale, hn::LoadU(d, to + i)), d, to + i);
      });
    }
    for (int64_t half = 16; half >= 1; half /= 2) {
      for (int64_t l = 0; l < half; ++l) {
        for (int64_t j = 0; j < columns; ++j)
          lane[l * kColumns + j] += lane[(l + half) * kColumns + j];
      }
    }
    for (int64_t j = 0; j < columns; ++j) PutFloat(row[c + j] + lane[j], row + c + j);
  }
}
void BackwardId(const Params& p, const BackwardArgs& a, const TokenUnit& unit,
                const int32_t* tokens, int64_t count) {
  WithRowDType(p.grad_dtype, [&](auto g) { BackwardT<decltype(g)>(p, a, unit, tokens, count); });
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::embedding
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::embedding {
namespace {

HWY_EXPORT(ForwardRows);
HWY_EXPORT(BackwardId);

Status Check(const Ctx& ctx, const Params& p, int64_t rows, const int32_t* ids) {
  TARE_RETURN_IF_ERROR(CheckDim("embedding", "vocab", p.vocab));
  TARE_RETURN_IF_ERROR(CheckDim("embedding", "hidden", p.hidden, int64_t{1} << 24));
  TARE_RETURN_IF_ERROR(CheckRowDType("embedding", "dtype", p.dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("embedding", "table_dtype", p.table_dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("embedding", "grad_dtype", p.grad_dtype));
  if (!std::isfinite(p.scale))
    return InvalidArgument("embedding: scale is {}; a finite number", p.scale);
  TARE_RETURN_IF_ERROR(CheckRows("embedding", rows));
  TARE_RETURN_IF_ERROR(CheckPointer("embedding", "ids", ids, rows));
  for (int64_t t = 0; IsHost(ctx) && t < rows; ++t) {
    if (ids[t] < 0 || ids[t] >= p.vocab) {
      return InvalidArgument("embedding: row {} has token ID {}; the vocabulary is [0, {})", t,
                             ids[t], p.vocab);
    }
  }
  return Ok();
}

}  // namespace

Status Forward(const Ctx& ctx, const Params& params, const Args& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("embedding", ctx));
  TARE_RETURN_IF_ERROR(Check(ctx, params, args.rows, args.ids));
  TARE_RETURN_IF_ERROR(CheckPointer("embedding", "table", args.table, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("embedding", "out", args.out, args.rows));
  TARE_WITH_CUDA_RETURN("embedding", ctx, ForwardCuda(ctx, params, args));
  ctx.pool->ParallelRanges(args.rows, RowGrain(args.rows, params.hidden, ctx.pool->threads()),
                           [&](int64_t begin, int64_t end) {
                             HWY_DYNAMIC_DISPATCH(ForwardRows)(params, args, begin, end);
                           });
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args) {
  TARE_RETURN_IF_ERROR(CheckDevice("embedding", ctx));
  TARE_RETURN_IF_ERROR(Check(ctx, params, args.rows, args.ids));
  TARE_RETURN_IF_ERROR(CheckUnits(args.units, args.rows).Annotate("embedding"));
  TARE_RETURN_IF_ERROR(CheckPointer("embedding", "dout", args.dout, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("embedding", "dtable", args.dtable, args.rows));
  TARE_WITH_CUDA_RETURN("embedding", ctx, BackwardCuda(ctx, params, args));
  for (const TokenUnit& unit : args.units) {
    // Tokens by (id, position): one group an id, groups touch distinct rows of the table.
    std::vector<int32_t> tokens(static_cast<size_t>(unit.rows));
    for (int64_t i = 0; i < unit.rows; ++i)
      tokens[static_cast<size_t>(i)] = static_cast<int32_t>(unit.begin + i);
    std::stable_sort(tokens.begin(), tokens.end(),
                     [&](int32_t x, int32_t y) { return args.ids[x] < args.ids[y]; });
    std::vector<int64_t> starts;
    for (size_t i = 0; i < tokens.size(); ++i) {
      if (i == 0 || args.ids[tokens[i]] != args.ids[tokens[i - 1]])
        starts.push_back(static_cast<int64_t>(i));
    }
    const int64_t groups = static_cast<int64_t>(starts.size());
    starts.push_back(unit.rows);
    ctx.pool->ParallelRanges(groups, 8, [&](int64_t begin, int64_t end) {
      for (int64_t g = begin; g < end; ++g) {
        const int64_t from = starts[static_cast<size_t>(g)];
        HWY_DYNAMIC_DISPATCH(BackwardId)
        (params, args, unit, tokens.data() + from, starts[static_cast<size_t>(g + 1)] - from);
      }
    });
  }
  return Ok();
}

}  // namespace tare::ops::embedding
#endif  // HWY_ONCE
