// The contract and the registry entry of kv_cache. The suite writes one sequence from position 0 on
// into pages in order, so that row t of the pages is row t of the call; scattered pages, chunks and
// neighbours are in kv_cache_test.cc.

#include "ops/info.h"
#include "ops/kv_cache/kv_cache.h"

namespace tare::ops::kv_cache {
namespace {

Params ParamsOf(const OpKey& key) {
  return {.kv_heads = key.dim("kv_heads"), .head_dim = key.dim("head_dim"), .dtype = key.dtype};
}

Signature SignatureOf(const OpKey& key, int64_t rows) {
  const Params p = ParamsOf(key);
  const Shape shape = {rows, p.kv_heads, p.head_dim};
  Signature s;
  s.inputs = {RowOperand("k", p.dtype, shape), RowOperand("v", p.dtype, shape)};
  s.inputs[0].finite = s.inputs[1].finite = true;
  s.outputs = {RowOperand("k_pages", p.dtype, shape), RowOperand("v_pages", p.dtype, shape)};
  return s;
}

Status CallForward(const Ctx& ctx, const OpKey& key, const ForwardCall& call) {
  const int64_t page_size = key.dim("page_size");
  const int64_t pages = (call.rows + page_size - 1) / page_size;
  std::vector<int32_t> table(static_cast<size_t>(pages));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  const attention::Run run{.q_rows = call.rows};
  Args a;
  a.k = call.in[0].data();
  a.v = call.in[1].data();
  a.runs = {&run, 1};
  a.block_table = table.data();
  a.tokens = call.rows;
  a.table_rows = 1;
  a.max_pages = a.num_pages = pages;
  a.page_size = page_size;
  a.k_pages = call.out[0].mutable_data();
  a.v_pages = call.out[1].mutable_data();
  return Forward(ctx, ParamsOf(key), a);
}

}  // namespace

Contract ContractOf(const Params& p) {
  Contract c;
  c.op = "kv_cache";
  c.formula = {"row t of a run is key j = position + t of its sequence",
               "slot(j) = block_table[block_row, j / page_size] * page_size + j mod page_size",
               "k_pages[slot(j)] = k[q_begin + t]; v_pages[slot(j)] = v[q_begin + t]: a copy, bit "
               "for bit"};
  c.constants = {{"kv_heads", std::to_string(p.kv_heads)},
                 {"head_dim", std::to_string(p.head_dim)}};
  c.inputs = {{"k", Name(p.dtype), "[T, kv_heads, head_dim], rows strided"},
              {"v", Name(p.dtype), "[T, kv_heads, head_dim], rows strided"},
              {"block_table", "i32", "[table_rows, max_pages]"}};
  c.outputs = {{"k_pages", Name(p.dtype), "[num_pages, page_size, kv_heads, head_dim]"},
               {"v_pages", Name(p.dtype), "[num_pages, page_size, kv_heads, head_dim]"}};
  c.rounding_points = {"none: values are copied"};
  c.errors = {"a NaN or infinity names row, head and element, and nothing is written",
              "a block table entry outside the pages, a run outside its buffers: by name"};
  c.invariant_over = {"batch", "position in the batch", "chunk", "pages", "threads", "device"};
  c.forward_tolerance = {-60, -1000, "a copy"};
  return c;
}

const OpInfo& Info() {
  static const auto* info = [] {
    auto* op = new OpInfo(RowOpInfo("kv_cache"));
    // The block table of a call below lies on the host; kv_cache_cuda_test.cc tries the CUDA part.
    op->devices = {Device::kCpu};
    op->dtypes = {DType::kBF16, DType::kF16, DType::kF32};
    for (DType dtype : op->dtypes) {
      for (int64_t page_size : {1, 16}) {
        op->keys.push_back({.dtype = dtype,
                            .out_dtype = dtype,
                            .dims = {{"kv_heads", 2}, {"head_dim", 24}, {"page_size", page_size}}});
      }
    }
    op->select = [](const OpKey& key) { return ContractOf(ParamsOf(key)); };
    op->signature = SignatureOf;
    op->forward = CallForward;
    op->width_dim = "head_dim";
    op->propagates_non_finite = false;
    return op;
  }();
  return *info;
}

}  // namespace tare::ops::kv_cache
