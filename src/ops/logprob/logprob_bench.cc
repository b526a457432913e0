#include <vector>

#include "base/check.h"
#include "ops/bench.h"
#include "ops/logprob/logprob.h"

namespace tare::ops::logprob {
namespace {

struct State {
  std::vector<char> logits, dlogits;
  std::vector<int32_t> targets;
  std::vector<float> out, entropy, max, log_sum, dlogprob;
};

void AddShape(BenchList& list, int64_t rows, int64_t vocab, DType dtype) {
  const int64_t bytes = rows * vocab * SizeOf(dtype);
  const std::string shape = fmt::format("T={} V={} {}", rows, vocab, DTypeName(dtype));
  const Params p = {.vocab = vocab, .logits_dtype = dtype, .grad_dtype = dtype};
  const auto state = [rows, vocab, bytes, dtype] {
    auto s = std::make_shared<State>();
    s->logits.assign(static_cast<size_t>(bytes), 0);
    s->dlogits.assign(static_cast<size_t>(bytes), 0);
    uint32_t random = 1;
    for (int64_t i = 0; i < rows * vocab; ++i) {
      random = random * 1664525u + 1013904223u;
      const float v = static_cast<float>(random >> 8) * 0x1p-21f - 4.0f;  // [-4, 4)
      const uint32_t bits = __builtin_bit_cast(uint32_t, v);
      if (dtype == DType::kF32) {
        reinterpret_cast<uint32_t*>(s->logits.data())[i] = bits;
      } else {
        reinterpret_cast<uint16_t*>(s->logits.data())[i] = static_cast<uint16_t>(bits >> 16);
      }
    }
    s->targets.assign(static_cast<size_t>(rows), 7);
    for (auto* v : {&s->out, &s->entropy, &s->max, &s->log_sum})
      v->assign(static_cast<size_t>(rows), 0.0f);
    s->dlogprob.assign(static_cast<size_t>(rows), 1.0f);
    return s;
  };
  const auto forward = [=](State* s, ThreadPool& pool, bool entropy) {
    Ctx ctx;
    ctx.pool = &pool;
    Args a;
    a.rows = rows;
    a.logits = s->logits.data();
    a.targets = s->targets.data();
    a.logprob = s->out.data();
    a.max = s->max.data();
    a.log_sum = s->log_sum.data();
    if (entropy) a.entropy = s->entropy.data();
    const Status status = Forward(ctx, p, a);
    TARE_CHECK(status.ok()) << status.ToString();
  };
  for (const bool entropy : {false, true}) {
    list.Add({"logprob", entropy ? "forward+entropy" : "forward", shape, "read", bytes,
              [=](ThreadPool& pool) {
                auto s = state();
                return WithCopyPeer(
                    pool, bytes, 0, [=, &pool] { forward(s.get(), pool, entropy); }, s);
              }});
  }
  list.Add({"logprob", "backward", shape, "copy", 2 * bytes, [=](ThreadPool& pool) {
              auto s = state();
              forward(s.get(), pool, false);
              const auto ours = [=, &pool] {
                Ctx ctx;
                ctx.pool = &pool;
                BackwardArgs a;
                a.rows = rows;
                a.logits = s->logits.data();
                a.targets = s->targets.data();
                a.max = s->max.data();
                a.log_sum = s->log_sum.data();
                a.dlogprob = s->dlogprob.data();
                a.dlogits = s->dlogits.data();
                const Status status = Backward(ctx, p, a);
                TARE_CHECK(status.ok()) << status.ToString();
              };
              return WithCopyPeer(pool, bytes, bytes, ours, s);
            }});
}

}  // namespace

void AddBenches(BenchList& list) {
  AddShape(list, 1, 49152, DType::kF32);
  AddShape(list, 256, 49152, DType::kF32);
  AddShape(list, 256, 49152, DType::kBF16);
  AddShape(list, 64, 151936, DType::kF32);
}

}  // namespace tare::ops::logprob
