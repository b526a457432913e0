// The row operators on a GPU beside the copy bandwidth of the same run.
//
//   rows_cuda_bench bits-small        small shapes of every operator once: for memory checkers
//   rows_cuda_bench table OUT.json    8,192 tokens of Qwen3-8B's shapes (the head: 2,048 tokens)
//
// share = (bytes that must move / time) / copy bandwidth. A byte counts once for a read and once
// for a write; what a cache would serve again (weights, rope tables) counts once.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <vector>

#include "base/env.h"
#include "ops/adamw/adamw.h"
#include "ops/cast/cast.h"
#include "ops/combine/combine.h"
#include "ops/cuda/bench.h"
#include "ops/cuda/bench_kernels.h"
#include "ops/cuda/refusal.h"
#include "ops/dispatch/dispatch.h"
#include "ops/embedding/embedding.h"
#include "ops/gate/gate.h"
#include "ops/headnorm/headnorm.h"
#include "ops/logprob/logprob.h"
#include "ops/quantize/quantize.h"
#include "ops/rmsnorm/rmsnorm.h"
#include "ops/rope/rope.h"
#include "ops/router/router.h"
#include "ops/sampling/sampling.h"
#include "tensor/cuda_status.h"

namespace tare::ops {
namespace {

using cuda::Bench;

// Device memory from one block, zero-filled; what is random is written from the host.
class Pool {
 public:
  Status Create(size_t bytes) {
    TARE_CUDA_RETURN_IF_ERROR(cudaMalloc(&base_, bytes));
    TARE_CUDA_RETURN_IF_ERROR(cudaMemset(base_, 0, bytes));
    size_ = bytes;
    return Ok();
  }
  template <typename T>
  T* Take(int64_t count) {
    void* at = static_cast<char*>(base_) + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    TARE_CHECK(used_ <= size_) << "bench memory";
    return static_cast<T*>(at);
  }
  void Reset() { used_ = 0; }

 private:
  void* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

uint64_t g_state = 88172645463325252u;
uint64_t Next() {
  g_state ^= g_state << 13, g_state ^= g_state >> 7, g_state ^= g_state << 17;
  return g_state;
}
// Bits of values in about (-4, 4): one random block, repeated.
Status FillBf16(uint16_t* p, int64_t count) {
  std::vector<uint16_t> block(static_cast<size_t>(std::min<int64_t>(count, 1 << 20)));
  for (uint16_t& v : block)
    v = static_cast<uint16_t>((Next() & 0x8000) | (0x3c00 + Next() % 0x480));
  for (int64_t at = 0; at < count; at += static_cast<int64_t>(block.size())) {
    const auto n = std::min<int64_t>(count - at, static_cast<int64_t>(block.size()));
    TARE_CUDA_RETURN_IF_ERROR(
        cudaMemcpy(p + at, block.data(), static_cast<size_t>(n) * 2, cudaMemcpyHostToDevice));
  }
  return Ok();
}
Status FillF32(float* p, int64_t count, float low, float high) {
  std::vector<float> block(static_cast<size_t>(std::min<int64_t>(count, 1 << 20)));
  for (float& v : block) v = low + (high - low) * static_cast<float>(Next() >> 40) * 0x1p-24f;
  for (int64_t at = 0; at < count; at += static_cast<int64_t>(block.size())) {
    const auto n = std::min<int64_t>(count - at, static_cast<int64_t>(block.size()));
    TARE_CUDA_RETURN_IF_ERROR(
        cudaMemcpy(p + at, block.data(), static_cast<size_t>(n) * 4, cudaMemcpyHostToDevice));
  }
  return Ok();
}
template <typename T>
Status Upload(T* p, const std::vector<T>& v) {
  TARE_CUDA_RETURN_IF_ERROR(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return Ok();
}

struct Row {
  std::string op, shape;
  double bytes = 0;
  std::function<Status()> call;
  cuda::Timing time{};
};

struct Sizes {
  int64_t tokens, hidden, heads, kv_heads, dim, width, vocab, head_rows, experts, params;
};
constexpr Sizes kLarge = {8192, 4096, 32, 8, 128, 12288, 151936, 2048, 128, int64_t{1} << 27};
constexpr Sizes kSmall = {70, 260, 3, 2, 36, 132, 1030, 9, 16, 5003};

// Every arm. Pointers live as long as the pool.
Result<std::vector<Row>> Rows(Pool& pool, const Sizes& z, cudaStream_t stream) {
  Ctx ctx;
  ctx.device = Device::kCuda;
  ctx.stream = stream;
  std::vector<Row> rows;
  const auto bytes = [](double elements, int size) { return elements * size; };
  const double th = static_cast<double>(z.tokens) * static_cast<double>(z.hidden);
  auto* w = pool.Take<uint16_t>(z.hidden);
  TARE_RETURN_IF_ERROR(FillBf16(w, z.hidden));
  auto* x = pool.Take<uint16_t>(z.tokens * z.hidden);
  auto* residual = pool.Take<uint16_t>(z.tokens * z.hidden);
  auto* y = pool.Take<uint16_t>(z.tokens * z.hidden);
  auto* sum = pool.Take<uint16_t>(z.tokens * z.hidden);
  auto* rstd = pool.Take<float>(z.tokens * z.heads);
  TARE_RETURN_IF_ERROR(FillBf16(x, z.tokens * z.hidden));
  TARE_RETURN_IF_ERROR(FillBf16(residual, z.tokens * z.hidden));
  TARE_RETURN_IF_ERROR(FillF32(rstd, z.tokens * z.heads, 0.5f, 2.0f));
  const std::string t_h = fmt::format("T={} H={} bf16", z.tokens, z.hidden);
  rmsnorm::Params norm;
  norm.hidden = z.hidden;
  norm.add_residual = true;
  rows.push_back({"rmsnorm + residual", t_h, bytes(4 * th, 2), [=] {
                    return rmsnorm::Forward(ctx, norm, {z.tokens, x, residual, w, y, sum, rstd});
                  }});
  auto* dx = pool.Take<float>(z.tokens * z.hidden);
  auto* dy = pool.Take<float>(z.tokens * z.hidden);
  auto* dw = pool.Take<float>(z.hidden);
  TARE_RETURN_IF_ERROR(FillF32(dy, z.tokens * z.hidden, -1.0f, 1.0f));
  rmsnorm::Params norm_back = norm;
  norm_back.grad_dtype = DType::kF32;
  static std::vector<TokenUnit> units;
  units.clear();
  for (int64_t at = 0; at < z.tokens; at += kUnitRows)
    units.push_back({at, std::min(kUnitRows, z.tokens - at)});
  // h, dy and the other gradient once for dx; h and dy once more for dw.
  rows.push_back(
      {"rmsnorm backward", t_h + ", f32 gradients", bytes(2 * th, 2) + bytes(4 * th, 4), [=] {
         rmsnorm::BackwardArgs b;
         b.rows = z.tokens;
         b.h = sum, b.w = w, b.rstd = rstd, b.dy = dy, b.dresidual_out = dx, b.dx = dx;
         b.dw = dw;
         b.units = units;
         return rmsnorm::Backward(ctx, norm_back, b);
       }});
  const int64_t qk_heads = z.heads + z.kv_heads, qkv = (z.heads + 2 * z.kv_heads) * z.dim;
  auto* packed = pool.Take<uint16_t>(z.tokens * qkv);
  TARE_RETURN_IF_ERROR(FillBf16(packed, z.tokens * qkv));
  headnorm::Params head;
  head.heads = z.heads;
  head.head_dim = z.dim;
  const double tq = static_cast<double>(z.tokens * z.heads * z.dim);
  rows.push_back({"headnorm (q of qkv)", fmt::format("T={} {}x{} bf16", z.tokens, z.heads, z.dim),
                  bytes(2 * tq, 2), [=] {
                    headnorm::Args a;
                    a.rows = z.tokens;
                    a.x = packed, a.x_stride = qkv, a.w = w, a.y = packed, a.y_stride = qkv;
                    a.rstd = rstd;
                    return headnorm::Forward(ctx, head, a);
                  }});
  rope::Params rp;
  rp.head_dim = rp.rotary_dim = z.dim;
  TARE_ASSIGN_OR_RETURN(const rope::Table table, rope::BuildTable(rp, z.tokens));
  auto* cos = pool.Take<float>(static_cast<int64_t>(table.cos.size()));
  auto* sin = pool.Take<float>(static_cast<int64_t>(table.sin.size()));
  auto* positions = pool.Take<int32_t>(z.tokens);
  std::vector<int32_t> ascending;
  ascending.reserve(static_cast<size_t>(z.tokens));
  for (int64_t i = 0; i < z.tokens; ++i) ascending.push_back(static_cast<int32_t>(i));
  TARE_RETURN_IF_ERROR(Upload(cos, table.cos));
  TARE_RETURN_IF_ERROR(Upload(sin, table.sin));
  TARE_RETURN_IF_ERROR(Upload(positions, ascending));
  const double tqk = static_cast<double>(z.tokens * qk_heads * z.dim);
  rows.push_back({"rope (q and k of qkv)",
                  fmt::format("T={} {}x{} bf16", z.tokens, qk_heads, z.dim),
                  bytes(2 * tqk, 2) + bytes(static_cast<double>(z.tokens * z.dim), 4), [=] {
                    rope::Args a;
                    a.rows = z.tokens, a.heads = qk_heads, a.positions = positions;
                    a.cos = cos, a.sin = sin, a.table_positions = z.tokens;
                    a.x = packed, a.y = packed, a.x_stride = a.y_stride = qkv;
                    return rope::Forward(ctx, rp, a);
                  }});
  const double tw = static_cast<double>(z.tokens) * static_cast<double>(z.width);
  auto* gate_up = pool.Take<uint16_t>(2 * z.tokens * z.width);
  auto* act = pool.Take<uint16_t>(z.tokens * z.width);
  auto* dgate_up = pool.Take<uint16_t>(2 * z.tokens * z.width);
  TARE_RETURN_IF_ERROR(FillBf16(gate_up, 2 * z.tokens * z.width));
  TARE_RETURN_IF_ERROR(FillBf16(act, z.tokens * z.width));
  const std::string t_w = fmt::format("T={} I={} bf16", z.tokens, z.width);
  for (const auto activation : {gate::Activation::kSilu, gate::Activation::kGeluTanh}) {
    gate::Params gp;
    gp.width = z.width;
    gp.activation = activation;
    rows.push_back(
        {fmt::format("gate {}", gate::ActivationName(activation)), t_w, bytes(3 * tw, 2), [=] {
           return gate::Forward(ctx, gp, {z.tokens, gate_up, gate_up + z.width, 2 * z.width, act});
         }});
  }
  gate::Params gp;
  gp.width = z.width;
  rows.push_back({"gate silu backward", t_w, bytes(5 * tw, 2), [=] {
                    gate::BackwardArgs b;
                    b.rows = z.tokens, b.gate = gate_up, b.up = gate_up + z.width;
                    b.stride = 2 * z.width, b.dy = act, b.dgate = dgate_up;
                    b.dup = dgate_up + z.width, b.dstride = 2 * z.width;
                    return gate::Backward(ctx, gp, b);
                  }});
  auto* logits = pool.Take<float>(z.head_rows * z.vocab);
  auto* dlogits = pool.Take<uint16_t>(z.head_rows * z.vocab);
  auto* targets = pool.Take<int32_t>(z.head_rows);
  auto* out4 = pool.Take<float>(4 * z.head_rows);
  auto* one = pool.Take<float>(z.head_rows);
  TARE_RETURN_IF_ERROR(FillF32(logits, z.head_rows * z.vocab, -8.0f, 8.0f));
  TARE_RETURN_IF_ERROR(FillBf16(dlogits, z.head_rows * z.vocab));  // logits of the bf16 arm
  TARE_RETURN_IF_ERROR(FillF32(one, z.head_rows, 0.5f, 1.0f));
  const double tv = static_cast<double>(z.head_rows) * static_cast<double>(z.vocab);
  const std::string t_v = fmt::format("T={} V={}", z.head_rows, z.vocab);
  logprob::Params lp;
  lp.vocab = z.vocab;
  logprob::Args la;
  la.rows = z.head_rows, la.logits = logits, la.targets = targets, la.logprob = out4;
  la.max = out4 + z.head_rows, la.log_sum = out4 + 2 * z.head_rows;
  rows.push_back({"logprob f32", t_v, bytes(tv, 4), [=] { return logprob::Forward(ctx, lp, la); }});
  logprob::Args le = la;
  le.entropy = out4 + 3 * z.head_rows;
  rows.push_back({"logprob f32 with entropy", t_v, bytes(tv, 4),
                  [=] { return logprob::Forward(ctx, lp, le); }});
  logprob::Params lpb = lp;
  lpb.logits_dtype = DType::kBF16;
  rows.push_back({"logprob bf16", t_v, bytes(tv, 2), [=] {
                    logprob::Args a = la;
                    a.logits = dlogits;
                    return logprob::Forward(ctx, lpb, a);
                  }});
  rows.push_back({"logprob f32 backward", t_v, bytes(tv, 4) + bytes(tv, 2), [=] {
                    logprob::BackwardArgs b;
                    b.rows = z.head_rows, b.logits = logits, b.targets = targets;
                    b.max = la.max, b.log_sum = la.log_sum, b.dlogprob = one, b.dlogits = dlogits;
                    return logprob::Backward(ctx, lp, b);
                  }});
  // Moments and weights lie where the logits do: the arms run one after another.
  auto* master = logits;
  const bool large = z.tokens > 1000;
  const int64_t count = std::min<int64_t>(z.params, large ? int64_t{1} << 25 : 1500);
  auto* v = pool.Take<float>(count);
  auto* grad = pool.Take<float>(count);
  auto* moment = pool.Take<float>(count);
  auto* copy = pool.Take<uint16_t>(count);
  TARE_RETURN_IF_ERROR(FillF32(grad, count, -1.0f, 1.0f));
  TARE_RETURN_IF_ERROR(FillF32(v, count, 0.0f, 1.0f));
  rows.push_back({"adamw with bf16 copy", fmt::format("N={}", count),
                  bytes(static_cast<double>(count), 30), [=] {
                    adamw::Args a;
                    a.count = count, a.master = master, a.m = moment, a.v = v, a.grad = grad;
                    a.copy = copy, a.lr = 1e-9f, a.step = 3;
                    return adamw::Step(ctx, {}, a);
                  }});
  auto* codes = pool.Take<uint8_t>(z.tokens * z.width);
  auto* scales = pool.Take<float>(z.tokens * ((z.width + 127) / 128));
  rows.push_back(
      {"quantize e4m3", t_w, bytes(tw, 2) + bytes(tw, 1) + bytes(tw / 128, 4), [=] {
         return quantize::Forward(ctx, {.width = z.width}, {z.tokens, act, codes, scales});
       }});
  rows.push_back(
      {"cast f32 to bf16", fmt::format("N={}", count), bytes(static_cast<double>(count), 6), [=] {
         return cast::Forward(ctx, {DType::kF32, DType::kBF16}, {count, grad, copy});
       }});
  // 128 experts, top 8: 8,192 tokens make 65,536 routed rows, which lie where the gradient of the
  // logits does.
  const int64_t top_k = 8, routed_tokens = large ? z.tokens : z.tokens / 8;
  auto* routed_rows = large ? dlogits : residual;
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < routed_tokens; ++t) {
    const auto first = static_cast<int64_t>(Next() % static_cast<uint64_t>(z.experts));
    for (int64_t s = 0; s < top_k; ++s)
      ids.push_back(static_cast<int32_t>((first + s * 5) % z.experts));
  }
  TARE_ASSIGN_OR_RETURN(const dispatch::Plan plan,
                        dispatch::BuildPlan(routed_tokens, top_k, z.experts, ids.data()));
  auto* row_token = pool.Take<int32_t>(static_cast<int64_t>(plan.row_token.size()));
  auto* slot_row = pool.Take<int32_t>(static_cast<int64_t>(plan.slot_row.size()));
  auto* weights = pool.Take<float>(routed_tokens * top_k);
  TARE_RETURN_IF_ERROR(Upload(row_token, plan.row_token));
  TARE_RETURN_IF_ERROR(Upload(slot_row, plan.slot_row));
  TARE_RETURN_IF_ERROR(FillF32(weights, routed_tokens * top_k, 0.0f, 0.25f));
  const int64_t routed = routed_tokens * top_k;
  TARE_CHECK(routed * z.hidden <= (large ? z.head_rows * z.vocab : z.tokens * z.hidden));
  const double rh = static_cast<double>(routed) * static_cast<double>(z.hidden);
  const std::string r_h = fmt::format("T={} k={} H={} bf16", routed_tokens, top_k, z.hidden);
  rows.push_back({"dispatch", r_h, bytes(rh + rh / 8, 2), [=] {
                    return dispatch::Forward(ctx, {z.hidden, top_k},
                                             {routed_tokens, routed, row_token, x, routed_rows});
                  }});
  rows.push_back({"combine", r_h, bytes(rh + rh / 8, 2), [=] {
                    return combine::Forward(
                        ctx, {z.hidden, top_k},
                        {routed_tokens, routed, routed_rows, slot_row, weights, y});
                  }});
  auto* router_logits = reinterpret_cast<float*>(dx);
  auto* chosen = pool.Take<int32_t>(z.tokens * top_k);
  auto* chosen_weights = pool.Take<float>(z.tokens * top_k);
  rows.push_back({"router", fmt::format("T={} E={} k={}", z.tokens, z.experts, top_k),
                  bytes(static_cast<double>(z.tokens * (z.experts + 2 * top_k)), 4), [=] {
                    router::Params p;
                    p.experts = z.experts, p.top_k = top_k;
                    router::Args a;
                    a.rows = z.tokens, a.logits = router_logits, a.ids = chosen;
                    a.weights = chosen_weights;
                    return router::Forward(ctx, p, a);
                  }});
  auto* token_ids = pool.Take<int32_t>(z.tokens);
  std::vector<int32_t> words;
  const int64_t vocab_rows = std::min<int64_t>(z.vocab, z.tokens * 2 * z.width / z.hidden);
  words.reserve(static_cast<size_t>(z.tokens));
  for (int64_t i = 0; i < z.tokens; ++i)
    words.push_back(static_cast<int32_t>(Next() % static_cast<uint64_t>(vocab_rows)));
  TARE_RETURN_IF_ERROR(Upload(token_ids, words));
  rows.push_back({"embedding", t_h, bytes(2 * th, 2), [=] {
                    embedding::Params p;
                    p.vocab = vocab_rows, p.hidden = z.hidden;
                    return embedding::Forward(ctx, p, {z.tokens, token_ids, gate_up, y});
                  }});
  const int64_t batch = std::min<int64_t>(64, z.head_rows);
  auto* seeds = pool.Take<uint64_t>(batch);
  auto* sampled = pool.Take<int32_t>(batch);
  auto* top_ks = pool.Take<int32_t>(batch);
  auto* top_ps = pool.Take<float>(batch);
  TARE_RETURN_IF_ERROR(Upload(top_ks, std::vector<int32_t>(static_cast<size_t>(batch), 50)));
  TARE_RETURN_IF_ERROR(FillF32(top_ps, batch, 0.9f, 0.95f));
  rows.push_back({"sampling top-k 50 top-p 0.9", fmt::format("B={} V={} f32", batch, z.vocab),
                  bytes(static_cast<double>(batch * z.vocab), 4), [=] {
                    sampling::Args a;
                    a.rows = batch, a.logits = logits, a.seed = seeds, a.position = positions;
                    a.top_k = top_ks, a.top_p = top_ps, a.token = sampled, a.logprob = out4;
                    return sampling::Forward(ctx, {.vocab = z.vocab}, a);
                  }});
  return rows;
}

Status Main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "bits-small";
  TARE_ASSIGN_OR_RETURN(Bench bench, Bench::Create());
  TARE_ASSIGN_OR_RETURN(const std::string facts, cuda::DeviceFacts());
  std::printf("{%s}\n", facts.c_str());
  Pool pool;
  const bool small = mode == "bits-small";
  TARE_RETURN_IF_ERROR(pool.Create(small ? size_t{64} << 20 : size_t{7} << 30));
  TARE_ASSIGN_OR_RETURN(std::vector<Row> rows, Rows(pool, small ? kSmall : kLarge, bench.stream()));
  if (small) {
    for (const Row& row : rows) {
      TARE_RETURN_IF_ERROR(row.call().Annotate(row.op));
      TARE_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(bench.stream()));
    }
    std::printf("%zu row operators ran\n", rows.size());
    return cuda::TakeRefusal(bench.stream());
  }
  if (mode != "table" || argc < 3)
    return InvalidArgument("unknown mode {}; bits-small or table OUT.json", mode);
  Pool copies;
  constexpr size_t kCopy = size_t{512} << 20;
  TARE_RETURN_IF_ERROR(copies.Create(2 * kCopy));
  auto* from = copies.Take<uint8_t>(kCopy);
  auto* to = copies.Take<uint8_t>(kCopy);
  TARE_ASSIGN_OR_RETURN(
      const auto copied,
      bench.Time({{"copy", [&] { return cuda::LaunchCopy(from, to, kCopy, bench.stream()); }}}, 4,
                 9));
  const double copy = 2.0 * static_cast<double>(kCopy) / (copied[0].median_us * 1e-6);
  std::printf("copy %.3f TB/s\n\n", copy * 1e-12);
  std::printf(
      "| operator | shape | us (low-high) | TB/s | share of copy |\n|---|---|---|---|---|\n");
  std::string json = fmt::format(
      "{{\"schema\": \"tare.rows_cuda_bench.1\", {}, \"copy_bytes_per_s\": {:.4g},\n\"rows\": [",
      facts, copy);
  bool first = true;
  for (Row& row : rows) {
    TARE_ASSIGN_OR_RETURN(const auto time, bench.Time({{row.op, row.call}}, 5, 9));
    row.time = time[0];
    const double rate = row.bytes / (row.time.median_us * 1e-6);
    std::printf("| %s | %s | %.1f (%.1f-%.1f) | %.2f | %.2f |\n", row.op.c_str(), row.shape.c_str(),
                row.time.median_us, row.time.low_us, row.time.high_us, rate * 1e-12, rate / copy);
    std::fflush(stdout);
    json += fmt::format(
        "{}\n{{\"op\": \"{}\", \"shape\": \"{}\", \"bytes\": {:.0f}, \"us\": [{:.3f}, {:.3f}, "
        "{:.3f}], \"share_of_copy\": {:.4f}}}",
        first ? "" : ",", row.op, row.shape, row.bytes, row.time.low_us, row.time.median_us,
        row.time.high_us, rate / copy);
    first = false;
  }
  json += "\n]}\n";
  TARE_RETURN_IF_ERROR(Env::Real()->WriteFileAtomic(argv[2], json));
  return cuda::TakeRefusal(bench.stream());
}

}  // namespace
}  // namespace tare::ops

int main(int argc, char** argv) {
  const tare::Status status = tare::ops::Main(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 70;
}
