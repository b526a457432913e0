#include "ops/linear/linear.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "base/huge_pages.h"
#include "ops/linear/gemm.h"
#include "ops/linear/gemm_kernels.h"
#include "ops/linear/gradient_operands.h"
#include "ops/linear/linear_plain.h"
#include "ops/trace.h"

namespace tare::ops::linear {
namespace {

bool IsOperand(DType d) { return d == DType::kBF16 || d == DType::kF16 || d == DType::kF32; }

Status CheckOperand(std::string_view field, DType d) {
  if (IsOperand(d)) return Ok();
  return InvalidArgument("linear: {} is {}; it must be bf16, f16 or f32", field, DTypeName(d));
}

Status CheckSegments(std::string_view field, int32_t s) {
  if (s == 1 || s == 2 || s == 4 || s == 8) return Ok();
  return InvalidArgument("linear: {} {}; it must be 1, 2, 4 or 8", field, s);
}

Status CheckStride(std::string_view field, int64_t stride, int64_t width) {
  if (stride == 0 || stride >= width) return Ok();
  return InvalidArgument("linear: {} {}; it must be 0 or at least the row of {} elements", field,
                         stride, width);
}

Status CheckPointer(std::string_view field, const void* pointer) {
  if (pointer != nullptr) return Ok();
  return InvalidArgument("linear: {} is null", field);
}

int64_t Stride(int64_t given, int64_t width) { return given == 0 ? width : given; }

void Trace(const Ctx& ctx, std::string_view op, std::string_view direction, std::string_view step,
           const gemm::Schedule& s, std::string dtypes, std::string shape) {
  if (ctx.trace == nullptr) return;
  ctx.trace->Record(
      {std::string(op),
       fmt::format("linear_{}_{}_{}_{}", direction, step, s.kernel, gemm::SimdTargetName()),
       fmt::format("tile={}x{} threads={}", s.tile_m, s.tile_n, ctx.pool->threads()),
       std::move(dtypes), std::move(shape)});
}

Status CheckContext(const Ctx& ctx) {
  if (ctx.device == Device::kCpu && ctx.pool == nullptr) {
    return InvalidArgument("linear: ctx.pool is null; the CPU needs one");
  }
  return Ok();
}

}  // namespace

struct PackedWeight::Mma {
  std::once_flag once;
  numerics::MmaB b;
};

const numerics::MmaB* PackedWeight::mma() const {
  if (mma_ == nullptr) return nullptr;
  std::call_once(mma_->once, [this] {
    // Back from the panels to rows: element (n, k) of a pair panel.
    std::vector<uint16_t> codes(static_cast<size_t>(n_ * k_));
    const uint16_t* panels = static_cast<const uint16_t*>(data_.get());
    for (int64_t n = 0; n < n_; ++n) {
      const int64_t slot = n % gemm::kPanel % 16 * 2 + n % gemm::kPanel / 16;
      const uint16_t* in = panels + n / gemm::kPanel * k_ * gemm::kPanel + slot;
      for (int64_t k = 0; k < k_; ++k)
        codes[static_cast<size_t>(n * k_ + k)] = in[k * gemm::kPanel];
    }
    const auto type = dtype_ == DType::kBF16 ? numerics::MmaType::kBF16 : numerics::MmaType::kF16;
    mma_->b = numerics::MmaB::Pack(type, codes.data(), n_, k_, k_, 1);
  });
  return &mma_->b;
}

Result<PackedWeight> PackedWeight::Pack(ThreadPool* pool, const void* w, DType dtype, int64_t n,
                                        int64_t k, Profile profile) {
  TARE_RETURN_IF_ERROR(CheckOperand("packed dtype", dtype));
  TARE_RETURN_IF_ERROR(CheckPointer("w", w));
  if (pool == nullptr) return InvalidArgument("linear: pack needs a thread pool");
  if (n <= 0 || k <= 0 || n > (int64_t{1} << 40) / k) {
    return InvalidArgument("linear: pack [{}, {}]; both must be positive and below 2^40 elements",
                           n, k);
  }
  PackedWeight packed;
  packed.n_ = n;
  packed.k_ = k;
  packed.dtype_ = dtype;
  if (dtype != DType::kF32) packed.mma_ = std::make_shared<Mma>();
  if (profile == Profile::kSm90Mma && dtype != DType::kF32) {
    const auto type = dtype == DType::kBF16 ? numerics::MmaType::kBF16 : numerics::MmaType::kF16;
    std::call_once(packed.mma_->once,
                   [&] { packed.mma_->b = numerics::MmaB::Pack(type, w, n, k, k, 1); });
    const auto& rows = packed.mma_->b.packed();
    packed.size_bytes_ = static_cast<int64_t>(
        rows.halves.size() * sizeof(uint16_t) + rows.exponents.size() +
        rows.signs.size() * sizeof(uint32_t) + rows.groups.size() * sizeof(rows.groups[0]));
    return packed;
  }
  packed.size_bytes_ = (n + gemm::kPanel - 1) / gemm::kPanel * gemm::kPanel * k * SizeOf(dtype);
  const std::shared_ptr<void> data = AllocateHuge(static_cast<size_t>(packed.size_bytes_));
  if (data == nullptr) {
    return Error(Code::kExhausted, "linear: no memory for a packed weight of {} bytes",
                 packed.size_bytes_);
  }
  packed.data_ = data;
  gemm::PackPanels(*pool, w, dtype, n, k, data.get());
  return packed;
}

Status PackedWeight::Refill(ThreadPool* pool, const void* w) {
  if (data_ == nullptr || data_.use_count() > 1) {
    TARE_ASSIGN_OR_RETURN(*this, Pack(pool, w, dtype_, n_, k_));
    return Ok();
  }
  TARE_RETURN_IF_ERROR(CheckPointer("w", w));
  if (pool == nullptr) return InvalidArgument("linear: pack needs a thread pool");
  if (mma_ != nullptr) mma_ = std::make_shared<Mma>();  // its codes are of the old values
  gemm::PackPanels(*pool, w, dtype_, n_, k_, const_cast<void*>(data_.get()));
  return Ok();
}

std::vector<gemm::Group> ForwardGroups(const Params& params) {
  std::vector<gemm::Group> groups;
  groups.reserve(static_cast<size_t>(params.segments));
  for (int64_t s = 0; s < params.segments; ++s) {
    groups.push_back({{params.k * s / params.segments, params.k * (s + 1) / params.segments}});
  }
  return groups;
}

std::vector<gemm::Group> DxGroups(const Params& params) {
  std::vector<gemm::Group> groups;
  const int64_t segments = params.dx_segments;
  if (params.dx_vocabulary_leaves) {
    const int64_t leaf = (params.n + 7) / 8;
    for (int64_t s = 0; s < 8; ++s) {
      groups.push_back({{std::min(params.n, s * leaf), std::min(params.n, (s + 1) * leaf)}});
    }
    return groups;
  }
  std::vector<int64_t> parts = params.parts;
  if (parts.empty()) parts.push_back(params.n);
  for (int64_t s = 0; s < segments; ++s) {
    gemm::Group group;
    int64_t begin = 0;
    for (int64_t part : parts) {
      const gemm::Range range{begin + part * s / segments, begin + part * (s + 1) / segments};
      // Adjacent ranges are one walk.
      if (!group.empty() && group.back().end == range.begin)
        group.back().end = range.end;
      else
        group.push_back(range);
      begin += part;
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

Status Check(const Params& p) {
  if (p.n <= 0 || p.k <= 0) {
    return InvalidArgument("linear: W is [{}, {}]; both must be positive", p.n, p.k);
  }
  TARE_RETURN_IF_ERROR(CheckOperand("x_dtype", p.x_dtype));
  TARE_RETURN_IF_ERROR(CheckOperand("w_dtype", p.w_dtype));
  TARE_RETURN_IF_ERROR(CheckOperand("y_dtype", p.y_dtype));
  TARE_RETURN_IF_ERROR(CheckOperand("bias_dtype", p.bias_dtype));
  TARE_RETURN_IF_ERROR(CheckOperand("dy_dtype", p.dy_dtype));
  TARE_RETURN_IF_ERROR(CheckOperand("dx_dtype", p.dx_dtype));
  TARE_RETURN_IF_ERROR(CheckOperand("backward_operand", p.backward_operand));
  if (p.x_dtype != p.w_dtype && p.x_dtype != DType::kF32 && p.w_dtype != DType::kF32) {
    return InvalidArgument("linear: x is {} and w is {}; they must be equal unless one is f32",
                           DTypeName(p.x_dtype), DTypeName(p.w_dtype));
  }
  TARE_RETURN_IF_ERROR(CheckSegments("segments", p.segments));
  TARE_RETURN_IF_ERROR(CheckSegments("dx_segments", p.dx_segments));
  if (p.segment_unit <= 0 || p.segment_unit % 16 != 0) {
    return InvalidArgument("linear: segment_unit {}; it must be a positive multiple of 16",
                           p.segment_unit);
  }
  if (p.segments > 1 && p.k % (p.segments * p.segment_unit) != 0) {
    return InvalidArgument(
        "linear: segments {} of k = {}; k must be a multiple of {} (segments * "
        "segment_unit {})",
        p.segments, p.k, p.segments * p.segment_unit, p.segment_unit);
  }
  int64_t total = 0;
  for (int64_t part : p.parts) {
    if (part <= 0 || part > p.n - total) {
      return InvalidArgument("linear: parts must be positive and add up to n = {}", p.n);
    }
    total += part;
    if (p.dx_segments > 1 && part % p.dx_segments != 0) {
      return InvalidArgument("linear: dx_segments {} does not divide the fused part of {} features",
                             p.dx_segments, part);
    }
  }
  if (!p.parts.empty() && total != p.n) {
    return InvalidArgument("linear: parts add up to {}; they must give n = {}", total, p.n);
  }
  if (p.dx_vocabulary_leaves) {
    if (p.dx_segments != 8 || p.parts.size() > 1) {
      return InvalidArgument(
          "linear: dx_vocabulary_leaves needs dx_segments 8 (got {}) and one part", p.dx_segments);
    }
  } else if (p.dx_segments > 1 && p.n % (p.dx_segments * 16) != 0) {
    return InvalidArgument("linear: dx_segments {} of n = {}; n must be a multiple of {}",
                           p.dx_segments, p.n, p.dx_segments * 16);
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

size_t BackwardWorkspaceBytes(const Ctx& ctx, const Params& params, int64_t m, int64_t units) {
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return BackwardWorkspaceBytesCuda(ctx, params, m, units);
#endif
  (void)ctx, (void)params, (void)m, (void)units;
  return 0;
}

Status Forward(const Ctx& ctx, const Params& p, const Args& a) {
  TARE_RETURN_IF_ERROR(Check(p));
  TARE_RETURN_IF_ERROR(CheckContext(ctx));
  if (a.m < 0) return InvalidArgument("linear: m {}; it must not be negative", a.m);
  if (a.m == 0) return Ok();
  TARE_RETURN_IF_ERROR(CheckPointer("x", a.x));
  TARE_RETURN_IF_ERROR(CheckPointer("y", a.y));
  TARE_RETURN_IF_ERROR(CheckStride("x_stride", a.x_stride, p.k));
  TARE_RETURN_IF_ERROR(CheckStride("y_stride", a.y_stride, p.n));
  if (p.bias != (a.bias != nullptr)) {
    return InvalidArgument("linear: bias pointer is {} but params.bias is {}",
                           a.bias != nullptr ? "given" : "null", p.bias);
  }
  const bool packed = ctx.device == Device::kCpu && a.packed != nullptr;
  if (packed && (a.packed->n() != p.n || a.packed->k() != p.k || a.packed->dtype() != p.w_dtype)) {
    return InvalidArgument("linear: packed weight is {} [{}, {}], params say {} [{}, {}]",
                           DTypeName(a.packed->dtype()), a.packed->n(), a.packed->k(),
                           DTypeName(p.w_dtype), p.n, p.k);
  }
  if (!packed) TARE_RETURN_IF_ERROR(CheckPointer("w", a.w));
  if (packed && a.packed->panels() == nullptr && a.w == nullptr &&
      (ctx.batch_invariance == BatchInvariance::kOff || !ForwardUsesSm90(ctx.profile, p) ||
       AnyFault(ctx.side))) {
    return InvalidArgument(
        "linear: the weight is packed for sm90-mma, but this call computes in ieee-f32; give w too "
        "or pack it for that");
  }
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return ForwardCuda(ctx, p, a);
#endif
  if (ctx.device != Device::kCpu) return Unsupported("linear: this build has no CUDA part");

  if (AnyFault(ctx.side)) return PlainForward(ctx, p, a);
  gemm::Problem problem;
  problem.m = a.m;
  problem.n = p.n;
  problem.a = {.data = a.x, .dtype = p.x_dtype, .stride = Stride(a.x_stride, p.k)};
  const bool native = ctx.batch_invariance == BatchInvariance::kOff;
  const bool sm90 = !native && ForwardUsesSm90(ctx.profile, p);
  if (packed && sm90 && a.packed->mma() != nullptr) {
    problem.mma_b = a.packed->mma();
  } else if (packed && a.packed->panels() != nullptr) {
    problem.b = {.data = a.packed->panels(), .dtype = p.w_dtype, .stride = p.k};
    problem.b_layout = gemm::BLayout::kPacked;
    problem.packed_k = p.k;
  } else {
    problem.b = {.data = a.w, .dtype = p.w_dtype, .stride = p.k};
    problem.b_layout = gemm::BLayout::kRowsAreN;
  }
  problem.groups = ForwardGroups(p);
  problem.y = a.y;
  problem.y_dtype = p.y_dtype;
  problem.y_stride = Stride(a.y_stride, p.n);
  problem.bias = a.bias;
  problem.bias_dtype = p.bias_dtype;
  const gemm::Schedule s = sm90     ? gemm::RunSm90(*ctx.pool, problem)
                           : native ? gemm::RunNative(*ctx.pool, problem)
                                    : gemm::RunIeee(*ctx.pool, problem);
  Trace(ctx, "linear", "fwd", sm90 ? "sm90" : "ieee", s,
        fmt::format("{},{}->{}", DTypeName(p.x_dtype), DTypeName(p.w_dtype), DTypeName(p.y_dtype)),
        fmt::format("M={} N={} K={}", a.m, p.n, p.k));
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& p, const BackwardArgs& a) {
  TARE_RETURN_IF_ERROR(Check(p));
  TARE_RETURN_IF_ERROR(CheckContext(ctx));
  if (a.m < 0) return InvalidArgument("linear: m {}; it must not be negative", a.m);
  TARE_RETURN_IF_ERROR(CheckStride("dy_stride", a.dy_stride, p.n));
  TARE_RETURN_IF_ERROR(CheckStride("x_stride", a.x_stride, p.k));
  TARE_RETURN_IF_ERROR(CheckStride("dx_stride", a.dx_stride, p.k));
  if (a.dbias != nullptr && !p.bias) {
    return InvalidArgument("linear: dbias is given but params.bias is false");
  }
  if (a.dw != nullptr || a.dbias != nullptr) TARE_RETURN_IF_ERROR(CheckUnits(a.units, a.m));
  if (a.m == 0) return Ok();
  TARE_RETURN_IF_ERROR(
      CheckGradientOperands("linear", a.dy, a.x, a.w, a.dx != nullptr, a.dw != nullptr));
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return BackwardCuda(ctx, p, a);
#endif
  if (ctx.device != Device::kCpu) return Unsupported("linear: this build has no CUDA part");
  if (AnyFault(ctx.side)) return PlainBackward(ctx, p, a);

  const bool sm90 = ctx.profile == Profile::kSm90Mma && p.backward_operand != DType::kF32;
  const gemm::Matrix dy = GradientOperand(p, a.dy, p.dy_dtype, Stride(a.dy_stride, p.n));
  if (a.dx != nullptr) {
    gemm::Problem problem;
    problem.m = a.m;
    problem.n = p.k;
    problem.a = dy;
    problem.b = GradientOperand(p, a.w, p.w_dtype, p.k);
    problem.b_layout = gemm::BLayout::kRowsAreK;
    problem.groups = DxGroups(p);
    problem.y = a.dx;
    problem.y_dtype = p.dx_dtype;
    problem.y_stride = Stride(a.dx_stride, p.k);
    const gemm::Schedule s =
        sm90 ? gemm::RunSm90(*ctx.pool, problem) : gemm::RunIeee(*ctx.pool, problem);
    Trace(ctx, "linear.dx", "dx", sm90 ? "sm90" : "ieee", s,
          fmt::format("{},{}->{}", DTypeName(p.dy_dtype), DTypeName(p.w_dtype),
                      DTypeName(p.dx_dtype)),
          fmt::format("M={} N={} K={}", a.m, p.n, p.k));
  }
  if (a.dw != nullptr && !a.units.empty()) {
    gemm::Problem problem;
    problem.m = p.n;
    problem.n = p.k;
    problem.a = dy;
    problem.a_rows_are_k = true;
    problem.b = GradientOperand(p, a.x, p.x_dtype, Stride(a.x_stride, p.k));
    problem.b_layout = gemm::BLayout::kRowsAreK;
    for (const TokenUnit& u : a.units) problem.groups.push_back({{u.begin, u.begin + u.rows}});
    problem.sink = gemm::Problem::Sink::kAddEach;
    problem.y = a.dw;
    problem.y_stride = p.k;
    const gemm::Schedule s =
        sm90 ? gemm::RunSm90(*ctx.pool, problem) : gemm::RunIeee(*ctx.pool, problem);
    Trace(ctx, "linear.dw", "dw", sm90 ? "sm90" : "ieee", s,
          fmt::format("{},{}->f32", DTypeName(p.dy_dtype), DTypeName(p.x_dtype)),
          fmt::format("M={} N={} K={} units={}", a.m, p.n, p.k, a.units.size()));
  }
  if (a.dbias != nullptr) AddBiasGradient(ctx, p, a);
  return Ok();
}

}  // namespace tare::ops::linear
