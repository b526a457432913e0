#include "ops/attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "numerics/fp.h"
#include "ops/attention/attention_kernels.h"
#include "ops/attention/attention_plain.h"
#include "ops/linear/gemm_kernels.h"
#include "ops/trace.h"

namespace tare::ops::attention {
namespace {

Status CheckStride(std::string_view field, int64_t stride, int64_t row) {
  if (stride == 0 || stride >= row) return Ok();
  return InvalidArgument("attention: {} {}; it must be 0 or at least the row of {} elements", field,
                         stride, row);
}

Status CheckPointer(std::string_view field, const void* pointer) {
  if (pointer != nullptr) return Ok();
  return InvalidArgument("attention: {} is null", field);
}

Status CheckRuns(std::span<const Run> runs, int64_t tokens) {
  std::vector<std::pair<int64_t, int64_t>> spans;
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& r = runs[i];
    if (r.q_rows < 0 || r.q_begin < 0 || r.q_begin > tokens || r.q_rows > tokens - r.q_begin) {
      return InvalidArgument(
          "attention: run {} has rows [{}, {} + {}); they must lie inside [0, {})", i, r.q_begin,
          r.q_begin, r.q_rows, tokens);
    }
    if (r.position < 0 || r.position > (int64_t{1} << 30) - r.q_rows) {
      return InvalidArgument(
          "attention: run {} starts at position {}; positions must lie in [0, 2^30)", i,
          r.position);
    }
    if (r.q_rows > 0) spans.emplace_back(r.q_begin, r.q_begin + r.q_rows);
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) {
      return InvalidArgument("attention: two runs share row {}; every row belongs to one",
                             spans[i].first);
    }
  }
  return Ok();
}

Status CheckPacked(std::span<const Run> runs, int64_t rows) {
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& r = runs[i];
    const int64_t keys = r.position + r.q_rows;
    if (r.kv_begin < 0 || r.kv_begin > rows || keys > rows - r.kv_begin) {
      return InvalidArgument(
          "attention: run {} reads K rows [{}, {} + {}); the packed buffer has {}", i, r.kv_begin,
          r.kv_begin, keys, rows);
    }
  }
  return Ok();
}

Status CheckPages(const KvSource& kv, std::span<const Run> runs, bool read_table) {
  if (kv.page_size < 1 || kv.num_pages < 0 || kv.max_pages < 0 || kv.table_rows < 0) {
    return InvalidArgument(
        "attention: page_size {}, num_pages {}, block table [{}, {}]; page_size must be at least 1 "
        "and the others not negative",
        kv.page_size, kv.num_pages, kv.table_rows, kv.max_pages);
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& r = runs[i];
    if (r.q_rows == 0) continue;
    const int64_t pages = (r.position + r.q_rows + kv.page_size - 1) / kv.page_size;
    if (r.block_row < 0 || r.block_row >= kv.table_rows || pages > kv.max_pages) {
      return InvalidArgument("attention: run {} needs {} pages in row {} of a block table [{}, {}]",
                             i, pages, r.block_row, kv.table_rows, kv.max_pages);
    }
    if (!read_table) continue;
    for (int64_t j = 0; j < pages; ++j) {
      const int32_t page = kv.block_table[r.block_row * kv.max_pages + j];
      if (page < 0 || page >= kv.num_pages) {
        return InvalidArgument("attention: block_table[{}][{}] is {}; pages are [0, {})",
                               r.block_row, j, page, kv.num_pages);
      }
    }
  }
  return Ok();
}

// A piece of work of the forward: some rows of a run for one KV head; or, of a run of one row, one
// split.
struct Block {
  const Run* run;
  int64_t kv_head;
  int64_t flat0;
  int64_t lanes;
  int64_t cost;
  int64_t split = -1;  // decode: this one; else -1
  size_t decode = 0;   // and whose
};

// The splits of one row and KV head. Whoever finishes the last one joins them, in order.
struct Decode {
  Decode(int64_t first, int64_t count) : first_split(first), splits(count), left(count) {}
  int64_t first_split, splits;
  float* sums = nullptr;  // splits x DecodeSplitFloats
  std::atomic<int64_t> left;
};

void ForwardFast(const Ctx& ctx, const Params& p, const Args& a, bool sm90) {
  const int64_t group = p.q_heads / p.kv_heads;
  const bool decodes = !sm90 && p.dtype != DType::kF16;
  std::vector<Block> blocks;
  std::deque<Decode> decode;  // an atomic does not move
  int64_t floats = 0;
  for (const Run& run : a.runs) {
    if (decodes && run.q_rows == 1) {
      const int64_t low = p.window == 0 ? 0 : std::max<int64_t>(0, run.position - p.window + 1);
      const int64_t first = low / p.kv_split, count = run.position / p.kv_split + 1 - first;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t split = first + i;
        const int64_t keys = std::min((split + 1) * p.kv_split, run.position + 1) -
                             std::max(split * p.kv_split, low);
        // The heads of a split side by side: their keys lie in the same pages.
        for (int64_t kv = 0; kv < p.kv_heads; ++kv) {
          blocks.push_back(
              {&run, kv, 0, group, keys * group, split, decode.size() + static_cast<size_t>(kv)});
        }
      }
      for (int64_t kv = 0; kv < p.kv_heads; ++kv) {
        decode.emplace_back(first, count);
        floats += count * DecodeSplitFloats(p);
      }
      continue;
    }
    const int64_t flat = run.q_rows * group;
    for (int64_t f = 0; f < flat; f += kMaxLanes) {
      const int64_t lanes = std::min(kMaxLanes, flat - f);
      const int64_t last = run.position + (f + lanes - 1) / group + 1;
      for (int64_t kv = 0; kv < p.kv_heads; ++kv) {
        blocks.push_back({&run, kv, f, lanes,
                          (p.window == 0 ? last : std::min(last, p.window + lanes)) * lanes});
      }
    }
  }
  const std::unique_ptr<float, void (*)(void*)> sums(
      floats == 0 ? nullptr
                  : static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(floats) * 4)),
      std::free);
  float* next = sums.get();
  for (Decode& d : decode) {
    d.sums = next;
    next += d.splits * DecodeSplitFloats(p);
  }
  // The longest first, so that threads end together.
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const Block& x, const Block& y) { return x.cost > y.cost; });
  ctx.pool->ParallelFor(static_cast<int64_t>(blocks.size()), [&](int64_t i) {
    const Block& b = blocks[static_cast<size_t>(i)];
    if (b.split < 0) {
      ForwardBlock(p, a, *b.run, b.kv_head, b.flat0, b.lanes, sm90);
      return;
    }
    Decode& d = decode[b.decode];
    DecodeSplit(p, a, *b.run, b.kv_head, b.split,
                d.sums + (b.split - d.first_split) * DecodeSplitFloats(p));
    if (d.left.fetch_sub(1, std::memory_order_acq_rel) == 1)
      DecodeJoin(p, a, *b.run, b.kv_head, d.splits, d.sums);
  });
}

}  // namespace

Status Check(const Params& p) {
  if (p.q_heads <= 0 || p.kv_heads <= 0 || p.q_heads % p.kv_heads != 0) {
    return InvalidArgument(
        "attention: {} query heads over {} KV heads; the second must divide the first", p.q_heads,
        p.kv_heads);
  }
  if (p.head_dim <= 0 || p.head_dim % 16 != 0 || p.head_dim > 256) {
    return InvalidArgument("attention: head_dim {}; it must be a multiple of 16, at most 256",
                           p.head_dim);
  }
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16 && p.dtype != DType::kF32) {
    return InvalidArgument("attention: dtype {}; it must be bf16, f16 or f32", DTypeName(p.dtype));
  }
  if (!(p.scale > 0.0f) || p.scale > 1e30f) {
    return InvalidArgument("attention: scale {}; it must be positive and finite", p.scale);
  }
  if (!(p.softcap >= 0.0f) || p.softcap > 1e30f) {
    return InvalidArgument("attention: softcap {}; it must be 0 (none) or positive and finite",
                           p.softcap);
  }
  if (p.window < 0)
    return InvalidArgument("attention: window {}; it must be 0 (none) or positive", p.window);
  if (p.kv_tile != 64 && p.kv_tile != 128) {
    return InvalidArgument("attention: kv_tile {}; it must be 64 or 128", p.kv_tile);
  }
  if (p.kv_split < 256 || p.kv_split > 2048 || p.kv_split % p.kv_tile != 0) {
    return InvalidArgument(
        "attention: kv_split {}; it must be a multiple of kv_tile {} in [256, 2048]", p.kv_split,
        p.kv_tile);
  }
  if (p.unit_rows <= 0 || p.unit_rows % 16 != 0) {
    return InvalidArgument("attention: unit_rows {}; it must be a positive multiple of 16",
                           p.unit_rows);
  }
  return Ok();
}

size_t WorkspaceBytes(const Ctx& ctx, const Params& params, int64_t tokens, int64_t runs,
                      int64_t max_keys) {
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return WorkspaceBytesCuda(ctx, params, tokens, runs, max_keys);
#endif
  (void)ctx, (void)params, (void)tokens, (void)runs, (void)max_keys;
  return 0;
}

size_t BackwardWorkspaceBytes(const Ctx& ctx, const Params& params, int64_t tokens, int64_t runs,
                              int64_t max_keys) {
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda)
    return BackwardWorkspaceBytesCuda(ctx, params, tokens, runs, max_keys);
#endif
  (void)ctx, (void)params, (void)tokens, (void)runs, (void)max_keys;
  return 0;
}

Status Forward(const Ctx& ctx, const Params& p, const Args& a) {
  TARE_RETURN_IF_ERROR(Check(p));
  if (a.tokens < 0)
    return InvalidArgument("attention: tokens {}; it must not be negative", a.tokens);
  TARE_RETURN_IF_ERROR(CheckRuns(a.runs, a.tokens));
  TARE_RETURN_IF_ERROR(CheckStride("q_stride", a.q_stride, p.q_heads * p.head_dim));
  TARE_RETURN_IF_ERROR(CheckStride("out_stride", a.out_stride, p.q_heads * p.head_dim));
  TARE_RETURN_IF_ERROR(CheckStride("k_stride", a.kv.k_stride, p.kv_heads * p.head_dim));
  TARE_RETURN_IF_ERROR(CheckStride("v_stride", a.kv.v_stride, p.kv_heads * p.head_dim));
  int64_t rows = 0;
  for (const Run& r : a.runs) rows += r.q_rows;
  if (rows == 0) return Ok();
  TARE_RETURN_IF_ERROR(CheckPointer("q", a.q));
  TARE_RETURN_IF_ERROR(CheckPointer("k", a.kv.k));
  TARE_RETURN_IF_ERROR(CheckPointer("v", a.kv.v));
  TARE_RETURN_IF_ERROR(CheckPointer("out", a.out));
  if (p.sink != (a.sink != nullptr)) {
    return InvalidArgument("attention: sink pointer is {} but params.sink is {}",
                           a.sink ? "given" : "null", p.sink);
  }
  if (a.kv.block_table == nullptr) {
    TARE_RETURN_IF_ERROR(CheckPacked(a.runs, a.kv.rows));
  } else {
    TARE_RETURN_IF_ERROR(CheckPages(a.kv, a.runs, ctx.device == Device::kCpu));
  }
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return ForwardCuda(ctx, p, a);
#endif
  if (ctx.device != Device::kCpu) return Unsupported("attention: this build has no CUDA part");
  if (ctx.pool == nullptr) return InvalidArgument("attention: ctx.pool is null; the CPU needs one");

  const Params params = ctx.batch_invariance == BatchInvariance::kOn ? p : NativeParams(p, a.runs);
  const bool sm90 = ctx.batch_invariance == BatchInvariance::kOn &&
                    ctx.profile == Profile::kSm90Mma && p.dtype != DType::kF32;
  const char* kernel = sm90 ? "attention_fwd_sm90" : "attention_fwd_ieee";
  if (AnyFault(ctx.side)) {
    kernel = "attention_fwd_plain";
    TARE_RETURN_IF_ERROR(PlainForward(ctx, params, a));
  } else {
    ForwardFast(ctx, params, a, sm90);
  }
  if (ctx.trace != nullptr) {
    ctx.trace->Record(
        {"attention", fmt::format("{}_{}", kernel, gemm::SimdTargetName()),
         fmt::format("kv_tile={} kv_split={} {}", params.kv_tile, params.kv_split,
                     a.kv.block_table == nullptr ? std::string("packed")
                                                 : fmt::format("page={}", a.kv.page_size)),
         std::string(DTypeName(p.dtype)),
         fmt::format("rows={} runs={} heads={}/{} d={}", rows, a.runs.size(), p.q_heads, p.kv_heads,
                     p.head_dim)});
  }
  return Ok();
}

namespace {

// A task is one KV head with its query heads, which hands dK and dV on without a buffer. Where
// these are too few to end together a task is one query head; the sums of a KV head's query heads
// are then added in the order in which one task adds them.
void BackwardTasks(ThreadPool& pool, const Params& p, const BackwardArgs& a,
                   const std::function<float*(size_t run)>& dsink_units, bool sm90) {
  constexpr int64_t kMostFloats = int64_t{32} << 20;  // of all query heads' dK and dV together
  const int64_t group = p.q_heads / p.kv_heads, runs = std::ssize(a.runs);
  std::vector<int64_t> begin(a.runs.size() + 1, 0);  // of a run's rows
  for (size_t i = 0; i < a.runs.size(); ++i) begin[i + 1] = begin[i] + a.runs[i].q_rows;
  const int64_t floats = begin.back() * p.q_heads * p.head_dim;
  if (pool.threads() == 1 || group == 1 || runs * p.kv_heads >= 4 * pool.threads() ||
      2 * floats > kMostFloats) {
    pool.ParallelFor(runs * p.kv_heads, [&](int64_t i) {
      static thread_local std::vector<float> sums;
      const auto run = static_cast<size_t>(i / p.kv_heads);
      const int64_t n = a.runs[run].q_rows * p.head_dim, kv_head = i % p.kv_heads;
      if (n == 0) return;
      if (std::ssize(sums) < 2 * n) sums.resize(static_cast<size_t>(2 * n));
      float *dk = sums.data(), *dv = dk + n;
      BackwardHeads(p, a, a.runs[run], kv_head * group, (kv_head + 1) * group, dk, dv,
                    dsink_units(run), sm90);
      StoreKv(p, a, a.runs[run], kv_head, dk, dv);
    });
    return;
  }
  static thread_local std::vector<float> all;  // kept: pages are dear beside a short sequence
  if (std::ssize(all) < 2 * floats) all.resize(static_cast<size_t>(2 * floats));
  float* const sums = all.data();
  const auto dk_of = [&](size_t run, int64_t h) {
    return sums + 2 * p.head_dim * (begin[run] * p.q_heads + h * a.runs[run].q_rows);
  };
  pool.ParallelFor(runs * p.q_heads, [&](int64_t i) {
    const auto run = static_cast<size_t>(i / p.q_heads);
    const int64_t n = a.runs[run].q_rows * p.head_dim, h = i % p.q_heads;
    if (n == 0) return;
    float* dk = dk_of(run, h);
    BackwardHeads(p, a, a.runs[run], h, h + 1, dk, dk + n, dsink_units(run), sm90);
  });
  pool.ParallelFor(runs * p.kv_heads, [&](int64_t i) {
    const auto run = static_cast<size_t>(i / p.kv_heads);
    const int64_t n = a.runs[run].q_rows * p.head_dim, first = i % p.kv_heads * group;
    if (n == 0) return;
    float* dk = dk_of(run, first);
    for (int64_t h = first + 1; h < first + group; ++h) {
      const float* more = dk_of(run, h);
      for (int64_t x = 0; x < 2 * n; ++x) dk[x] += more[x];
    }
    StoreKv(p, a, a.runs[run], i % p.kv_heads, dk, dk + n);
  });
}

}  // namespace

Status Backward(const Ctx& ctx, const Params& p, const BackwardArgs& a) {
  TARE_RETURN_IF_ERROR(Check(p));
  if (a.tokens < 0)
    return InvalidArgument("attention: tokens {}; it must not be negative", a.tokens);
  TARE_RETURN_IF_ERROR(CheckRuns(a.runs, a.tokens));
  TARE_RETURN_IF_ERROR(CheckPacked(a.runs, a.kv_rows));
  for (size_t i = 0; i < a.runs.size(); ++i) {
    if (a.runs[i].position != 0) {
      return InvalidArgument(
          "attention: run {} starts at position {}; a backward needs whole sequences (0)", i,
          a.runs[i].position);
    }
  }
  const int64_t wide = p.q_heads * p.head_dim, narrow = p.kv_heads * p.head_dim;
  for (const auto& [field, stride, row] :
       {std::tuple("q_stride", a.q_stride, wide), std::tuple("out_stride", a.out_stride, wide),
        std::tuple("dout_stride", a.dout_stride, wide), std::tuple("dq_stride", a.dq_stride, wide),
        std::tuple("k_stride", a.k_stride, narrow), std::tuple("v_stride", a.v_stride, narrow),
        std::tuple("dk_stride", a.dk_stride, narrow),
        std::tuple("dv_stride", a.dv_stride, narrow)}) {
    TARE_RETURN_IF_ERROR(CheckStride(field, stride, row));
  }
  int64_t rows = 0;
  for (const Run& r : a.runs) rows += r.q_rows;
  if (rows == 0) return Ok();
  for (const auto& [field, pointer] : {std::pair<const char*, const void*>("q", a.q),
                                       {"k", a.k},
                                       {"v", a.v},
                                       {"out", a.out},
                                       {"lse2", a.lse2},
                                       {"dout", a.dout},
                                       {"dq", a.dq},
                                       {"dk", a.dk},
                                       {"dv", a.dv}}) {
    TARE_RETURN_IF_ERROR(CheckPointer(field, pointer));
  }
  if (p.sink != (a.sink != nullptr) || p.sink != (a.dsink != nullptr)) {
    return InvalidArgument(
        "attention: sink and dsink must be given exactly when params.sink ({}) is set", p.sink);
  }
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return BackwardCuda(ctx, p, a);
#endif
  if (ctx.device != Device::kCpu) return Unsupported("attention: this build has no CUDA part");
  if (ctx.pool == nullptr) return InvalidArgument("attention: ctx.pool is null; the CPU needs one");
  const bool sm90 = ctx.profile == Profile::kSm90Mma && p.dtype != DType::kF32;
  const char* kernel = sm90 ? "attention_bwd_sm90" : "attention_bwd_ieee";
  if (AnyFault(ctx.side)) {
    kernel = "attention_bwd_plain";
    TARE_RETURN_IF_ERROR(PlainBackward(ctx, p, a));
  } else {
    std::vector<int64_t> unit_begin(a.runs.size() + 1, 0);
    for (size_t i = 0; i < a.runs.size(); ++i) {
      unit_begin[i + 1] = unit_begin[i] + (a.runs[i].q_rows + p.unit_rows - 1) / p.unit_rows;
    }
    std::vector<float> dsink(p.sink ? static_cast<size_t>(unit_begin.back() * p.q_heads) : 0);
    const auto units = [&](size_t run) {
      return p.sink ? dsink.data() + unit_begin[run] * p.q_heads : nullptr;
    };
    BackwardTasks(*ctx.pool, p, a, units, sm90);
    if (p.sink) {
      for (int64_t u = 0; u < unit_begin.back(); ++u) {
        for (int64_t h = 0; h < p.q_heads; ++h) {
          a.dsink[h] =
              numerics::Canonical(a.dsink[h] + dsink[static_cast<size_t>(u * p.q_heads + h)]);
        }
      }
    }
  }
  if (ctx.trace != nullptr) {
    ctx.trace->Record({"attention.bwd", fmt::format("{}_{}", kernel, gemm::SimdTargetName()),
                       "tile=64x64", std::string(DTypeName(p.dtype)),
                       fmt::format("rows={} runs={} heads={}/{} d={}", rows, a.runs.size(),
                                   p.q_heads, p.kv_heads, p.head_dim)});
  }
  return Ok();
}

}  // namespace tare::ops::attention
