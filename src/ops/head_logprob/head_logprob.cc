#include "ops/head_logprob/head_logprob.h"

#include <memory>

#include "ops/cuda_entry.h"
#include "ops/head_logprob/head_logprob_cuda.h"
#include "ops/logprob/leaf.h"
#include "ops/rows.h"
#include "tensor/convert.h"

namespace tare::ops::head_logprob {
namespace {

// Rows whose logits are in memory at once in forward. Any number gives the same bits.
constexpr int64_t kTileRows = 64;

// Scratch that costs no zeroing.
struct Buffer {
  explicit Buffer(int64_t bytes) : data(new char[static_cast<size_t>(bytes)]) {}
  std::unique_ptr<char[]> data;
  float* f32() { return reinterpret_cast<float*>(data.get()); }
};

Status Check(const Ctx& ctx, const Params& p, int64_t rows) {
  TARE_RETURN_IF_ERROR(CheckDevice("head_logprob", ctx));
  TARE_RETURN_IF_ERROR(CheckDim("head_logprob", "hidden", p.hidden, int64_t{1} << 24));
  TARE_RETURN_IF_ERROR(CheckDim("head_logprob", "vocab", p.vocab));
  TARE_RETURN_IF_ERROR(CheckRowDType("head_logprob", "dtype", p.dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("head_logprob", "logits_dtype", p.logits_dtype));
  TARE_RETURN_IF_ERROR(CheckRowDType("head_logprob", "grad_dtype", p.grad_dtype));
  return CheckRows("head_logprob", rows);
}

// dx of one unit: the leaves' chains as they come, added as the balanced tree of eight neighbours.
// At most four partial sums are alive.
class LeafTree {
 public:
  LeafTree(ThreadPool* pool, int64_t count) : pool_(pool), count_(count) {}
  float* Next() {
    stack_.emplace_back(0, Buffer(count_ * 4));
    return stack_.back().second.f32();
  }
  void Fold() {
    while (stack_.size() >= 2 && stack_.back().first == stack_[stack_.size() - 2].first) {
      float* left = stack_[stack_.size() - 2].second.f32();
      const float* right = stack_.back().second.f32();
      pool_->ParallelRanges(count_, 16384, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) left[i] += right[i];
      });
      stack_.pop_back();
      ++stack_.back().first;
    }
  }
  float* Result() { return stack_.front().second.f32(); }

 private:
  ThreadPool* pool_;
  int64_t count_;
  std::vector<std::pair<int, Buffer>> stack_;  // (level, sum of 2^level leaves)
};

}  // namespace

size_t WorkspaceBytes(const Ctx& ctx, const Params& params, int64_t rows) {
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return WorkspaceBytesCuda(params, rows);
#endif
  (void)ctx, (void)params, (void)rows;
  return 0;
}

size_t BackwardWorkspaceBytes(const Ctx& ctx, const Params& params, int64_t rows) {
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return BackwardWorkspaceBytesCuda(ctx, params, rows);
#endif
  (void)ctx, (void)params, (void)rows;
  return 0;
}

Status Forward(const Ctx& ctx, const Params& params, const Args& args) {
  TARE_RETURN_IF_ERROR(Check(ctx, params, args.rows));
  if (args.rows > 0 && args.w == nullptr && args.packed == nullptr) {
    return InvalidArgument("head_logprob: w and packed are both null");
  }
  TARE_WITH_CUDA_RETURN("head_logprob", ctx, ForwardCuda(ctx, params, args));
  const linear::Params head = LinearOf(params, params.vocab);
  const logprob::Params softmax = {
      .vocab = params.vocab, .logits_dtype = params.logits_dtype, .grad_dtype = params.dtype};
  Buffer logits(std::min(args.rows, kTileRows) * params.vocab * SizeOf(params.logits_dtype));
  const auto at = [](auto* p, int64_t t) { return p == nullptr ? nullptr : p + t; };
  for (int64_t t = 0; t < args.rows; t += kTileRows) {
    const int64_t rows = std::min(kTileRows, args.rows - t);
    linear::Args l;
    l.m = rows;
    l.x = At(args.x, t * params.hidden, params.dtype);
    l.w = args.w;
    l.packed = args.packed;
    l.y = logits.data.get();
    TARE_RETURN_IF_ERROR(linear::Forward(ctx, head, l));
    logprob::Args s;
    s.rows = rows;
    s.logits = logits.data.get();
    s.targets = args.targets + t;
    s.temperature = at(args.temperature, t);
    s.logprob = args.logprob + t;
    s.entropy = at(args.entropy, t);
    s.max = at(args.max, t);
    s.log_sum = at(args.log_sum, t);
    TARE_RETURN_IF_ERROR(logprob::Forward(ctx, softmax, s));
  }
  return Ok();
}

Status Backward(const Ctx& ctx, const Params& params, const BackwardArgs& args) {
  TARE_RETURN_IF_ERROR(Check(ctx, params, args.rows));
  TARE_RETURN_IF_ERROR(CheckUnits(args.units, args.rows).Annotate("head_logprob"));
  TARE_RETURN_IF_ERROR(CheckPointer("head_logprob", "x", args.x, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("head_logprob", "w", args.w, args.rows));
  TARE_RETURN_IF_ERROR(CheckPointer("head_logprob", "dx", args.dx, args.rows));
  TARE_WITH_CUDA_RETURN("head_logprob", ctx, BackwardCuda(ctx, params, args));
  const int64_t hidden = params.hidden;
  // Rows between the units (padding) get no gradient.
  if (args.rows > 0)
    std::memset(args.dx, 0, static_cast<size_t>(args.rows * hidden * SizeOf(params.grad_dtype)));
  const auto at = [](auto* p, int64_t t) { return p == nullptr ? nullptr : p + t; };
  for (const TokenUnit& unit : args.units) {
    const void* x = At(args.x, unit.begin * hidden, params.dtype);
    const TokenUnit whole = {0, unit.rows};
    LeafTree tree(ctx.pool, unit.rows * hidden);
    for (int64_t leaf = 0; leaf < logprob::kLeaves; ++leaf) {
      const int64_t first = logprob::LeafBegin(params.vocab, leaf);
      const int64_t ids = logprob::LeafBegin(params.vocab, leaf + 1) - first;
      float* dx = tree.Next();
      if (ids == 0) {
        std::fill_n(dx, unit.rows * hidden, 0.0f);
        tree.Fold();
        continue;
      }
      const linear::Params head = LinearOf(params, ids);
      const void* w = At(args.w, first * hidden, params.dtype);
      Buffer logits(std::min(unit.rows, kTileRows) * ids * SizeOf(params.logits_dtype));
      Buffer dlogits(unit.rows * ids * SizeOf(params.dtype));
      for (int64_t t = 0; t < unit.rows; t += kTileRows) {
        const int64_t rows = std::min(kTileRows, unit.rows - t);
        linear::Args l;
        l.m = rows;
        l.x = At(x, t * hidden, params.dtype);
        l.w = w;
        l.y = logits.data.get();
        TARE_RETURN_IF_ERROR(linear::Forward(ctx, head, l));
        const int64_t row = unit.begin + t;
        logprob::BackwardArgs s;
        s.rows = rows;
        s.logits = logits.data.get();
        s.id_begin = first;
        s.ids = ids;
        s.targets = args.targets + row;
        s.temperature = at(args.temperature, row);
        s.max = at(args.max, row);
        s.log_sum = at(args.log_sum, row);
        s.entropy = at(args.entropy, row);
        s.dlogprob = at(args.dlogprob, row);
        s.dentropy = at(args.dentropy, row);
        s.dlogits = dlogits.data.get() + t * ids * SizeOf(params.dtype);
        TARE_RETURN_IF_ERROR(logprob::Backward(ctx,
                                               {.vocab = params.vocab,
                                                .logits_dtype = params.logits_dtype,
                                                .grad_dtype = params.dtype},
                                               s));
      }
      linear::BackwardArgs b;
      b.m = unit.rows;
      b.dy = dlogits.data.get();
      b.x = x;
      b.w = w;
      b.units = {&whole, 1};
      b.dx = dx;
      if (args.dw != nullptr) b.dw = args.dw + first * hidden;
      TARE_RETURN_IF_ERROR(linear::Backward(ctx, head, b));
      tree.Fold();
    }
    void* out = static_cast<char*>(args.dx) + unit.begin * hidden * SizeOf(params.grad_dtype);
    TARE_RETURN_IF_ERROR(ConvertElements(tree.Result(), DType::kF32, out, params.grad_dtype,
                                         unit.rows * hidden, Fp8Overflow::kNonFinite, ctx.pool));
  }
  return Ok();
}

}  // namespace tare::ops::head_logprob
