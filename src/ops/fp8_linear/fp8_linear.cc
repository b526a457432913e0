#include "ops/fp8_linear/fp8_linear.h"

#include <algorithm>
#include <vector>

#include "numerics/fp.h"
#include "numerics/lanes.h"
#include "numerics/mma.h"
#include "ops/linear/gemm.h"
#include "ops/trace.h"
#include "tensor/convert.h"

namespace tare::ops::fp8_linear {
namespace {

constexpr int64_t kColumns = numerics::kMmaPanel;
constexpr int64_t kRows = 64;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

Status CheckPointer(std::string_view field, const void* pointer) {
  if (pointer != nullptr) return Ok();
  return InvalidArgument("fp8_linear: {} is null", field);
}

// partial[r][c] of one block by fma from +0: x [rows, k] and w panel [k, 64] as f32.
void IeeeBlock(const float* x, int64_t ldx, int64_t rows, const float* w, int64_t count,
               float* partial) {
  for (int64_t r = 0; r < rows; ++r) {
    float acc[kColumns] = {};
    for (int64_t k = 0; k < count; ++k) {
      const float v = x[r * ldx + k];
      const float* row = w + k * kColumns;
      for (int64_t c = 0; c < kColumns; ++c) acc[c] = numerics::Fma(v, row[c], acc[c]);
    }
    std::copy(acc, acc + kColumns, partial + r * kColumns);
  }
}

}  // namespace

Status Check(const Params& p) {
  if (p.n <= 0 || p.k <= 0)
    return InvalidArgument("fp8_linear: W is [{}, {}]; both must be positive", p.n, p.k);
  if (p.x_dtype != DType::kE4M3 || p.w_dtype != DType::kE4M3) {
    return InvalidArgument("fp8_linear: x is {} and w is {}; both must be e4m3",
                           DTypeName(p.x_dtype), DTypeName(p.w_dtype));
  }
  for (const auto& [field, d] :
       {std::pair("y_dtype", p.y_dtype), std::pair("bias_dtype", p.bias_dtype)}) {
    if (d != DType::kBF16 && d != DType::kF16 && d != DType::kF32) {
      return InvalidArgument("fp8_linear: {} is {}; it must be bf16, f16 or f32", field,
                             DTypeName(d));
    }
  }
  const int32_t s = p.segments;
  if (s != 1 && s != 2 && s != 4 && s != 8)
    return InvalidArgument("fp8_linear: segments {}; it must be 1, 2, 4 or 8", s);
  if (s > 1 && p.k % (s * kBlock) != 0) {
    return InvalidArgument("fp8_linear: segments {} of k = {}; k must be a multiple of {}", s, p.k,
                           s * kBlock);
  }
  return Ok();
}

size_t WorkspaceBytes(const Ctx& ctx, const Params& params, int64_t m) {
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return WorkspaceBytesCuda(ctx, params, m);
#endif
  (void)ctx, (void)params, (void)m;
  return 0;
}

Status Forward(const Ctx& ctx, const Params& p, const Args& a) {
  TARE_RETURN_IF_ERROR(Check(p));
  if (a.m < 0) return InvalidArgument("fp8_linear: m {}; it must not be negative", a.m);
  if (p.bias != (a.bias != nullptr)) {
    return InvalidArgument("fp8_linear: bias pointer is {} but params.bias is {}",
                           a.bias ? "given" : "null", p.bias);
  }
  if (a.m == 0) return Ok();
  TARE_RETURN_IF_ERROR(CheckPointer("x", a.x));
  TARE_RETURN_IF_ERROR(CheckPointer("x_scale", a.x_scale));
  TARE_RETURN_IF_ERROR(CheckPointer("w", a.w));
  TARE_RETURN_IF_ERROR(CheckPointer("w_scale", a.w_scale));
  TARE_RETURN_IF_ERROR(CheckPointer("y", a.y));
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return ForwardCuda(ctx, p, a);
#endif
  if (ctx.device != Device::kCpu) return Unsupported("fp8_linear: this build has no CUDA part");
  if (ctx.pool == nullptr)
    return InvalidArgument("fp8_linear: ctx.pool is null; the CPU needs one");

  const bool sm90 = ctx.profile == Profile::kSm90Mma;
  const int64_t blocks = CeilDiv(p.k, kBlock);
  const uint8_t* x = static_cast<const uint8_t*>(a.x);
  const uint8_t* w = static_cast<const uint8_t*>(a.w);
  const int64_t row_blocks = CeilDiv(a.m, kRows);
  float decode[256];
  for (int i = 0; i < 256; ++i) decode[i] = E4m3ToF32(static_cast<uint8_t>(i));
  std::vector<numerics::MmaA> xa(static_cast<size_t>(sm90 ? row_blocks : 0));
  std::vector<float> xf(static_cast<size_t>(sm90 ? 0 : a.m * p.k));
  ctx.pool->ParallelFor(row_blocks, [&](int64_t i) {
    const int64_t m0 = i * kRows, m1 = std::min(a.m, m0 + kRows);
    if (sm90) {
      xa[static_cast<size_t>(i)] =
          numerics::MmaA::Pack(numerics::MmaType::kE4M3, x + m0 * p.k, m1 - m0, p.k, p.k, 1);
    } else {
      for (int64_t j = m0 * p.k; j < m1 * p.k; ++j) xf[static_cast<size_t>(j)] = decode[x[j]];
    }
  });
  ctx.pool->ParallelFor(CeilDiv(p.n, kColumns), [&](int64_t panel) {
    const int64_t n0 = panel * kColumns, n1 = std::min(p.n, n0 + kColumns), width = n1 - n0;
    numerics::MmaB wb;
    std::vector<float> wf;
    if (sm90) {
      wb = numerics::MmaB::Pack(numerics::MmaType::kE4M3, w + n0 * p.k, width, p.k, p.k, 1);
    } else {
      wf.assign(static_cast<size_t>(p.k * kColumns), 0.0f);
      for (int64_t c = 0; c < width; ++c) {
        for (int64_t k = 0; k < p.k; ++k)
          wf[static_cast<size_t>(k * kColumns + c)] = decode[w[(n0 + c) * p.k + k]];
      }
    }
    std::vector<float> partial(static_cast<size_t>(kRows * kColumns));
    std::vector<float> acc(static_cast<size_t>(p.segments * kRows * kColumns));
    const bool one_chain = fault::Active(kOneChain, ctx.side);
    const bool in_turn = fault::Active(kScalesInTurn, ctx.side);
    for (int64_t i = 0; i < row_blocks; ++i) {
      const int64_t m0 = i * kRows, rows = std::min(a.m, m0 + kRows) - m0;
      std::fill(acc.begin(), acc.end(), 0.0f);
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t k0 = b * kBlock, k1 = one_chain ? p.k : std::min(p.k, k0 + kBlock);
        if (one_chain && b > 0) break;
        if (sm90) {
          std::fill(partial.begin(), partial.end(), 0.0f);
          numerics::MmaTile(xa[static_cast<size_t>(i)], 0, rows, wb, 0, width, k0, k1,
                            partial.data(), kColumns);
        } else {
          IeeeBlock(xf.data() + m0 * p.k + k0, p.k, rows, wf.data() + k0 * kColumns, k1 - k0,
                    partial.data());
        }
        float* sum = acc.data() + b * p.segments / blocks * kRows * kColumns;
        // A panel of 64 columns lies inside one block of 128 output features.
        const float w_scale = a.w_scale[n0 / kBlock * blocks + b];
        for (int64_t r = 0; r < rows; ++r) {
          const float x_scale = a.x_scale[(m0 + r) * blocks + b];
          const float scale = in_turn ? w_scale : x_scale * w_scale;
          for (int64_t c = 0; in_turn && c < width; ++c)
            partial[static_cast<size_t>(r * kColumns + c)] *= x_scale;
          for (int64_t c = 0; c < width; ++c) {
            float& s = sum[r * kColumns + c];
            s = numerics::Fma(partial[static_cast<size_t>(r * kColumns + c)], scale, s);
          }
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < width; ++c) {
          float runs[8];
          for (int64_t s = 0; s < p.segments; ++s) {
            runs[s] = acc[static_cast<size_t>((s * kRows + r) * kColumns + c)];
          }
          float v = numerics::NeighbourTree(runs, p.segments);
          if (p.bias) v += gemm::LoadAsF32(a.bias, p.bias_dtype, n0 + c);
          gemm::StoreRounded(a.y, p.y_dtype, (m0 + r) * p.n + n0 + c, v);
        }
      }
    }
  });
  if (ctx.trace != nullptr) {
    ctx.trace->Record({"fp8_linear", sm90 ? "fp8_linear_fwd_sm90" : "fp8_linear_fwd_ieee",
                       "tile=64x64", fmt::format("e4m3,e4m3->{}", DTypeName(p.y_dtype)),
                       fmt::format("M={} N={} K={}", a.m, p.n, p.k)});
  }
  return Ok();
}

}  // namespace tare::ops::fp8_linear
