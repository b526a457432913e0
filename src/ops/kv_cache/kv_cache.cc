#include "ops/kv_cache/kv_cache.h"

#include <cstring>

#include "ops/linear/gemm.h"
#include "ops/trace.h"
#include "tensor/convert.h"

namespace tare::ops::kv_cache {
namespace {

// Exponent all ones, in place: infinity or NaN.
bool NonFinite16(const uint16_t* v, int64_t n, uint16_t mask) {
  bool bad = false;
  for (int64_t i = 0; i < n; ++i) bad |= (v[i] & mask) == mask;
  return bad;
}

bool NonFinite(const void* row, DType dtype, int64_t at, int64_t n) {
  if (dtype == DType::kF32) {
    const uint32_t* v = static_cast<const uint32_t*>(row) + at;
    bool bad = false;
    for (int64_t i = 0; i < n; ++i) bad |= (v[i] & 0x7f800000u) == 0x7f800000u;
    return bad;
  }
  return NonFinite16(static_cast<const uint16_t*>(row) + at, n,
                     dtype == DType::kBF16 ? 0x7f80 : 0x7c00);
}

Status CheckArgs(const Ctx& ctx, const Params& p, const Args& a) {
  if (p.kv_heads <= 0 || p.head_dim <= 0) {
    return InvalidArgument("kv_cache: {} heads of {}; both must be positive", p.kv_heads,
                           p.head_dim);
  }
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16 && p.dtype != DType::kF32) {
    return InvalidArgument("kv_cache: dtype {}; it must be bf16, f16 or f32", DTypeName(p.dtype));
  }
  const int64_t row = p.kv_heads * p.head_dim;
  for (const auto& [field, stride] :
       {std::pair("k_stride", a.k_stride), std::pair("v_stride", a.v_stride)}) {
    if (stride != 0 && stride < row) {
      return InvalidArgument("kv_cache: {} {}; it must be 0 or at least {}", field, stride, row);
    }
  }
  if (a.page_size < 1 || a.num_pages < 0 || a.max_pages < 0 || a.table_rows < 0 || a.tokens < 0) {
    return InvalidArgument(
        "kv_cache: page_size {}, num_pages {}, block table [{}, {}], tokens {}; page_size must be "
        "at "
        "least 1 and the others not negative",
        a.page_size, a.num_pages, a.table_rows, a.max_pages, a.tokens);
  }
  int64_t rows = 0;
  for (size_t i = 0; i < a.runs.size(); ++i) {
    const attention::Run& r = a.runs[i];
    if (r.q_rows < 0 || r.q_begin < 0 || r.q_begin > a.tokens || r.q_rows > a.tokens - r.q_begin) {
      return InvalidArgument(
          "kv_cache: run {} has rows [{}, {} + {}); they must lie inside [0, {})", i, r.q_begin,
          r.q_begin, r.q_rows, a.tokens);
    }
    if (r.q_rows == 0) continue;
    rows += r.q_rows;
    if (r.position < 0 || r.position > (int64_t{1} << 30) - r.q_rows) {
      return InvalidArgument(
          "kv_cache: run {} starts at position {}; positions must lie in [0, 2^30)", i, r.position);
    }
    const int64_t last = (r.position + r.q_rows - 1) / a.page_size;
    if (r.block_row < 0 || r.block_row >= a.table_rows || last >= a.max_pages) {
      return InvalidArgument("kv_cache: run {} needs page {} of row {} in a block table [{}, {}]",
                             i, last, r.block_row, a.table_rows, a.max_pages);
    }
    if (ctx.device != Device::kCpu || a.block_table == nullptr) continue;
    for (int64_t j = r.position / a.page_size; j <= last; ++j) {
      const int32_t page = a.block_table[r.block_row * a.max_pages + j];
      if (page < 0 || page >= a.num_pages) {
        return InvalidArgument("kv_cache: block_table[{}][{}] is {}; pages are [0, {})",
                               r.block_row, j, page, a.num_pages);
      }
    }
  }
  if (rows == 0) return Ok();
  for (const auto& [field, pointer] : {std::pair<const char*, const void*>("k", a.k),
                                       {"v", a.v},
                                       {"block_table", a.block_table},
                                       {"k_pages", a.k_pages},
                                       {"v_pages", a.v_pages}}) {
    if (pointer == nullptr) return InvalidArgument("kv_cache: {} is null", field);
  }
  return Ok();
}

}  // namespace

Status Forward(const Ctx& ctx, const Params& p, const Args& a) {
  TARE_RETURN_IF_ERROR(CheckArgs(ctx, p, a));
#ifdef TARE_WITH_CUDA
  if (ctx.device == Device::kCuda) return ForwardCuda(ctx, p, a);
#endif
  if (ctx.device != Device::kCpu) return Unsupported("kv_cache: this build has no CUDA part");
  const int64_t row = p.kv_heads * p.head_dim, size = SizeOf(p.dtype);
  const int64_t k_stride = a.k_stride == 0 ? row : a.k_stride,
                v_stride = a.v_stride == 0 ? row : a.v_stride;
  // All rows are looked at before the first is written: a refused call leaves the cache as it was.
  for (const attention::Run& r : a.runs) {
    for (int64_t t = r.q_begin; t < r.q_begin + r.q_rows; ++t) {
      for (const auto& [name, data, stride] :
           {std::tuple("K", a.k, k_stride), std::tuple("V", a.v, v_stride)}) {
        if (!NonFinite(data, p.dtype, t * stride, row)) continue;
        int64_t x = 0;
        while (!NonFinite(data, p.dtype, t * stride + x, 1)) ++x;
        return InvalidArgument(
            "kv_cache: {} of row {}, head {}, element {} is {}; only finite values enter the cache",
            name, t, x / p.head_dim, x % p.head_dim,
            static_cast<double>(gemm::LoadAsF32(data, p.dtype, t * stride + x)));
      }
    }
  }
  const bool local = fault::Active(kChunkLocalPosition, ctx.side);
  const bool fp8 = fault::Active(kWriteFp8, ctx.side);
  int64_t rows = 0;
  for (const attention::Run& r : a.runs) {
    rows += r.q_rows;
    for (int64_t t = 0; t < r.q_rows; ++t) {
      const int64_t key = (local ? 0 : r.position) + t;
      const int64_t page = a.block_table[r.block_row * a.max_pages + key / a.page_size];
      const int64_t to = (page * a.page_size + key % a.page_size) * row * size;
      const auto bytes = static_cast<size_t>(row * size);
      std::memcpy(static_cast<uint8_t*>(a.k_pages) + to,
                  static_cast<const uint8_t*>(a.k) + (r.q_begin + t) * k_stride * size, bytes);
      std::memcpy(static_cast<uint8_t*>(a.v_pages) + to,
                  static_cast<const uint8_t*>(a.v) + (r.q_begin + t) * v_stride * size, bytes);
      if (!fp8) continue;
      for (void* pages : {a.k_pages, a.v_pages}) {
        for (int64_t x = to / size; x < to / size + row; ++x) {
          const float v = gemm::LoadAsF32(pages, p.dtype, x);
          gemm::StoreRounded(pages, p.dtype, x, E4m3ToF32(F32ToE4m3(v)));
        }
      }
    }
  }
  if (ctx.trace != nullptr) {
    ctx.trace->Record({"kv_cache", "kv_cache_write", fmt::format("page={}", a.page_size),
                       std::string(DTypeName(p.dtype)), fmt::format("rows={}", rows)});
  }
  return Ok();
}

}  // namespace tare::ops::kv_cache
