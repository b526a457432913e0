#pragma once

// kv_cache: writes the K and V rows of a ragged batch of token runs into pages.
//
// A copy, bit for bit. A non-finite K or V is an error here, where it enters the cache, so that
// attention never multiplies a masked weight by an infinity.

#include <cstdint>
#include <span>

#include "base/status.h"
#include "ops/attention/attention.h"
#include "ops/contract.h"
#include "ops/op.h"

namespace tare::ops::kv_cache {

TARE_FAULT(kChunkLocalPosition, "kv_cache.chunk_local_position", "kv_cache", "C3",
           "rows of a run are written from position 0 on, wherever the run starts");
TARE_FAULT(kWriteFp8, "kv_cache.write_fp8", "kv_cache", "C3,C5",
           "K and V are rounded to e4m3 as they are written");

struct Params {
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  DType dtype = DType::kBF16;  // bf16, f16 or f32
};

struct Args {
  const void* k = nullptr;  // [T, kv_heads, head_dim], rows k_stride elements apart
  const void* v = nullptr;
  int64_t k_stride = 0;  // 0: kv_heads * head_dim
  int64_t v_stride = 0;
  std::span<const attention::Run> runs;         // q_begin, q_rows, position, block_row are read
  const attention::Run* device_runs = nullptr;  // CUDA: the same on the device, or null
  const int32_t* block_table = nullptr;         // [table_rows, max_pages] on ctx.device
  int64_t tokens = 0;                           // T
  int64_t table_rows = 0;
  int64_t max_pages = 0;
  int64_t num_pages = 0;
  int64_t page_size = 0;
  void* k_pages = nullptr;  // [num_pages, page_size, kv_heads, head_dim]
  void* v_pages = nullptr;
  // CUDA: set to 1 on the device when a value is not finite (may be null: not checked there). The
  // CPU returns kInvalidArgument that names row, head and element, and writes nothing.
  int32_t* nonfinite_flag = nullptr;
};

Contract ContractOf(const Params& params);
Status Forward(const Ctx& ctx, const Params& params, const Args& args);

#ifdef TARE_WITH_CUDA
Status ForwardCuda(const Ctx& ctx, const Params& params, const Args& args);
#endif

}  // namespace tare::ops::kv_cache
