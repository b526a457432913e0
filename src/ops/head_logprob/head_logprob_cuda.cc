#include "ops/head_logprob/head_logprob_cuda.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "ops/cast/cast.h"
#include "ops/logprob/leaf.h"
#include "ops/token_units_cuda.h"
#include "tensor/cuda_status.h"

namespace tare::ops::head_logprob {
namespace {

// Rows whose logits exist at once. Any number gives the same bits; this many fill the device.
constexpr int64_t kTileRows = 512;
// Partial sums of the tree over eight leaves that are alive at once: a binary counter of three
// levels and the newest.
constexpr int kSums = 4;

int64_t RoundUp(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Pieces of ctx.workspace, each from a multiple of 256 bytes.
class Pieces {
 public:
  explicit Pieces(const Ctx& ctx) : at_(static_cast<char*>(ctx.workspace)) {}
  char* Take(int64_t bytes) {
    char* piece = at_ + used_;
    used_ += RoundUp(bytes);
    return piece;
  }
  int64_t used() const { return used_; }

 private:
  char* at_;
  int64_t used_ = 0;
};

// The longest unit, and bytes of each piece of the backward.
struct BackwardPieces {
  int64_t logits, dlogits, sum, total;
};
BackwardPieces PiecesOf(const Params& p, int64_t rows) {
  const int64_t unit = std::min(rows, kUnitRows), leaf = logprob::LeafSize(p.vocab);
  BackwardPieces b;
  b.logits = RoundUp(std::min(unit, kTileRows) * leaf * SizeOf(p.logits_dtype));
  b.dlogits = RoundUp(unit * leaf * SizeOf(p.dtype));
  b.sum = RoundUp(unit * p.hidden * 4);
  b.total = b.logits + b.dlogits + kSums * b.sum;
  return b;
}

Status CheckWorkspace(const Ctx& ctx, size_t needed) {
  if (ctx.workspace != nullptr && ctx.workspace_bytes >= needed) return Ok();
  return InvalidArgument("head_logprob: ctx.workspace has {} bytes; WorkspaceBytes says {}",
                         ctx.workspace_bytes, needed);
}

}  // namespace

size_t WorkspaceBytesCuda(const Params& p, int64_t rows) {
  return static_cast<size_t>(RoundUp(std::min(rows, kTileRows) * p.vocab * SizeOf(p.logits_dtype)));
}

size_t BackwardWorkspaceBytesCuda(const Ctx& ctx, const Params& p, int64_t rows) {
  const size_t inner = linear::BackwardWorkspaceBytes(ctx, LinearOf(p, logprob::LeafSize(p.vocab)),
                                                      std::min(rows, kUnitRows), 1);
  return static_cast<size_t>(PiecesOf(p, rows).total) + inner;
}

Status ForwardCuda(const Ctx& ctx, const Params& p, const Args& args) {
  if (args.rows == 0) return Ok();
  if (args.w == nullptr) return InvalidArgument("head_logprob: w is null");
  TARE_RETURN_IF_ERROR(CheckWorkspace(ctx, WorkspaceBytesCuda(p, args.rows)));
  const auto at = [](auto* q, int64_t t) { return q == nullptr ? nullptr : q + t; };
  for (int64_t t = 0; t < args.rows; t += kTileRows) {
    linear::Args l;
    l.m = std::min(kTileRows, args.rows - t);
    l.x = At(args.x, t * p.hidden, p.dtype);
    l.w = args.w;
    l.y = ctx.workspace;
    TARE_RETURN_IF_ERROR(linear::Forward(ctx, LinearOf(p, p.vocab), l));
    logprob::Args s;
    s.rows = l.m;
    s.logits = ctx.workspace;
    s.targets = args.targets + t;
    s.temperature = at(args.temperature, t);
    s.logprob = args.logprob + t;
    s.entropy = at(args.entropy, t);
    s.max = at(args.max, t);
    s.log_sum = at(args.log_sum, t);
    TARE_RETURN_IF_ERROR(logprob::Forward(
        ctx, {.vocab = p.vocab, .logits_dtype = p.logits_dtype, .grad_dtype = p.dtype}, s));
  }
  return Ok();
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& args) {
  if (args.rows == 0) return Ok();
  TARE_RETURN_IF_ERROR(CheckWorkspace(ctx, BackwardWorkspaceBytesCuda(ctx, p, args.rows)));
  const BackwardPieces sizes = PiecesOf(p, args.rows);
  Pieces pieces(ctx);
  char* logits = pieces.Take(sizes.logits);
  char* dlogits = pieces.Take(sizes.dlogits);
  float* sums[kSums];
  for (float*& s : sums) s = reinterpret_cast<float*>(pieces.Take(sizes.sum));
  Ctx inner = ctx;
  inner.workspace = static_cast<char*>(ctx.workspace) + pieces.used();
  inner.workspace_bytes = ctx.workspace_bytes - static_cast<size_t>(pieces.used());
  const int64_t hidden = p.hidden;
  const auto stream = static_cast<cudaStream_t>(ctx.stream);
  const auto at = [](auto* q, int64_t t) { return q == nullptr ? nullptr : q + t; };
  // Rows between the units (padding) get no gradient.
  TARE_CUDA_RETURN_IF_ERROR(cudaMemsetAsync(
      args.dx, 0, static_cast<size_t>(args.rows * hidden * SizeOf(p.grad_dtype)), stream));
  for (const TokenUnit& unit : args.units) {
    const void* x = At(args.x, unit.begin * hidden, p.dtype);
    const TokenUnit whole = {0, unit.rows};
    const int64_t count = unit.rows * hidden;
    // sums[level] holds a subtree of 2^level leaves that waits for its right neighbour.
    for (int64_t leaf = 0; leaf < logprob::kLeaves; ++leaf) {
      const int64_t first = logprob::LeafBegin(p.vocab, leaf);
      const int64_t ids = logprob::LeafBegin(p.vocab, leaf + 1) - first;
      float* newest = leaf % 2 == 0 ? sums[0] : sums[kSums - 1];
      if (ids == 0) {
        TARE_CUDA_RETURN_IF_ERROR(
            cudaMemsetAsync(newest, 0, static_cast<size_t>(count) * 4, stream));
      } else {
        const linear::Params head = LinearOf(p, ids);
        const void* w = At(args.w, first * hidden, p.dtype);
        for (int64_t t = 0; t < unit.rows; t += kTileRows) {
          linear::Args l;
          l.m = std::min(kTileRows, unit.rows - t);
          l.x = At(x, t * hidden, p.dtype);
          l.w = w;
          l.y = logits;
          TARE_RETURN_IF_ERROR(linear::Forward(inner, head, l));
          const int64_t row = unit.begin + t;
          logprob::BackwardArgs s;
          s.rows = l.m;
          s.logits = logits;
          s.id_begin = first;
          s.ids = ids;
          s.targets = args.targets + row;
          s.temperature = at(args.temperature, row);
          s.max = at(args.max, row);
          s.log_sum = at(args.log_sum, row);
          s.entropy = at(args.entropy, row);
          s.dlogprob = at(args.dlogprob, row);
          s.dentropy = at(args.dentropy, row);
          s.dlogits = dlogits + t * ids * SizeOf(p.dtype);
          TARE_RETURN_IF_ERROR(logprob::Backward(
              inner, {.vocab = p.vocab, .logits_dtype = p.logits_dtype, .grad_dtype = p.dtype}, s));
        }
        linear::BackwardArgs b;
        b.m = unit.rows;
        b.dy = dlogits;
        b.x = x;
        b.w = w;
        b.units = {&whole, 1};
        b.dx = newest;
        if (args.dw != nullptr) b.dw = args.dw + first * hidden;
        TARE_RETURN_IF_ERROR(linear::Backward(inner, head, b));
      }
      // The balanced tree of neighbours, as a binary counter: a finished pair moves one level up.
      const float* right = newest;
      for (int level = 0; level < 3 && ((leaf >> level) & 1) != 0; ++level) {
        TARE_RETURN_IF_ERROR(AddCuda(ctx, sums[level], right, count));
        right = sums[level];
      }
      // A subtree that now waits for its right neighbour moves to its level's place.
      int level = 0;
      while (level < 3 && ((leaf >> level) & 1) != 0) ++level;
      if (level > 0 && level < 3) {
        TARE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(sums[level], sums[level - 1],
                                                  static_cast<size_t>(count) * 4,
                                                  cudaMemcpyDeviceToDevice, stream));
      }
    }
    char* out = static_cast<char*>(args.dx) + unit.begin * hidden * SizeOf(p.grad_dtype);
    TARE_RETURN_IF_ERROR(cast::Forward(ctx, {DType::kF32, p.grad_dtype}, {count, sums[2], out}));
  }
  return Ok();
}

}  // namespace tare::ops::head_logprob
