// attention on CUDA: from checked arguments to the kernels of attention_gpu.h. Which kernel serves
// a run is decided here and moves no bit.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>

#include "ops/attention/attention.h"
#include "ops/attention/attention_gpu.h"
#include "ops/attention/attention_plain.h"
#include "ops/attention/attention_step.h"
#include "ops/trace.h"
#include "tensor/cuda_status.h"

namespace tare::ops::attention {
namespace {

constexpr int64_t kLeastSplit = 256;  // of the native arm

int64_t Stride(int64_t given, int64_t width) { return given == 0 ? width : given; }
int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
size_t Padded(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The workspace, cut into pieces in the order of asking.
class Pieces {
 public:
  explicit Pieces(const Ctx& ctx) : ctx_(ctx) {}
  template <class T>
  T* Take(int64_t count) {
    char* at = static_cast<char*>(ctx_.workspace) + used_;
    used_ += Padded(static_cast<size_t>(count) * sizeof(T));
    return reinterpret_cast<T*>(at);
  }
  Status Check(const char* says) const {
    if (used_ == 0 || (ctx_.workspace != nullptr && used_ <= ctx_.workspace_bytes)) return Ok();
    return InvalidArgument(
        "attention: ctx.workspace has {} bytes and {} are needed; {} says how many",
        ctx_.workspace_bytes, used_, says);
  }

 private:
  const Ctx& ctx_;
  size_t used_ = 0;
};

// The planted faults of this side, as attention_plain.cc plants them: other parameters of the call,
// or what the generic kernel does otherwise.
void PlantFaults(const Ctx& ctx, const Params& p, size_t runs, gpu::Forward& f) {
  if (fault::Active(kWindowOffByOne, ctx.side) && f.window != 0) ++f.window;
  if (fault::Active(kSinkMissing, ctx.side)) f.sink = nullptr;
  if (fault::Active(kSoftcapMissing, ctx.side) && f.cap != 0.0f) {
    f.cap = f.ratio = 0.0f;
    f.c = p.scale * kLog2e;
  }
  if (fault::Active(kSplitByBatch, ctx.side) && runs > 1)
    f.kv_split = f.kv_split == 256 ? 512 : 256;
  f.scale = p.scale;
  f.faults.kv_fp8 = fault::Active(kKvFp8, ctx.side);
  f.faults.leak = fault::Active(kPackedLeak, ctx.side);
  f.faults.by_rows = fault::Active(kTileByRows, ctx.side);
  if (fault::Active(kSplitByDecode, ctx.side))
    f.faults.decode_split = f.kv_split == 256 ? 512 : f.kv_split / 2 / 128 * 128;
  f.faults.scale_q = fault::Active(kScaleQFirst, ctx.side) && f.cap == 0.0f;
  if (f.faults.scale_q) f.c = kLog2e;
}

Status CheckSizes(const Params& p, int64_t tokens, std::span<const Run> runs) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  if (tokens > kLimit / p.q_heads || p.q_heads > 65535)
    return Unsupported(
        "attention: {} tokens of {} heads on CUDA; at most 2^31 rows and 65,535 heads", tokens,
        p.q_heads);
  if (runs.size() > 1u << 20)
    return Unsupported("attention: {} runs in one CUDA call", runs.size());
  return Ok();
}

// Splits that a run of few rows can see, keys up to `max_keys`.
int64_t MostSplits(const Params& p, int64_t max_keys) {
  const int64_t splits = CeilDiv(max_keys, p.kv_split);
  if (p.window == 0) return splits;
  const auto group = static_cast<int>(p.q_heads / p.kv_heads);
  return std::min(splits, (p.window + gpu::MaxDecodeRows(group)) / p.kv_split + 2);
}

// Slots of the splits' parts: `runs` runs that go to the decode kernel.
int64_t PartSlots(const Params& p, int64_t runs, int64_t max_keys) {
  const auto group = static_cast<int>(p.q_heads / p.kv_heads);
  const int64_t blocks = CeilDiv(gpu::MaxDecodeRows(group), gpu::kDecodeRows);
  const int64_t splits = MostSplits(p, max_keys);
  return splits <= 1 ? 0 : runs * blocks * splits * p.kv_heads * gpu::kDecodeRows;
}

Result<const Run*> DeviceRuns(const Run* given, std::span<const Run> runs, Run* room,
                              StreamHandle stream) {
  if (given != nullptr) return given;
  TARE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(room, runs.data(), runs.size() * sizeof(Run),
                                            cudaMemcpyHostToDevice,
                                            static_cast<cudaStream_t>(stream)));
  return room;
}

// Whether the Hopper kernels may take the call, and want their room.
bool MayBeFast(const Ctx& ctx, const Params& p) {
  return ctx.profile == Profile::kSm90Mma && p.dtype == DType::kBF16;
}

}  // namespace

size_t WorkspaceBytesCuda(const Ctx& ctx, const Params& params, int64_t, int64_t runs,
                          int64_t max_keys) {
  Params p = params;
  if (ctx.batch_invariance == BatchInvariance::kOff) p.kv_split = kLeastSplit;
  size_t bytes = Padded(static_cast<size_t>(runs) * sizeof(Run));
  if (MayBeFast(ctx, p)) {
    const auto slots = static_cast<size_t>(PartSlots(p, runs, max_keys));
    bytes += Padded(slots * static_cast<size_t>(p.head_dim) * 4) + Padded(slots * 8);
  }
  return bytes;
}

size_t BackwardWorkspaceBytesCuda(const Ctx& ctx, const Params& p, int64_t tokens, int64_t runs,
                                  int64_t) {
  const auto rows = static_cast<size_t>(tokens * p.q_heads);
  size_t bytes = Padded(static_cast<size_t>(runs) * sizeof(Run)) + 2 * Padded(rows * 4);
  if (MayBeFast(ctx, p)) bytes += 2 * Padded(rows * static_cast<size_t>(p.head_dim) * 4);
  return bytes;
}

Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& a) {
  // The native arm: the same kernels, split by the number of rows.
  const bool native = ctx.batch_invariance == BatchInvariance::kOff;
  const Params p = native ? NativeParams(params, a.runs) : params;
  TARE_RETURN_IF_ERROR(CheckSizes(p, a.tokens, a.runs));
  const int64_t group = p.q_heads / p.kv_heads, d = p.head_dim;
  gpu::Forward f = {};
  f.q_heads = static_cast<int>(p.q_heads);
  f.kv_heads = static_cast<int>(p.kv_heads);
  f.head_dim = static_cast<int>(d);
  f.group = static_cast<int>(group);
  f.tokens = static_cast<int>(a.tokens);
  f.q = a.q;
  f.k = a.kv.k;
  f.v = a.kv.v;
  f.out = a.out;
  f.lse2 = a.lse2;
  f.sink = a.sink;
  f.q_stride = Stride(a.q_stride, p.q_heads * d);
  f.out_stride = Stride(a.out_stride, p.q_heads * d);
  const bool paged = a.kv.block_table != nullptr;
  f.k_stride = paged ? p.kv_heads * d : Stride(a.kv.k_stride, p.kv_heads * d);
  f.v_stride = paged ? p.kv_heads * d : Stride(a.kv.v_stride, p.kv_heads * d);
  f.block_table = a.kv.block_table;
  f.max_pages = a.kv.max_pages;
  f.page_size = static_cast<int>(a.kv.page_size);
  f.num_runs = static_cast<int>(a.runs.size());
  f.kv_tile = static_cast<int>(p.kv_tile);
  f.kv_split = static_cast<int>(p.kv_split);
  f.by_group = gpu::Divider(group), f.by_kv_heads = gpu::Divider(p.kv_heads);
  f.by_q_heads = gpu::Divider(p.q_heads), f.by_kv_split = gpu::Divider(p.kv_split);
  f.by_page_size = gpu::Divider(a.kv.page_size);
  // A window longer than every sequence sees everything.
  f.window = static_cast<int>(std::min<int64_t>(p.window, int64_t{1} << 30));
  f.c = ScoreScale(p);
  f.cap = p.softcap;
  f.ratio = p.softcap == 0.0f ? 0.0f : p.scale / p.softcap;

  const bool faulty = AnyFault(ctx.side);
  if (faulty) PlantFaults(ctx, p, a.runs.size(), f);

  const bool prefill = !faulty && gpu::CanPrefill(p, ctx.profile, f);
  const bool decode = !faulty && gpu::CanDecode(p, ctx.profile, f);
  f.decode_rows = decode ? gpu::MaxDecodeRows(f.group) : 0;
  // Only both kernels together serve a mixed call; else one of them may still serve all runs.
  int64_t decode_units = 0, decode_rows = 0, prefill_blocks = 0, generic_blocks = 0, most_keys = 0;
  int64_t decode_runs = 0;
  bool splits = false;
  for (const Run& run : a.runs) {
    const int64_t flat = run.q_rows * group, last = run.position + run.q_rows - 1;
    if (flat == 0) continue;
    generic_blocks += CeilDiv(flat, gpu::kGenericRows);
    if (flat <= f.decode_rows) {
      const int64_t first = p.window == 0 ? 0 : std::max<int64_t>(0, run.position - p.window + 1);
      const int64_t count = last / p.kv_split - first / p.kv_split + 1;
      splits = splits || count > 1;
      decode_units += count * CeilDiv(flat, gpu::kDecodeRows);
      f.decode_blocks += CeilDiv(flat, gpu::kDecodeRows) * p.kv_heads;
      decode_rows += run.q_rows;
      most_keys = std::max(most_keys, last + 1);
      ++decode_runs;
    } else {
      prefill_blocks += CeilDiv(run.q_rows, gpu::PrefillTokens(f.group));
    }
  }
  const bool fast = prefill_blocks == 0 ? decode : prefill;
  if (a.device_runs != nullptr && paged) most_keys = a.kv.max_pages * a.kv.page_size;

  Pieces pieces(ctx);
  Run* room = a.device_runs == nullptr ? pieces.Take<Run>(f.num_runs) : nullptr;
  if (fast) {
    const int64_t slots = PartSlots(p, decode_runs, most_keys);
    f.most_splits = static_cast<int>(MostSplits(p, most_keys));
    f.part_o = pieces.Take<float>(slots * d);
    f.part_rl = pieces.Take<float>(slots * 2);
    splits = splits || (slots > 0 && a.device_runs != nullptr);
  }
  TARE_RETURN_IF_ERROR(pieces.Check("WorkspaceBytes"));
  TARE_ASSIGN_OR_RETURN(f.runs, DeviceRuns(a.device_runs, a.runs, room, ctx.stream));

  std::string kernel;
  const bool sm90 = ctx.profile == Profile::kSm90Mma && p.dtype != DType::kF32;
  if (!fast) {
    kernel = sm90 ? "attention_fwd_generic_sm90" : "attention_fwd_generic_ieee";
    TARE_RETURN_IF_ERROR(gpu::LaunchGeneric(f, p.dtype, sm90, generic_blocks, ctx.stream));
  } else {
    if (prefill_blocks > 0) {
      kernel = "attention_fwd_wgmma";
      const int64_t kv_rows = paged ? a.kv.num_pages * a.kv.page_size : a.kv.rows;
      TARE_RETURN_IF_ERROR(gpu::LaunchPrefill(f, kv_rows, prefill_blocks, ctx.stream));
    }
    if (decode_units > 0) {
      kernel += kernel.empty() ? "attention_fwd_decode" : "+decode";
      TARE_RETURN_IF_ERROR(gpu::LaunchDecode(f, decode_units * p.kv_heads,
                                             splits ? decode_rows * p.q_heads : 0, ctx.stream));
    }
  }
  if (ctx.trace != nullptr) {
    ctx.trace->Record(
        {"attention", kernel,
         fmt::format("kv_tile={} kv_split={} {} prefill_blocks={} decode_items={}", p.kv_tile,
                     p.kv_split, paged ? fmt::format("page={}", a.kv.page_size) : "packed",
                     fast ? prefill_blocks : 0, fast ? decode_units : 0),
         std::string(DTypeName(p.dtype)),
         fmt::format("rows={} runs={} heads={}/{} d={}", a.tokens, a.runs.size(), p.q_heads,
                     p.kv_heads, d)});
  }
  return Ok();
}

Status BackwardCuda(const Ctx& ctx, const Params& p, const BackwardArgs& a) {
  TARE_RETURN_IF_ERROR(CheckSizes(p, a.tokens, a.runs));
  const int64_t d = p.head_dim, wide = p.q_heads * d, narrow = p.kv_heads * d;
  gpu::Backward b = {};
  b.q_heads = static_cast<int>(p.q_heads);
  b.kv_heads = static_cast<int>(p.kv_heads);
  b.head_dim = static_cast<int>(d);
  b.group = static_cast<int>(p.q_heads / p.kv_heads);
  b.tokens = static_cast<int>(a.tokens);
  b.q = a.q, b.k = a.k, b.v = a.v, b.out = a.out, b.dout = a.dout;
  b.lse2 = a.lse2;
  b.sink = a.sink;
  b.dq = a.dq, b.dk = a.dk, b.dv = a.dv;
  b.dsink = a.dsink;
  b.q_stride = Stride(a.q_stride, wide), b.out_stride = Stride(a.out_stride, wide);
  b.dout_stride = Stride(a.dout_stride, wide), b.dq_stride = Stride(a.dq_stride, wide);
  b.k_stride = Stride(a.k_stride, narrow), b.v_stride = Stride(a.v_stride, narrow);
  b.dk_stride = Stride(a.dk_stride, narrow), b.dv_stride = Stride(a.dv_stride, narrow);
  b.num_runs = static_cast<int>(a.runs.size());
  b.window = static_cast<int>(std::min<int64_t>(p.window, int64_t{1} << 30));
  b.unit_rows = static_cast<int>(std::min<int64_t>(p.unit_rows, int64_t{1} << 30));
  b.c = ScoreScale(p);
  b.scale = p.scale;
  b.cap = p.softcap;
  b.ratio = p.softcap == 0.0f ? 0.0f : p.scale / p.softcap;
  const bool faulty = AnyFault(ctx.side);
  if (fault::Active(kWindowOffByOne, ctx.side) && b.window != 0) ++b.window;
  if (fault::Active(kSoftcapMissing, ctx.side) && b.cap != 0.0f) {
    b.cap = b.ratio = 0.0f;
    b.c = p.scale * kLog2e;
  }
  b.kv_fp8 = fault::Active(kKvFp8, ctx.side);
  const bool sink_gradient = p.sink && !fault::Active(kSinkMissing, ctx.side) &&
                             !fault::Active(kSinkGradientMissing, ctx.side);
  Pieces pieces(ctx);
  Run* room = a.device_runs == nullptr ? pieces.Take<Run>(b.num_runs) : nullptr;
  b.delta = pieces.Take<float>(a.tokens * p.q_heads);
  b.lse_t = pieces.Take<float>(a.tokens * p.q_heads);
  const bool fast = !faulty && gpu::CanBackward(p, ctx.profile, b, a.kv_rows);
  if (fast) {
    b.head_k = pieces.Take<float>(a.tokens * wide);
    b.head_v = pieces.Take<float>(a.tokens * wide);
  }
  TARE_RETURN_IF_ERROR(pieces.Check("BackwardWorkspaceBytes"));
  TARE_ASSIGN_OR_RETURN(b.runs, DeviceRuns(a.device_runs, a.runs, room, ctx.stream));
  const bool sm90 = ctx.profile == Profile::kSm90Mma && p.dtype != DType::kF32;
  int64_t blocks = 0, keys = 0;
  for (const Run& run : a.runs) {
    blocks += CeilDiv(run.q_rows, fast ? gpu::kBackwardKeys : 16);
    keys += run.q_rows;
  }
  TARE_RETURN_IF_ERROR(gpu::LaunchDelta(b, p.dtype, ctx.stream));
  if (fast) {
    TARE_RETURN_IF_ERROR(gpu::LaunchBackward(b, a.kv_rows, blocks, keys, ctx.stream));
  } else {
    TARE_RETURN_IF_ERROR(gpu::LaunchBackwardGeneric(b, p.dtype, sm90, blocks, blocks, ctx.stream));
  }
  if (sink_gradient) TARE_RETURN_IF_ERROR(gpu::LaunchSinkGradient(b, ctx.stream));
  if (ctx.trace != nullptr) {
    ctx.trace->Record({"attention.bwd",
                       fast   ? "attention_bwd_wgmma"
                       : sm90 ? "attention_bwd_generic_sm90"
                              : "attention_bwd_generic_ieee",
                       fast ? "keys=128x64 rows=128x128" : "tile=16x16",
                       std::string(DTypeName(p.dtype)),
                       fmt::format("rows={} runs={} heads={}/{} d={}", a.tokens, a.runs.size(),
                                   p.q_heads, p.kv_heads, d)});
  }
  return Ok();
}

}  // namespace tare::ops::attention
