#include <vector>

#include "base/check.h"
#include "ops/bench.h"
#include "ops/gate/gate.h"

namespace tare::ops::gate {
namespace {

void AddShape(BenchList& list, int64_t rows, int64_t width, DType dtype) {
  const int64_t bytes = rows * width * SizeOf(dtype);
  const std::string shape = fmt::format("T={} I={} {}", rows, width, DTypeName(dtype));
  struct State {
    std::vector<char> gate_up, dgate_up, y, dy;
  };
  const Params p = {.width = width, .dtype = dtype, .grad_dtype = dtype};
  const auto state = [bytes] {
    auto s = std::make_shared<State>();
    s->gate_up.assign(static_cast<size_t>(2 * bytes), 0x3f);  // bf16 and f32 near 0.747
    s->dgate_up.assign(static_cast<size_t>(2 * bytes), 0);
    s->y.assign(static_cast<size_t>(bytes), 0);
    s->dy.assign(static_cast<size_t>(bytes), 0x3f);
    return s;
  };
  const int64_t half = width * SizeOf(dtype);
  list.Add({"gate", "forward", shape, "copy", 3 * bytes, [=](ThreadPool& pool) {
              auto s = state();
              const auto ours = [=, &pool] {
                Ctx ctx;
                ctx.pool = &pool;
                const Status status = Forward(
                    ctx, p,
                    {rows, s->gate_up.data(), s->gate_up.data() + half, 2 * width, s->y.data()});
                TARE_CHECK(status.ok()) << status.ToString();
              };
              return WithCopyPeer(pool, 2 * bytes, bytes, ours, s);
            }});
  list.Add({"gate", "backward", shape, "copy", 5 * bytes, [=](ThreadPool& pool) {
              auto s = state();
              const auto ours = [=, &pool] {
                Ctx ctx;
                ctx.pool = &pool;
                BackwardArgs a;
                a.rows = rows;
                a.gate = s->gate_up.data();
                a.up = s->gate_up.data() + half;
                a.stride = a.dstride = 2 * width;
                a.dy = s->dy.data();
                a.dgate = s->dgate_up.data();
                a.dup = s->dgate_up.data() + half;
                const Status status = Backward(ctx, p, a);
                TARE_CHECK(status.ok()) << status.ToString();
              };
              return WithCopyPeer(pool, 3 * bytes, 2 * bytes, ours, s);
            }});
}

}  // namespace

void AddBenches(BenchList& list) {
  AddShape(list, 2048, 1536, DType::kF32);
  AddShape(list, 2048, 1536, DType::kBF16);
  AddShape(list, 1024, 12288, DType::kBF16);
}

}  // namespace tare::ops::gate
