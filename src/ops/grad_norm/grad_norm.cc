#include "ops/grad_norm/grad_norm.h"
#include "ops/grad_norm/grad_norm_cuda.h"

#include "ops/cuda_entry.h"
#include "ops/rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/grad_norm/grad_norm.cc"
#include "ops/simd_targets.h"

#include "hwy/foreach_target.h"  // IWYU pragma: keep

#include "hwy/highway.h"
#include "ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tare::ops::grad_norm {
namespace HWY_NAMESPACE {
using namespace tare::ops::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace)

// One leaf: lanes(128) of fma(g, g, .) over `count` elements, at most kBlock.
float LeafOf(const float* g, int64_t count) {
  const int64_t whole = count / 128 * 128;
  if (whole == count) return LanesDot<128>(g, g, count);
  HWY_ALIGN float padded[kBlock];
  std::memcpy(padded, g, static_cast<size_t>(count) * sizeof(float));
  std::memset(padded + count, 0, static_cast<size_t>(whole + 128 - count) * sizeof(float));
  return LanesDot<128>(padded, padded, whole + 128);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace tare::ops::grad_norm
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tare::ops::grad_norm {
namespace {

HWY_EXPORT(LeafOf);

}  // namespace

int64_t BlocksPerRow(int64_t cols) { return (cols + kBlock - 1) / kBlock; }

Status Leaves(const Ctx& ctx, const Entry& entry, int64_t begin, int64_t end, float* leaves) {
  TARE_RETURN_IF_ERROR(CheckDevice("grad_norm", ctx));
  if (begin < 0 || end < begin || end > entry.rows) {
    return InvalidArgument("grad_norm: rows [{}, {}) of '{}', which has {}", begin, end, entry.name,
                           entry.rows);
  }
  const int64_t blocks = BlocksPerRow(entry.cols);
  TARE_RETURN_IF_ERROR(
      CheckPointer("grad_norm", entry.name.c_str(), entry.data, (end - begin) * entry.cols));
  TARE_RETURN_IF_ERROR(CheckPointer("grad_norm", "leaves", leaves, (end - begin) * blocks));
  TARE_WITH_CUDA_RETURN("grad_norm", ctx, LeavesCuda(ctx, entry, begin, end, leaves));
  ctx.pool->ParallelRanges((end - begin) * blocks, 16, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t row = begin + i / blocks;
      const int64_t at = i % blocks * kBlock;
      leaves[i] = HWY_DYNAMIC_DISPATCH(LeafOf)(entry.data + row * entry.cols + at,
                                               std::min(kBlock, entry.cols - at));
    }
  });
  return Ok();
}

size_t WorkspaceBytes(const Ctx& ctx, std::span<const Entry> entries) {
#ifdef TARE_WITH_CUDA
  int64_t total = 0;
  for (const Entry& e : entries) total += e.rows * BlocksPerRow(e.cols);
  if (ctx.device == Device::kCuda) return WorkspaceBytesCuda(total);
#endif
  (void)ctx, (void)entries;
  return 0;
}

double Tree(std::span<const float> leaves) {
  if (leaves.empty()) return 0.0;
  std::vector<double> level(leaves.begin(), leaves.end());
  while (level.size() > 1) {
    const size_t pairs = level.size() / 2;
    for (size_t i = 0; i < pairs; ++i) level[i] = level[2 * i] + level[2 * i + 1];
    if (level.size() % 2 != 0) level[pairs] = level.back();
    level.resize(pairs + level.size() % 2);
  }
  return level[0];
}

Contract ContractOf() {
  Contract c;
  c.op = "grad_norm";
  c.formula = {"leaf = lanes(128) of fma(g, g, .) over each block of 1024 along the last axis, f32",
               "sum = balanced tree of neighbours over (name, row, block) of f64(leaf), an odd "
               "last one carried up, f64",
               "norm = f32(sqrt(sum)), f64 square root",
               "factor = min(1, max_norm / (norm + 1e-6)), f32; 1 without a limit"};
  c.lanes = 128;
  c.block = kBlock;
  c.constants = {{"clip_eps", HexWord(1e-6f)}};
  c.inputs = {{"gradients", "f32", "named [R, C], in byte order of the names"}};
  c.outputs = {{"norm", "f32", "[]"}, {"factor", "f32", "[]"}};
  c.rounding_points = {"leaf: f32", "norm: f64 to f32, once"};
  c.errors = {"a leaf that is not finite names entry, row and block",
              "names out of order or twice"};
  c.invariant_over = {"device", "fsdp", "repeat", "simd", "threads", "tp"};
  c.forward_tolerance = {-20, -100, "f32 leaves of eight fma a lane"};
  return c;
}

namespace {

// Names, shapes and the limit; the number of leaves.
Result<int64_t> CheckEntries(std::span<const Entry> entries, float max_norm) {
  if (max_norm != max_norm) return InvalidArgument("grad_norm: max_norm is NaN");
  int64_t total = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    const Entry& e = entries[i];
    if (i > 0 && e.name <= entries[i - 1].name) {
      return InvalidArgument("grad_norm: '{}' after '{}'; names must be distinct and in byte order",
                             e.name, entries[i - 1].name);
    }
    if (e.rows < 0 || e.cols < 0)
      return InvalidArgument("grad_norm: '{}' is [{}, {}]", e.name, e.rows, e.cols);
    total += e.rows * BlocksPerRow(e.cols);
  }
  return total;
}

#ifdef TARE_WITH_CUDA
// All leaves into the workspace.
Status LeavesOfAll(const Ctx& ctx, std::span<const Entry> entries, int64_t total) {
  if (ctx.workspace == nullptr || ctx.workspace_bytes < WorkspaceBytesCuda(total)) {
    return InvalidArgument("grad_norm: ctx.workspace has {} bytes; WorkspaceBytes says {}",
                           ctx.workspace_bytes, WorkspaceBytesCuda(total));
  }
  int64_t at = 0;
  for (const Entry& e : entries) {
    TARE_RETURN_IF_ERROR(Leaves(ctx, e, 0, e.rows, static_cast<float*>(ctx.workspace) + at));
    at += e.rows * BlocksPerRow(e.cols);
  }
  return Ok();
}

Result<Norm> ComputeCuda(const Ctx& ctx, std::span<const Entry> entries, int64_t total,
                         float max_norm) {
  Norm norm;
  if (total == 0) {
    if (max_norm > 0.0f) norm.factor = std::min(1.0f, max_norm / 1e-6f);
    return norm;
  }
  TARE_RETURN_IF_ERROR(LeavesOfAll(ctx, entries, total));
  int64_t bad = -1;
  TARE_RETURN_IF_ERROR(TreeCuda(ctx, total, &norm.sum_of_squares, &bad));
  for (const Entry& e : entries) {
    const int64_t blocks = BlocksPerRow(e.cols), count = e.rows * blocks;
    if (bad >= 0 && bad < count) {
      return InvalidArgument("grad_norm: the square sum of '{}' row {} block {} is not finite",
                             e.name, bad / blocks, bad % blocks);
    }
    bad -= bad < 0 ? 0 : count;
  }
  norm.norm = static_cast<float>(__builtin_sqrt(norm.sum_of_squares));
  double clip_sum = norm.sum_of_squares;
  if (fault::Active(kShardNorm, ctx.side)) {
    clip_sum = 0.0;
    if (total > 1) TARE_RETURN_IF_ERROR(TreeCuda(ctx, total / 2, &clip_sum, &bad));
  }
  const auto clip_norm = static_cast<float>(__builtin_sqrt(clip_sum));
  if (max_norm > 0.0f) norm.factor = std::min(1.0f, max_norm / (clip_norm + 1e-6f));
  return norm;
}
#endif

}  // namespace

Status ComputeOnDevice(const Ctx& ctx, std::span<const Entry> entries, float max_norm,
                       float* result) {
  if (ctx.device != Device::kCuda)
    return Unsupported("grad_norm: ComputeOnDevice is for CUDA; Compute serves every device");
#ifdef TARE_WITH_CUDA
  TARE_ASSIGN_OR_RETURN(const int64_t total, CheckEntries(entries, max_norm));
  TARE_RETURN_IF_ERROR(CheckPointer("grad_norm", "result", result, 2));
  if (total == 0) return InvalidArgument("grad_norm: no gradient has an element");
  TARE_RETURN_IF_ERROR(LeavesOfAll(ctx, entries, total));
  const bool shard = fault::Active(kShardNorm, ctx.side) && total > 1;
  return FinishCuda(ctx, total, shard ? total / 2 : total, max_norm, result);
#else
  (void)entries, (void)max_norm, (void)result;
  return Unsupported("grad_norm: this build has no CUDA part");
#endif
}

Result<Norm> Compute(const Ctx& ctx, std::span<const Entry> entries, float max_norm) {
  TARE_RETURN_IF_ERROR(CheckDevice("grad_norm", ctx));
  TARE_ASSIGN_OR_RETURN(const int64_t total, CheckEntries(entries, max_norm));
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return ComputeCuda(ctx, entries, total, max_norm);
#endif
  std::vector<float> leaves(static_cast<size_t>(total));
  int64_t at = 0;
  for (const Entry& e : entries) {
    TARE_RETURN_IF_ERROR(Leaves(ctx, e, 0, e.rows, leaves.data() + at));
    const int64_t blocks = BlocksPerRow(e.cols);
    for (int64_t i = 0; i < e.rows * blocks; ++i) {
      if (!std::isfinite(leaves[static_cast<size_t>(at + i)])) {
        return InvalidArgument("grad_norm: the square sum of '{}' row {} block {} is not finite",
                               e.name, i / blocks, i % blocks);
      }
    }
    at += e.rows * blocks;
  }
  Norm norm;
  norm.sum_of_squares = Tree(leaves);
  norm.norm = static_cast<float>(__builtin_sqrt(norm.sum_of_squares));
  float clip_norm = norm.norm;
  if (fault::Active(kShardNorm, ctx.side)) {
    clip_norm =
        static_cast<float>(__builtin_sqrt(Tree(std::span(leaves).first(leaves.size() / 2))));
  }
  if (max_norm > 0.0f) norm.factor = std::min(1.0f, max_norm / (clip_norm + 1e-6f));
  return norm;
}

}  // namespace tare::ops::grad_norm
#endif  // HWY_ONCE
