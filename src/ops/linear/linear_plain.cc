#include "numerics/fp.h"
#include "ops/linear/linear_plain.h"

#include <algorithm>
#include <cmath>

#include "numerics/sm90.h"
#include "tensor/convert.h"

namespace tare::ops::linear {
namespace {

using gemm::LoadAsF32;
using gemm::RoundOperand;
using gemm::StoreRounded;

// One output element's walk over K.
struct Chain {
  bool sm90 = false;
  DType dtype = DType::kBF16;
  bool accumulate_bf16 = false;
  bool split_fma = false;
  bool reversed = false;

  Chain(bool use_sm90, DType operand, fault::Side side)
      : sm90(use_sm90),
        dtype(operand),
        accumulate_bf16(fault::Active(kAccumulateBf16, side)),
        split_fma(fault::Active(kSplitFma, side)),
        reversed(fault::Active(kReversedK, side)) {}

  // One tensor-core step; a short group is padded with zeros.
  float Step(float c, const float* a, const float* b, int64_t group) const {
    uint16_t pa[16] = {}, pb[16] = {};
    for (int64_t i = 0; i < group; ++i) {
      pa[i] = dtype == DType::kBF16 ? F32ToBf16(a[i]) : F32ToF16(a[i]);
      pb[i] = dtype == DType::kBF16 ? F32ToBf16(b[i]) : F32ToF16(b[i]);
    }
    if (split_fma) {
      // The nearest defect of this step: products enter one at a time.
      for (int64_t i = 0; i < group; ++i) {
        uint16_t one_a[16] = {pa[i]}, one_b[16] = {pb[i]};
        c = dtype == DType::kBF16 ? numerics::Sm90Step<numerics::MmaType::kBF16>(one_a, one_b, c)
                                  : numerics::Sm90Step<numerics::MmaType::kF16>(one_a, one_b, c);
      }
      return c;
    }
    return dtype == DType::kBF16 ? numerics::Sm90Step<numerics::MmaType::kBF16>(pa, pb, c)
                                 : numerics::Sm90Step<numerics::MmaType::kF16>(pa, pb, c);
  }

  float Run(float c, std::vector<float>& a, std::vector<float>& b) const {
    const int64_t count = static_cast<int64_t>(a.size());
    if (reversed) {
      std::reverse(a.begin(), a.end());
      std::reverse(b.begin(), b.end());
    }
    for (int64_t k = 0; k < count; k += 16) {
      const int64_t group = std::min<int64_t>(16, count - k);
      if (sm90) {
        c = Step(c, &a[static_cast<size_t>(k)], &b[static_cast<size_t>(k)], group);
        if (accumulate_bf16) c = RoundOperand(c, DType::kBF16);
        continue;
      }
      for (int64_t i = k; i < k + group; ++i) {
        const auto at = static_cast<size_t>(i);
        if (split_fma) {
          const float product = a[at] * b[at];
          c = c + product;
        } else {
          c = std::fma(a[at], b[at], c);
        }
      }
      if (accumulate_bf16) c = RoundOperand(c, DType::kBF16);
    }
    return c;
  }
};

float Tree(std::vector<float> v) {
  for (size_t step = 1; step < v.size(); step *= 2) {
    for (size_t i = 0; i + step < v.size(); i += 2 * step) v[i] += v[i + step];
  }
  return v[0];
}

// Groups as a fault would have them for this many rows.
std::vector<gemm::Group> FaultyGroups(const std::vector<gemm::Group>& groups, int64_t rows,
                                      fault::Side side) {
  int64_t cut = 0;
  if (fault::Active(kSplitByRows, side) && rows <= 4) cut = 4;
  std::vector<gemm::Group> out;
  for (const gemm::Group& g : groups) {
    if (fault::Active(kSegmentsByRows, side) && rows > 16) {
      for (const gemm::Range& r : g) {
        for (int64_t k = r.begin; k < r.end; k += 64) out.push_back({{k, std::min(r.end, k + 64)}});
      }
    } else if (cut != 0) {
      for (const gemm::Range& r : g) {
        const int64_t n = r.end - r.begin;
        for (int64_t i = 0; i < cut; ++i)
          out.push_back({{r.begin + n * i / cut, r.begin + n * (i + 1) / cut}});
      }
    } else {
      out.push_back(g);
    }
  }
  return out;
}

DType OperandDType(const Params& p) { return p.x_dtype == DType::kF32 ? p.w_dtype : p.x_dtype; }

}  // namespace

bool AnyFault(fault::Side side) {
  return fault::Active(kAccumulateBf16, side) || fault::Active(kSplitFma, side) ||
         fault::Active(kReversedK, side) || fault::Active(kSplitByRows, side) ||
         fault::Active(kSegmentsByRows, side) || fault::Active(kBiasAfterCast, side) ||
         fault::Active(kDwPartialGroup, side);
}

bool ForwardUsesSm90(Profile profile, const Params& p) {
  return profile == Profile::kSm90Mma && p.x_dtype != DType::kF32 && p.w_dtype != DType::kF32;
}

bool BackwardUsesSm90(Profile profile, const Params& p) {
  return profile == Profile::kSm90Mma && p.backward_operand != DType::kF32;
}

Status PlainForward(const Ctx& ctx, const Params& p, const Args& args) {
  const Chain chain(ForwardUsesSm90(ctx.profile, p), OperandDType(p), ctx.side);
  const std::vector<gemm::Group> groups = FaultyGroups(ForwardGroups(p), args.m, ctx.side);
  const int64_t x_stride = args.x_stride == 0 ? p.k : args.x_stride;
  const int64_t y_stride = args.y_stride == 0 ? p.n : args.y_stride;
  const bool bias_late = fault::Active(kBiasAfterCast, ctx.side);
  const auto weight = [&](int64_t n, int64_t k) {
    if (args.w != nullptr) return LoadAsF32(args.w, p.w_dtype, n * p.k + k);
    const int64_t at = (n / gemm::kPanel * p.k + k) * gemm::kPanel;
    const int64_t c = n % gemm::kPanel;
    if (p.w_dtype == DType::kF32) return LoadAsF32(args.packed->panels(), p.w_dtype, at + c);
    return LoadAsF32(args.packed->panels(), p.w_dtype, at + c % 16 * 2 + c / 16);
  };
  ctx.pool->ParallelFor(p.n, [&](int64_t n) {
    for (int64_t m = 0; m < args.m; ++m) {
      std::vector<float> partial;
      for (const gemm::Group& g : groups) {
        std::vector<float> a, b;
        for (const gemm::Range& r : g) {
          for (int64_t k = r.begin; k < r.end; ++k) {
            a.push_back(LoadAsF32(args.x, p.x_dtype, m * x_stride + k));
            b.push_back(weight(n, k));
          }
        }
        partial.push_back(chain.Run(0.0f, a, b));
      }
      float y = Tree(std::move(partial));
      if (p.bias) {
        const float bias = LoadAsF32(args.bias, p.bias_dtype, n);
        y = (bias_late ? RoundOperand(y, p.y_dtype) : y) + bias;
      }
      StoreRounded(args.y, p.y_dtype, m * y_stride + n, y);
    }
  });
  return Ok();
}

Status PlainBackward(const Ctx& ctx, const Params& p, const BackwardArgs& args) {
  const Chain chain(BackwardUsesSm90(ctx.profile, p), p.backward_operand, ctx.side);
  const int64_t dy_stride = args.dy_stride == 0 ? p.n : args.dy_stride;
  const int64_t x_stride = args.x_stride == 0 ? p.k : args.x_stride;
  const int64_t dx_stride = args.dx_stride == 0 ? p.k : args.dx_stride;
  const auto load = [&](const void* data, DType dtype, int64_t at) {
    return RoundOperand(LoadAsF32(data, dtype, at), p.backward_operand);
  };
  if (args.dx != nullptr) {
    const std::vector<gemm::Group> groups = FaultyGroups(DxGroups(p), args.m, ctx.side);
    ctx.pool->ParallelFor(p.k, [&](int64_t k) {
      for (int64_t m = 0; m < args.m; ++m) {
        std::vector<float> partial;
        for (const gemm::Group& g : groups) {
          std::vector<float> a, b;
          for (const gemm::Range& r : g) {
            for (int64_t n = r.begin; n < r.end; ++n) {
              a.push_back(load(args.dy, p.dy_dtype, m * dy_stride + n));
              b.push_back(load(args.w, p.w_dtype, n * p.k + k));
            }
          }
          partial.push_back(chain.Run(0.0f, a, b));
        }
        StoreRounded(args.dx, p.dx_dtype, m * dx_stride + k, Tree(std::move(partial)));
      }
    });
  }
  if (args.dw != nullptr) {
    const bool drop = fault::Active(kDwPartialGroup, ctx.side);
    ctx.pool->ParallelFor(p.n, [&](int64_t n) {
      for (int64_t k = 0; k < p.k; ++k) {
        for (const TokenUnit& u : args.units) {
          const int64_t rows = drop ? u.rows / 16 * 16 : u.rows;
          std::vector<float> a, b;
          for (int64_t t = u.begin; t < u.begin + rows; ++t) {
            a.push_back(load(args.dy, p.dy_dtype, t * dy_stride + n));
            b.push_back(load(args.x, p.x_dtype, t * x_stride + k));
          }
          float& sum = args.dw[n * p.k + k];
          sum = numerics::Canonical(sum + chain.Run(0.0f, a, b));
        }
      }
    });
  }
  if (args.dbias != nullptr) AddBiasGradient(ctx, p, args);
  return Ok();
}

void AddBiasGradient(const Ctx& ctx, const Params& p, const BackwardArgs& args) {
  const int64_t dy_stride = args.dy_stride == 0 ? p.n : args.dy_stride;
  constexpr int64_t kLanes = 32;
  constexpr int64_t kColumns = 64;
  ctx.pool->ParallelRanges(p.n, kColumns, [&](int64_t n0, int64_t n1) {
    float lane[kLanes][kColumns];
    const int64_t width = n1 - n0;
    for (const TokenUnit& u : args.units) {
      std::fill(&lane[0][0], &lane[0][0] + kLanes * kColumns, 0.0f);
      for (int64_t t = 0; t < u.rows; ++t) {
        float* sum = lane[t % kLanes];
        for (int64_t i = 0; i < width; ++i) {
          sum[i] += LoadAsF32(args.dy, p.dy_dtype, (u.begin + t) * dy_stride + n0 + i);
        }
      }
      for (int64_t half = kLanes / 2; half >= 1; half /= 2) {
        for (int64_t j = 0; j < half; ++j) {
          for (int64_t i = 0; i < width; ++i) lane[j][i] += lane[j + half][i];
        }
      }
      for (int64_t i = 0; i < width; ++i) {
        args.dbias[n0 + i] = numerics::Canonical(args.dbias[n0 + i] + lane[0][i]);
      }
    }
  });
}

}  // namespace tare::ops::linear
